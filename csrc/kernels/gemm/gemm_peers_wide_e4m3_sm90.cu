#include "kernels/gemm/gemm_sm90_scales.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_peers_wide_e4m3() {
  return make_scaled_gemm_sm90_instance<plan::Kernel::kSm90PingpongWide, cutlass::float_e4m3_t,
                                        true>();
}

}  // namespace overlap::kernels
