#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_peers_fp16() {
  return make_gemm_sm90_instance<plan::Kernel::kSm90Pingpong, cutlass::half_t, true>();
}

}  // namespace overlap::kernels
