// Which GEMM takes which operands, and loading them all before anything waits.
#include "kernels/gemm.h"

#include "kernels/peer_collective.h"
#include "kernels/peer_exchange.h"
#include "kernels/peer_low_latency.h"
#include "kernels/peer_signal.h"
#include "kernels/reorder.h"
#include "kernels/signal.h"

#if defined(OVERLAP_WITH_SM80)
#include "kernels/gemm_sm80.h"
#endif
#if defined(OVERLAP_WITH_SM90)
#include "kernels/gemm_sm90_instance.h"
#endif

namespace overlap::kernels {
namespace {

// What only the instances for peers take.
bool for_peers(const GemmParams& params) {
  return params.sources[0] != nullptr || params.num_mirrors > 0 || params.num_more_outputs > 0;
}

#if defined(OVERLAP_WITH_SM90)
constexpr int64_t kMaxTmaExtent = int64_t{1} << 31;
constexpr int64_t kTmaElements = 8;  // of 16 bits, in 16 bytes

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// What TMA can address: 16-byte aligned bases and strides, rows of whole 16-byte pieces, extents
// that fit an int.
bool gemm_sm90_supported(const GemmParams& params) {
  if (params.dtype != plan::DType::kBFloat16 && params.dtype != plan::DType::kFloat16) return false;
  if (params.m <= 0 || params.n <= 0 || params.k <= 0) return false;
  if (params.m >= kMaxTmaExtent || params.n >= kMaxTmaExtent || params.k >= kMaxTmaExtent)
    return false;
  if (params.n % kTmaElements != 0 || params.k % kTmaElements != 0) return false;
  const bool row_major = params.layout == plan::Layout::kRowMajor;
  if (for_peers(params) && !row_major) return false;
  if (params.rows.mode != plan::RowMap::Mode::kSplit && params.num_more_outputs > 0) return false;
  for (int32_t output = 0; output < params.num_more_outputs; ++output) {
    if (!is_aligned(params.more_outputs[output])) return false;
  }
  for (int32_t mirror = 0; mirror < params.num_mirrors; ++mirror) {
    if (!is_aligned(params.mirrors[mirror])) return false;
  }
  for (const void* source : params.sources) {
    if (!is_aligned(source)) return false;
  }
  return is_aligned(params.input) && is_aligned(params.own_input) && is_aligned(params.weight) &&
         is_aligned(params.output) && is_aligned(params.arriving) && is_aligned(params.collected) &&
         params.input_stride % kTmaElements == 0 && params.weight_stride % kTmaElements == 0 &&
         (!row_major || params.output_stride % kTmaElements == 0);
}

GemmSm90Instance sm90_instance(plan::Kernel kernel, plan::DType dtype, bool peers) {
  const bool bf16 = dtype == plan::DType::kBFloat16;
  switch (kernel) {
    case plan::Kernel::kSm90PingpongWide:
      if (peers) return bf16 ? gemm_sm90_peers_wide_bf16() : gemm_sm90_peers_wide_fp16();
      return bf16 ? gemm_sm90_pingpong_wide_bf16() : gemm_sm90_pingpong_wide_fp16();
    case plan::Kernel::kSm90Cooperative:
      return bf16 ? gemm_sm90_cooperative_bf16() : gemm_sm90_cooperative_fp16();
    default:
      if (peers) return bf16 ? gemm_sm90_peers_bf16() : gemm_sm90_peers_fp16();
      return bf16 ? gemm_sm90_pingpong_bf16() : gemm_sm90_pingpong_fp16();
  }
}
#endif

// The instances for peers hand out all tiles, of one input.
bool input_supported(const GemmParams& params) {
  const bool gathers = params.rows.mode == plan::RowMap::Mode::kGather;
  if (gathers != (params.own_input != nullptr)) return false;
  if (params.arrivals.flags != nullptr && !gathers) return false;
  const bool whole = params.first_tile == 0 && params.tiles_end() == params.order.num_tiles();
  return !for_peers(params) || (!gathers && whole && params.num_copies == 0);
}

}  // namespace

bool gemm_supported(plan::Kernel kernel, const GemmParams& params) {
  if (!input_supported(params)) return false;
  const bool awaits_or_ends = params.arrivals.flags != nullptr || params.ending.count > 0;
  if (awaits_or_ends && !copies_beside(kernel)) return false;
  switch (kernel) {
#if defined(OVERLAP_WITH_SM80)
    case plan::Kernel::kSm80:
      return !for_peers(params) && gemm_sm80_supported(params);
#endif
#if defined(OVERLAP_WITH_SM90)
    case plan::Kernel::kSm90Pingpong:
    case plan::Kernel::kSm90PingpongWide:
      return gemm_sm90_supported(params);
    case plan::Kernel::kSm90Cooperative:
      return !for_peers(params) && gemm_sm90_supported(params);
#endif
    default:
      return false;
  }
}

bool copies_beside(plan::Kernel kernel) {
  return plan::is_sm90(kernel);
}

cudaError_t launch_gemm(plan::Kernel kernel, const GemmParams& params, cudaStream_t stream) {
  switch (kernel) {
#if defined(OVERLAP_WITH_SM80)
    case plan::Kernel::kSm80:
      return launch_gemm_sm80(params, stream);
#endif
#if defined(OVERLAP_WITH_SM90)
    case plan::Kernel::kSm90Pingpong:
    case plan::Kernel::kSm90PingpongWide:
    case plan::Kernel::kSm90Cooperative:
      return sm90_instance(kernel, params.dtype, for_peers(params)).launch(params, stream);
#endif
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t load_kernels() {
  cudaError_t error = load_signal_kernels();
  if (error == cudaSuccess) error = load_reorder_kernels();
  if (error == cudaSuccess) error = load_peer_signal_kernels();
  if (error == cudaSuccess) error = load_peer_collective_kernels();
  if (error == cudaSuccess) error = load_peer_low_latency_kernels();
  if (error == cudaSuccess) error = load_peer_exchange_kernel();
#if defined(OVERLAP_WITH_SM80)
  if (error == cudaSuccess) error = load_gemm_sm80();
#endif
#if defined(OVERLAP_WITH_SM90)
  int device = 0;
  int major = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess && major == 9) {
    for (const plan::Kernel kernel : {plan::Kernel::kSm90Pingpong, plan::Kernel::kSm90PingpongWide,
                                      plan::Kernel::kSm90Cooperative}) {
      for (const plan::DType dtype : {plan::DType::kBFloat16, plan::DType::kFloat16}) {
        if (error == cudaSuccess) error = sm90_instance(kernel, dtype, false).load();
        if (error == cudaSuccess && plan::is_pingpong(kernel)) {
          error = sm90_instance(kernel, dtype, true).load();
        }
      }
    }
  }
#endif
  return error;
}

}  // namespace overlap::kernels
