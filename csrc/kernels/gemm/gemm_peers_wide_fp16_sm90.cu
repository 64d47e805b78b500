#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_peers_wide_fp16() {
  return make_gemm_sm90_instance<plan::Kernel::kSm90PingpongWide, cutlass::half_t, true>();
}

}  // namespace overlap::kernels
