// Elements as kernels add them: in fp32 (doubles as they are), several to an access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace overlap::kernels {

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Access {
  T element[kVector];
};

__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ double to_float(double value) {
  return value;
}
__device__ __forceinline__ void round_to(float value, __nv_bfloat16& result) {
  result = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void round_to(float value, __half& result) {
  result = __float2half_rn(value);
}
__device__ __forceinline__ void round_to(float value, float& result) {
  result = value;
}
__device__ __forceinline__ void round_to(double value, double& result) {
  result = value;
}

// Two neighbours of a 16-bit type.
template <class T>
__device__ __forceinline__ uint32_t round_pair(float left, float right) {
  T pair[2];
  round_to(left, pair[0]);
  round_to(right, pair[1]);
  uint32_t bits;
  memcpy(&bits, pair, 4);
  return bits;
}

}  // namespace overlap::kernels
