// The experts' products on Hopper. A tile's epilogue decides where its sums go.
//
//   rows [R, k], each expert's weight [n, k]            output [R, n]      each row as it is, or to where its token is
//     kGate                                             output [R, n / 2]  gate and up become one
//   gradients [R, n] and rows [R, k] of an expert       output [n, k]      kWeights: the gradient of its weight
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/moe/moe.h"

namespace overlap::kernels {

constexpr int kMaxGroupedExperts = 1024;

enum class GroupedForm { kRows, kGate, kWeights };

// Rows that go home: kernels/moe/moe.h, ResultsParams.
struct HomeParams {
  const int64_t* source = nullptr;  // [rows]; null: all rows stay
  int64_t stride = 0;
  int32_t rank = 0;
  char* slots[kMaxPeers] = {};
};

struct GroupedGemmParams {
  GroupedForm form = GroupedForm::kRows;
  int64_t rows = 0;             // of the input; those after the last expert's are not computed
  int64_t k = 0;                // a multiple of 8, at least 64
  const void* input = nullptr;  // [rows, k]; kWeights: the gradients [rows, n]
  // [experts, n, k], turned: [experts, k, n]; or the gate's and the up's, of n each. kWeights: the rows [rows, k].
  const void* weight = nullptr;
  const void* up_weight = nullptr;
  bool turned = false;
  bool k_slices =
      false;  // kRows, not turned: the weight is [n, experts * k], of which each expert has k columns
  int64_t n = 0;  // a multiple of 8
  // kRows and kGate, not turned: rows and weights are float8_e4m3fn, k and n multiples of 16, the element bfloat16. Rows are packed
  // (PackParams). The weights' scales are [experts, n], and sums are multiplied by both scales. Or rows have scales `by_blocks`, and the
  // weights one of each kScaledBlock rows and columns, [experts, scale_blocks(n), scale_blocks(k)]: the sums of each block of k are
  // multiplied by both, and added in float32. kGate: n, of two weights in one n / 2, is a multiple of 64. Null: no fp8.
  const float* scale = nullptr;
  bool by_blocks = false;
  const float* up_scale = nullptr;  // of up_weight
  // Element (16 bits), offs, experts, and output: [rows, width], which may be null if all rows go home; or [experts, n, width].
  // kRows: a bias of the gate, which is added to rounded sums. kGate: form, interleaved, biases and shares. `gate_grad` and `up_grad` of grad_stride, if not null: gate and up, without their
  // biases.
  GateParams gate;
  HomeParams home;  // kRows
  int32_t ctas = 0;
};

#if defined(OVERLAP_WITH_SM90)
inline constexpr bool kHasGroupedGemm = true;
cudaError_t load_grouped_gemm();
cudaError_t launch_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream);
#else
inline constexpr bool kHasGroupedGemm = false;
inline cudaError_t launch_grouped_gemm(const GroupedGemmParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
#endif

}  // namespace overlap::kernels
