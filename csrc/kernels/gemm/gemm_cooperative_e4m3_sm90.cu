#include "kernels/gemm/gemm_sm90_scales.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_cooperative_e4m3() {
  return make_scaled_gemm_sm90_instance<plan::Kernel::kSm90Cooperative, cutlass::float_e4m3_t>();
}

}  // namespace overlap::kernels
