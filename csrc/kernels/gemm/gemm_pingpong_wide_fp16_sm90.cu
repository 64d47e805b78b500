#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_pingpong_wide_fp16() {
  return make_gemm_sm90_instance<plan::Kernel::kSm90PingpongWide, cutlass::half_t>();
}

}  // namespace overlap::kernels
