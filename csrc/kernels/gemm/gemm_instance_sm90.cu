// One Hopper GEMM. The build compiles this file once for each row of SM90_INSTANCES in setup.py, which defines
// OVERLAP_INSTANCE_KERNEL, OVERLAP_INSTANCE_DTYPE, OVERLAP_INSTANCE_PEERS and OVERLAP_INSTANCE_GROUPS.
#include "kernels/gemm/gemm_sm90_launcher.h"
#include "kernels/gemm/gemm_sm90_scales.h"

namespace overlap::kernels {
namespace {

template <plan::DType kDType>
auto element() {
  using plan::DType;
  if constexpr (kDType == DType::kBFloat16) return cutlass::bfloat16_t{};
  if constexpr (kDType == DType::kFloat16) return cutlass::half_t{};
  if constexpr (kDType == DType::kFloat8E4M3) return cutlass::float_e4m3_t{};
  if constexpr (kDType == DType::kFloat8E5M2) return cutlass::float_e5m2_t{};
}

}  // namespace

template <plan::Kernel kKernel, plan::DType kDType, bool kPeers, bool kInGroups>
GemmSm90Instance gemm_sm90_instance() {
  using Element = decltype(element<kDType>());
  if constexpr (plan::is_fp8(kDType)) {
    return make_scaled_gemm_sm90_instance<kKernel, Element, kPeers>();
  } else {
    return make_gemm_sm90_instance<kKernel, Element, kPeers, kInGroups>();
  }
}

template GemmSm90Instance
gemm_sm90_instance<plan::Kernel::OVERLAP_INSTANCE_KERNEL, plan::DType::OVERLAP_INSTANCE_DTYPE,
                   OVERLAP_INSTANCE_PEERS, OVERLAP_INSTANCE_GROUPS>();

}  // namespace overlap::kernels
