// Casts to float8_e4m3fn with a scale.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace overlap::kernels {

constexpr float kLargest = 448.0f;   // of float8_e4m3fn
constexpr float kSmallest = 1e-12f;  // that a scale stands for

// A maximum that a NaN wins.
__device__ __forceinline__ float larger(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

__device__ __forceinline__ float scale_of(float largest) {
  return __fdiv_rn(larger(largest, kSmallest), kLargest);
}

// Two neighbours.
__device__ __forceinline__ uint16_t to_fp8(float first, float second, float scale) {
  const auto scaled = [&](float value) {
    const float quotient = __fdiv_rn(value, scale);
    return quotient != quotient ? quotient : fminf(fmaxf(quotient, -kLargest), kLargest);
  };
  return __nv_cvt_float2_to_fp8x2(make_float2(scaled(first), scaled(second)), __NV_SATFINITE,
                                  __NV_E4M3);
}

}  // namespace overlap::kernels
