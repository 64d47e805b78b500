// The Hopper GEMM's instances: launch and load functions, so that only gemm_instance_sm90.cu includes CUTLASS.
#pragma once

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

// Both weight layouts of one kernel and data type.
struct GemmSm90Instance {
  cudaError_t (*launch)(const GemmParams& params, cudaStream_t stream) = nullptr;
  cudaError_t (*load)() = nullptr;
};

// kDType is the input's type; an fp8 input has scales, and its weight is e4m3. kPeers adds a source to the product, or
// stores several outputs; ping-pong kernels have it. kInGroups multiplies K in groups. gemm_instance_sm90.cu instantiates
// what a build holds.
template <plan::Kernel kKernel, plan::DType kDType, bool kPeers, bool kInGroups>
GemmSm90Instance gemm_sm90_instance();

}  // namespace overlap::kernels
