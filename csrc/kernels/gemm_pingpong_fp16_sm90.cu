#include "kernels/gemm_sm90_launcher.h"

namespace overlap::kernels {

GemmSm90Instance gemm_sm90_pingpong_fp16() {
  return make_gemm_sm90_instance<true, cutlass::half_t>();
}

}  // namespace overlap::kernels
