// The mma.sync GEMM (Ampere, Ada, and whatever runs their code): 128 x 128 tiles, bf16 and fp16,
// fp32 accumulation.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

inline constexpr int kGemmSm80TileM = 128;
inline constexpr int kGemmSm80TileN = 128;

// Whether the kernel can take these operands (gemm_supported asks this): k > 0, a 16-bit type,
// 16-byte aligned pointers, and every contiguous dimension and stride a multiple of 8 elements. A
// packed output asks nothing of n.
bool gemm_sm80_supported(const GemmParams& params);

// Enqueues the GEMM on a grid of min(params.ctas, tiles) CTAs. cudaErrorInvalidValue: unsupported
// operands, no CTAs, or a tile order that does not cover the output with 128 x 128 tiles.
cudaError_t launch_gemm_sm80(const GemmParams& params, cudaStream_t stream);

// Loads all instances on the current device.
cudaError_t load_gemm_sm80();

// CTAs of this kernel that fit on one SM of the current device together, with
// params.smem_pad_bytes; 0 where it cannot run. A grid meant to leave whole SMs free has at most
// one CTA for each SM that it may use: the hardware spreads CTAs over all SMs before it doubles up.
// Asks the driver, so it belongs in planning and not in a call.
int gemm_sm80_ctas_per_sm(const GemmParams& params);

}  // namespace overlap::kernels
