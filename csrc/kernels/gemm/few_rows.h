// Few rows with K in groups: each group is an expert of a grouped GEMM, so that all SMs read the weight.
//
//   rows [M, groups * k]  ->  [groups, M, k]  ->  products [groups, M, N], rounded  ->  [M, N], added by pairs
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/gemm_types.h"

namespace overlap::kernels {

inline constexpr int64_t kMostFewRows = 128;  // one tile of them

struct FewRowsParams {
  plan::DType dtype = plan::DType::kBFloat16;  // or float16
  int64_t m = 0;
  int64_t n = 0;       // a multiple of 8
  int64_t k = 0;       // of a group: a multiple of 64
  int32_t groups = 1;  // 1, 2, 4 or 8
  const void* input = nullptr;
  int64_t input_stride = 0;
  const void* weight = nullptr;  // [n, groups * k], or along n, without gaps
  bool weight_k_contiguous = true;
  void* rows = nullptr;      // memory for [groups, m, k]
  int32_t* ends = nullptr;   // and of `groups` numbers
  void* products = nullptr;  // and for [groups, m, n]; of one group it may be the output
  void* output = nullptr;
  int32_t ctas = 0;
};

#if defined(OVERLAP_WITH_SM90)
// Enqueues the product, whose bits are those of GemmGroups. Hopper.
cudaError_t launch_few_rows(const FewRowsParams& params, cudaStream_t stream);

cudaError_t load_few_rows_kernels();
#else
inline cudaError_t launch_few_rows(const FewRowsParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
#endif

}  // namespace overlap::kernels
