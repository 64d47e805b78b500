// Sums by pairs, pairs of pairs and so on, each rounded: the same whether one rank adds them all, or each of several some.
#pragma once

#include <cstdint>

namespace overlap::kernels {

// The sum of no terms: with 0, terms of -0 would become 0.
constexpr float kNoSum = -0.0f;

// Takes 1, 2, 4 or 8 terms of `kCount` numbers in their order. `round(x)`: x as the terms' type holds it.
template <int kCount>
struct PairSum {
  static constexpr int kLevels = 3;
  float waiting[kLevels][kCount];  // the sums of 1, 2 and 4 terms that wait for their partner
  float value[kCount];             // after the last term: the sum

  template <class Round>
  __device__ __forceinline__ void add(const float (&term)[kCount], int number, Round round) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = term[i];
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if ((number >> level & 1) == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) waiting[level][i] = value[i];
        break;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = round(waiting[level][i] + value[i]);
    }
  }
};

}  // namespace overlap::kernels
