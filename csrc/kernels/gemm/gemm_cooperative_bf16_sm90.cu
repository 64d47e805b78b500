#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_cooperative_bf16() {
  return make_gemm_sm90_instance<plan::Kernel::kSm90Cooperative, cutlass::bfloat16_t>();
}

}  // namespace overlap::kernels
