// The choice of a GEMM for given operands, and the loading of all kernels before anything waits.
#include "kernels/gemm/gemm.h"

#include "kernels/chunk/rectangles.h"
#include "kernels/chunk/reorder.h"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/peer/peer_finish.h"
#include "kernels/peer/peer_low_latency.h"
#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "plan/plan.h"

#if defined(OVERLAP_WITH_SM80)
#include "kernels/gemm/gemm_sm80.h"
#endif
#if defined(OVERLAP_WITH_SM90)
#include "kernels/gemm/few_rows.h"
#include "kernels/gemm/gemm_sm90_instance.h"
#include "kernels/moe/grouped_gemm.h"
#endif

namespace overlap::kernels {
namespace {

#if defined(OVERLAP_WITH_SM90)
constexpr int64_t kMaxTmaExtent = int64_t{1} << 31;
constexpr int64_t kTmaBytes = 16;

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kTmaBytes == 0;
}

// The instances for peers hand out all tiles, of one input, to row-major outputs.
bool peers_supported(const GemmParams& params) {
  using Mode = plan::RowMap::Mode;
  const GemmPeers& peers = *params.peers;
  const bool whole = params.first_tile == 0 && params.tiles_end() == params.order.num_tiles();
  const bool has_outputs = params.rows.mode == Mode::kSplit || params.rows.mode == Mode::kRanges;
  if (params.layout != plan::Layout::kRowMajor || params.gather || !whole) return false;
  if (peers.num_more_outputs > 0 && !has_outputs) return false;
  if (peers.messages.has_value() != (params.rows.mode == Mode::kRanges)) return false;
  for (int32_t output = 0; output < peers.num_more_outputs; ++output) {
    if (!is_aligned(peers.more_outputs[output])) return false;
  }
  for (int32_t mirror = 0; mirror < peers.num_mirrors; ++mirror) {
    if (!is_aligned(peers.mirrors[mirror])) return false;
  }
  for (const void* source : peers.sources) {
    if (!is_aligned(source)) return false;
  }
  return is_aligned(peers.arriving) && is_aligned(peers.collected) && is_aligned(peers.terms);
}

template <plan::Kernel kKernel, plan::DType kDType>
GemmSm90Instance of_kernel(bool peers, bool in_groups) {
  if constexpr (kKernel == plan::Kernel::kSm90Pingpong && !plan::is_fp8(kDType)) {
    if (in_groups) {
      return peers ? gemm_sm90_instance<kKernel, kDType, true, true>()
                   : gemm_sm90_instance<kKernel, kDType, false, true>();
    }
  }
  if (in_groups) return {};
  if constexpr (plan::is_pingpong(kKernel)) {
    return peers ? gemm_sm90_instance<kKernel, kDType, true, false>()
                 : gemm_sm90_instance<kKernel, kDType, false, false>();
  } else if constexpr (!plan::is_fp8(kDType)) {
    if (!peers) return gemm_sm90_instance<kKernel, kDType, false, false>();
  }
  return {};
}

template <plan::DType kDType>
GemmSm90Instance of_dtype(plan::Kernel kernel, bool peers, bool in_groups) {
  switch (kernel) {
    case plan::Kernel::kSm90PingpongWide:
      return of_kernel<plan::Kernel::kSm90PingpongWide, kDType>(peers, in_groups);
    case plan::Kernel::kSm90Cooperative:
      return of_kernel<plan::Kernel::kSm90Cooperative, kDType>(peers, in_groups);
    default:
      return of_kernel<plan::Kernel::kSm90Pingpong, kDType>(peers, in_groups);
  }
}

// Empty where this build has none (OVERLAP_DTYPES).
GemmSm90Instance sm90_instance(plan::Kernel kernel, plan::DType dtype, bool peers, bool in_groups) {
  switch (dtype) {
#if defined(OVERLAP_WITH_SM90_BF16)
    case plan::DType::kBFloat16:
      return of_dtype<plan::DType::kBFloat16>(kernel, peers, in_groups);
#endif
#if defined(OVERLAP_WITH_SM90_FP16)
    case plan::DType::kFloat16:
      return of_dtype<plan::DType::kFloat16>(kernel, peers, in_groups);
#endif
#if defined(OVERLAP_WITH_SM90_E4M3)
    case plan::DType::kFloat8E4M3:
      return of_dtype<plan::DType::kFloat8E4M3>(kernel, peers, in_groups);
#endif
#if defined(OVERLAP_WITH_SM90_E5M2)
    case plan::DType::kFloat8E5M2:
      return of_dtype<plan::DType::kFloat8E5M2>(kernel, peers, in_groups);
#endif
    default:
      return {};
  }
}

GemmSm90Instance sm90_instance(plan::Kernel kernel, const GemmParams& params) {
  return sm90_instance(kernel, params.dtype, params.peers.has_value(), params.groups.count > 0);
}

// A build may lack the data type; an fp8 operand has scales, and a weight of e4m3.
bool types_supported(plan::Kernel kernel, const GemmParams& params) {
  if (sm90_instance(kernel, params).launch == nullptr) return false;
  if (!plan::is_fp8(params.dtype)) return !params.scales;
  if (!params.scales || !params.weight_k_contiguous) return false;
  const GemmScales& scales = *params.scales;
  return scales.weight_dtype == plan::DType::kFloat8E4M3 &&
         scales.output_dtype == plan::DType::kBFloat16;
}

// TMA addresses 16-byte aligned bases and strides, rows of whole 16-byte pieces, and extents
// that fit an int.
bool gemm_sm90_supported(plan::Kernel kernel, const GemmParams& params) {
  if (!types_supported(kernel, params)) return false;
  const int64_t operand_piece = plan::is_fp8(params.dtype) ? kTmaBytes : kTmaBytes / 2;  // elements
  const int64_t output_piece = kTmaBytes / 2;
  if (params.m <= 0 || params.n <= 0 || params.k <= 0) return false;
  if (params.m >= kMaxTmaExtent || params.n >= kMaxTmaExtent || params.k >= kMaxTmaExtent)
    return false;
  if (params.n % output_piece != 0 || params.k % operand_piece != 0) return false;
  if (params.peers && !peers_supported(params)) return false;
  const bool adds_terms = params.peers && params.peers->terms != nullptr;
  if (adds_terms && !plan::can(kernel, plan::kAddsTerms)) return false;
  if (params.groups.count > 0 && params.k % (params.groups.count * plan::kGroupStep) != 0) {
    return false;
  }
  const bool row_major = params.layout == plan::Layout::kRowMajor;
  return is_aligned(params.input) && is_aligned(params.weight) && is_aligned(params.output) &&
         (!params.gather || is_aligned(params.gather->own_input)) &&
         params.input_stride % operand_piece == 0 && params.weight_stride % operand_piece == 0 &&
         (!row_major || params.output_stride % output_piece == 0);
}

cudaError_t load_sm90_kernels() {
  using plan::DType;
  for (const plan::Kernel kernel : {plan::Kernel::kSm90Pingpong, plan::Kernel::kSm90PingpongWide,
                                    plan::Kernel::kSm90Cooperative}) {
    for (const DType dtype :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      for (const bool peers : {false, true}) {
        for (const bool in_groups : {false, true}) {
          const GemmSm90Instance instance = sm90_instance(kernel, dtype, peers, in_groups);
          const cudaError_t error = instance.load ? instance.load() : cudaSuccess;
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}
#endif

bool gather_supported(plan::Kernel kernel, const GemmParams& params) {
  const bool gathers = params.rows.mode == plan::RowMap::Mode::kGather;
  if (gathers != (params.gather && params.gather->own_input != nullptr)) return false;
  if (params.awaits_rows() && !gathers) return false;
  return plan::can(kernel, plan::kCopiesBeside) ||
         (!params.awaits_rows() && params.ending.signal.count == 0);
}

}  // namespace

bool gemm_supported(plan::Kernel kernel, const GemmParams& params) {
  if (!gather_supported(kernel, params)) return false;
  switch (kernel) {
#if defined(OVERLAP_WITH_SM80)
    case plan::Kernel::kSm80:
      return !params.peers && gemm_sm80_supported(params);
#endif
#if defined(OVERLAP_WITH_SM90)
    case plan::Kernel::kSm90Pingpong:
    case plan::Kernel::kSm90PingpongWide:
      return gemm_sm90_supported(kernel, params);
    case plan::Kernel::kSm90Cooperative:
      return !params.peers && gemm_sm90_supported(kernel, params);
#endif
    default:
      return false;
  }
}

int32_t kernel_arch(int32_t arch) {
  for (const plan::Kernel kernel : {
#if defined(OVERLAP_WITH_SM90)
           plan::Kernel::kSm90Pingpong,
#endif
#if defined(OVERLAP_WITH_SM80)
           plan::Kernel::kSm80,
#endif
           plan::Kernel::kLibrary}) {
    const plan::KernelTraits& own = plan::traits(kernel);
    if (own.least_arch <= arch && arch <= own.most_arch) return own.least_arch;
  }
  return 0;
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
      return sm90_instance(kernel, params).launch(params, stream);
#endif
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t load_kernels() {
  cudaError_t error = load_signal_kernels();
  if (error == cudaSuccess) error = load_reorder_kernels();
  if (error == cudaSuccess) error = load_rectangle_kernels();
  if (error == cudaSuccess) error = load_peer_signal_kernels();
  if (error == cudaSuccess) error = load_peer_collective_kernels();
  if (error == cudaSuccess) error = load_peer_low_latency_kernels();
  if (error == cudaSuccess) error = load_peer_finish_kernels();
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
  if (error == cudaSuccess && major == 9) error = load_sm90_kernels();
  if (error == cudaSuccess && major == 9) error = load_grouped_gemm();
  if (error == cudaSuccess && major == 9) error = load_few_rows_kernels();
#endif
  return error;
}

}  // namespace overlap::kernels
