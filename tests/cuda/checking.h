// What the kernel checks stand on: poisoned device memory, operands, references, and the comparison
// element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

#include "plan/plan.h"
#include "plan/tile_order.h"

namespace overlap::check {

inline constexpr int64_t kGuard = 4096;  // poisoned elements on either side of an output

[[noreturn]] inline __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fputs("kernel_check: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  std::exit(1);
}

#define CUDA_CHECK(call)                                                    \
  do {                                                                      \
    const cudaError_t error_ = (call);                                      \
    if (error_ != cudaSuccess)                                              \
      fail("line %d: %s: %s", __LINE__, #call, cudaGetErrorString(error_)); \
  } while (false)

// Device memory, poisoned with 0xff: NaN in every float type.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t elements) : bytes_(std::max<int64_t>(elements, 1) * sizeof(T)) {
    CUDA_CHECK(cudaMalloc(&data_, bytes_));
    CUDA_CHECK(cudaMemset(data_, 0xff, bytes_));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  int64_t elements() const { return bytes_ / static_cast<int64_t>(sizeof(T)); }
  void poison(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(data_, 0xff, bytes_, stream)); }
  void zero(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(data_, 0, bytes_, stream)); }

 private:
  T* data_ = nullptr;
  int64_t bytes_;
};

// Integers from -3 to 3, or thirds of them (which round), in [rows, columns]; what lies between the
// rows stays poisoned.
template <class T>
__global__ void fill_kernel(T* data, int64_t rows, int64_t columns, int64_t stride, uint32_t seed,
                            float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u + seed * 40503u;
    hash = (hash ^ (hash >> 15)) * 2246822519u;
    hash ^= hash >> 13;
    data[i / columns * stride + i % columns] =
        static_cast<T>(static_cast<float>(static_cast<int>(hash % 7) - 3) * scale);
  }
}

// input @ weight^T, plus source where it is not null, in fp32, rounded once.
template <class T>
__global__ void reference_gemm_kernel(const T* input, int64_t input_stride, const T* weight,
                                      int64_t weight_stride_n, int64_t weight_stride_k,
                                      const T* source, int64_t source_stride, T* output, int64_t m,
                                      int64_t n, int64_t k) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < m * n;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum =
        source == nullptr ? 0.0f : static_cast<float>(source[i / n * source_stride + i % n]);
    for (int64_t j = 0; j < k; ++j) {
      sum += static_cast<float>(input[i / n * input_stride + j]) *
             static_cast<float>(weight[i % n * weight_stride_n + j * weight_stride_k]);
    }
    output[i] = static_cast<T>(sum);
  }
}

template <class T>
__global__ void reference_bias_kernel(const T* source, const T* bias, T* output, int64_t m,
                                      int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < m * n;
       i += int64_t{gridDim.x} * blockDim.x) {
    output[i] =
        bias == nullptr
            ? source[i]
            : static_cast<T>(static_cast<float>(source[i]) + static_cast<float>(bias[i % n]));
  }
}

struct Mismatch {
  unsigned long long count;
  long long index;
  float got;
  float want;
};

// What a buffer must hold: the reference in row-major rows or in packed tiles (zeros where a tile
// leaves the matrix), and poison everywhere else.
template <class T>
struct Expectation {
  const T* reference;  // [m, n], contiguous
  int64_t m;
  int64_t n;
  int64_t stride;  // row-major
  bool packed;
  int32_t tile_m;
  int32_t tile_n;
  plan::TileOrder order;

  __host__ __device__ int64_t elements() const {
    return packed ? plan::packed_offset(order.num_tiles(), tile_m, tile_n) : m * stride;
  }
};

template <class T>
__global__ void check_kernel(const T* output, int64_t first, int64_t last,
                             const __grid_constant__ Expectation<T> expectation,
                             Mismatch* mismatch) {
  const Expectation<T>& e = expectation;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = first + blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < last; i += step) {
    int64_t row = e.m;
    int64_t column = e.n;
    const bool inside = i >= 0 && i < e.elements();
    if (inside && e.packed) {
      const int64_t tile = i / (int64_t{e.tile_m} * e.tile_n);
      const int64_t in_tile = i - tile * e.tile_m * e.tile_n;
      const plan::TileCoord coord = plan::tile_coord(e.order, static_cast<int32_t>(tile));
      row = int64_t{coord.row} * e.tile_m + in_tile / e.tile_n;
      column = int64_t{coord.column} * e.tile_n + in_tile % e.tile_n;
    } else if (inside) {
      row = i / e.stride;
      column = i % e.stride;
    }
    const bool in_matrix = row < e.m && column < e.n;
    const float got = static_cast<float>(output[i]);
    const float want = in_matrix ? static_cast<float>(e.reference[row * e.n + column]) : 0.0f;
    bool good = got == want;
    if (!in_matrix && !(inside && e.packed)) {
      good = true;
      for (size_t byte = 0; byte < sizeof(T); ++byte) {
        good = good && reinterpret_cast<const unsigned char*>(output + i)[byte] == 0xff;
      }
    }
    if (!good && atomicAdd(&mismatch->count, 1ull) == 0) {
      mismatch->index = i;
      mismatch->got = got;
      mismatch->want = in_matrix || (inside && e.packed) ? want : __int_as_float(-1);
    }
  }
}

template <class T>
void launch_check(const T* output, int64_t first, int64_t last, const Expectation<T>& expectation,
                  Mismatch* mismatch, cudaStream_t stream) {
  check_kernel<T><<<16, 256, 0, stream>>>(output, first, last, expectation, mismatch);
  CUDA_CHECK(cudaGetLastError());
}

inline void expect_no_mismatch(const Buffer<Mismatch>& device, const std::string& what) {
  Mismatch mismatch;
  CUDA_CHECK(cudaMemcpy(&mismatch, device.data(), sizeof(mismatch), cudaMemcpyDeviceToHost));
  if (mismatch.count != 0) {
    fail("%s: %llu elements are wrong; element %lld is %g, expected %g (nan: untouched)",
         what.c_str(), mismatch.count, mismatch.index, mismatch.got, mismatch.want);
  }
}

// The whole allocation of an output that begins kGuard elements in.
template <class T>
void expect(const Buffer<T>& output, const Expectation<T>& expectation, const std::string& what) {
  Buffer<Mismatch> mismatch(1);
  mismatch.zero(nullptr);
  launch_check(output.data() + kGuard, -kGuard, output.elements() - kGuard, expectation,
               mismatch.data(), nullptr);
  expect_no_mismatch(mismatch, what);
}

template <class T>
constexpr plan::DType dtype_of() {
  return std::is_same_v<T, float>    ? plan::DType::kFloat32
         : std::is_same_v<T, __half> ? plan::DType::kFloat16
                                     : plan::DType::kBFloat16;
}

template <class T>
void fill(T* data, int64_t rows, int64_t columns, int64_t stride, uint32_t seed,
          float scale = 1.0f) {
  fill_kernel<<<256, 256>>>(data, rows, columns, stride, seed, scale);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace overlap::check
