// Sums of the ranks' terms, one access at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/chunk/element.cuh"
#include "kernels/peer/pair_sum.cuh"

namespace overlap::kernels {

struct Nothing {};

template <class T, int kVector>
__device__ __forceinline__ Access<T, kVector> add_bias(Access<T, kVector> value, const void* bias,
                                                       int64_t index, int64_t row_count) {
  if (bias == nullptr) return value;
  const auto term = static_cast<const Access<T, kVector>*>(bias)[index % row_count];
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    round_to(to_float(value.element[e]) + to_float(term.element[e]), value.element[e]);
  }
  return value;
}

// kByPairs: by pairs; else in order, rounded once.
template <class T, int kVector, bool kByPairs>
struct Sum {
  float value[kVector];
  std::conditional_t<kByPairs, PairSum<kVector>, Nothing> pairs;

  __device__ __forceinline__ Sum() {
#pragma unroll
    for (int e = 0; e < kVector; ++e) value[e] = kNoSum;
  }

  __device__ __forceinline__ void add(const Access<T, kVector>& term, int rank) {
    if constexpr (kByPairs) {
      float terms[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) terms[e] = to_float(term.element[e]);
      pairs.add(terms, rank, [](float sum) {
        T rounded;
        round_to(sum, rounded);
        return to_float(rounded);
      });
#pragma unroll
      for (int e = 0; e < kVector; ++e) value[e] = pairs.value[e];
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) value[e] += to_float(term.element[e]);
    }
  }
  // Rounded before the bias is added, as the unfused composition rounds it.
  __device__ __forceinline__ Access<T, kVector> rounded(const void* bias, int64_t index,
                                                        int64_t row_count) const {
    Access<T, kVector> result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) round_to(value[e], result.element[e]);
    return add_bias(result, bias, index, row_count);
  }
};

}  // namespace overlap::kernels
