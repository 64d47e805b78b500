// The mma.sync GEMM (Ampere, Ada, and whatever runs their code): 128 x 128 tiles, bf16 and fp16,
// fp32 accumulation.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

inline constexpr int kGemmSm80TileM = 128;
inline constexpr int kGemmSm80TileN = 128;

// Shared memory of a CTA without padding.
inline constexpr int kGemmSm80SharedBytes = plan::traits(plan::Kernel::kSm80).block_bytes;

// Returns true if the kernel takes these operands (gemm_supported asks this): k > 0, a 16-bit type,
// 16-byte aligned pointers, and every contiguous dimension and stride a multiple of 8 elements. A
// packed output asks nothing of n.
bool gemm_sm80_supported(const GemmParams& params);

// Enqueues the GEMM on params.ctas SMs: where that is all of them, two CTAs on each, if both have room with
// params.smem_pad_bytes, else one. cudaErrorInvalidValue: unsupported operands, no CTAs, or a tile order that does not
// cover the output with 128 x 128 tiles.
cudaError_t launch_gemm_sm80(const GemmParams& params, cudaStream_t stream);

// Loads all instances on the current device.
cudaError_t load_gemm_sm80();

}  // namespace overlap::kernels
