// Parts of the kernels of a mixture's rows: a block takes a row or several, its threads 16 bytes each where alignment allows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/chunk/element.cuh"
#include "kernels/moe/moe.h"

namespace overlap::kernels {

constexpr int kMostThreads = 256;

// The type of sums and products.
template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <class T>
using wide_t = typename Wide<T>::type;

// Products that are rounded before they are added, as the composition's are.
__device__ __forceinline__ float add_product(float sum, float a, float b) {
  return __fadd_rn(sum, __fmul_rn(a, b));
}
__device__ __forceinline__ double add_product(double sum, double a, double b) {
  return __dadd_rn(sum, __dmul_rn(a, b));
}

template <class T, int kVector>
__device__ __forceinline__ Access<T, kVector> load(const void* base, int64_t element) {
  return *reinterpret_cast<const Access<T, kVector>*>(static_cast<const T*>(base) + element);
}
template <class T, int kVector>
__device__ __forceinline__ void store(void* base, int64_t element,
                                      const Access<T, kVector>& value) {
  *reinterpret_cast<Access<T, kVector>*>(static_cast<T*>(base) + element) = value;
}

template <class T>
int vector_of(std::initializer_list<int64_t> elements,
              std::initializer_list<const void*> pointers) {
  constexpr int kVector = 16 / sizeof(T);
  const bool whole =
      std::all_of(elements.begin(), elements.end(), [](int64_t n) { return n % kVector == 0; });
  const bool aligned = std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  });
  return whole && aligned ? kVector : 1;
}

// Whole warps, as many threads as a row has accesses.
inline unsigned threads_of(int64_t width, int vector) {
  const int64_t accesses = (width + vector - 1) / vector;
  return static_cast<unsigned>(std::clamp<int64_t>((accesses + 31) / 32 * 32, 32, kMostThreads));
}

// Calls launch(T{}) with the element's type.
template <class Launch>
cudaError_t by_element(Element element, int64_t rows, int64_t width, const Launch& launch) {
  if (rows > 0 && width > 0) {
    switch (element) {
      case Element::kBFloat16:
        launch(__nv_bfloat16{});
        break;
      case Element::kFloat16:
        launch(__half{});
        break;
      case Element::kFloat32:
        launch(float{});
        break;
      case Element::kFloat64:
        launch(double{});
        break;
    }
  }
  return cudaGetLastError();
}

}  // namespace overlap::kernels
