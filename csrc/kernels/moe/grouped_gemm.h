// The experts' products on Hopper: each expert's rows times its own weight. Where a tile's sums go, its epilogue decides: as they are,
// through gate and up, and each row to where its token is.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/moe/moe.h"

namespace overlap::kernels {

constexpr int kMaxGroupedExperts = 1024;

// Rows that go home: kernels/moe/moe.h, ResultsParams.
struct HomeParams {
  const int64_t* source = nullptr;  // [rows]; null: all rows stay
  int64_t stride = 0;
  int32_t rank = 0;
  bool keep = false;  // rows that go home are stored in the output, too
  char* slots[kMaxPeers] = {};
};

struct GroupedGemmParams {
  int64_t rows = 0;             // of the input; those after the last expert's are not computed
  int64_t k = 0;                // a multiple of 8, at least 64
  const void* input = nullptr;  // [rows, k]
  // [experts, n, k]; or the gate's and the up's [experts, n, k] each.
  const void* weight = nullptr;
  const void* up_weight = nullptr;
  int64_t n = 0;
  bool gated = false;  // two columns, of gate and up, make one
  // Its element (16 bits), form, interleaved, biases, offs and experts; width, a multiple of 8, and output [rows, width], which may be
  // null if all rows go home.
  GateParams gate;
  HomeParams home;
  int32_t ctas = 0;
};

cudaError_t load_grouped_gemm_sm90();
cudaError_t launch_grouped_gemm_sm90(const GroupedGemmParams& params, cudaStream_t stream);

}  // namespace overlap::kernels
