// The Hopper GEMM's instances: launch and load functions, so that only their own files include
// CUTLASS.
#pragma once

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

// Both weight layouts of one kernel and dtype.
struct GemmSm90Instance {
  cudaError_t (*launch)(const GemmParams& params, cudaStream_t stream);
  cudaError_t (*load)();
};

GemmSm90Instance gemm_sm90_pingpong_bf16();
GemmSm90Instance gemm_sm90_pingpong_fp16();
GemmSm90Instance gemm_sm90_pingpong_wide_bf16();
GemmSm90Instance gemm_sm90_pingpong_wide_fp16();
GemmSm90Instance gemm_sm90_cooperative_bf16();
GemmSm90Instance gemm_sm90_cooperative_fp16();

// Ping-pong, with a source that is added to the product, or with several outputs.
GemmSm90Instance gemm_sm90_peers_bf16();
GemmSm90Instance gemm_sm90_peers_fp16();
GemmSm90Instance gemm_sm90_peers_wide_bf16();
GemmSm90Instance gemm_sm90_peers_wide_fp16();

// fp8 with scales: the input's type, times e4m3.
GemmSm90Instance gemm_sm90_pingpong_e4m3();
GemmSm90Instance gemm_sm90_pingpong_e5m2();
GemmSm90Instance gemm_sm90_pingpong_wide_e4m3();
GemmSm90Instance gemm_sm90_pingpong_wide_e5m2();
GemmSm90Instance gemm_sm90_peers_e4m3();
GemmSm90Instance gemm_sm90_peers_e5m2();
GemmSm90Instance gemm_sm90_peers_wide_e4m3();
GemmSm90Instance gemm_sm90_peers_wide_e5m2();

}  // namespace overlap::kernels
