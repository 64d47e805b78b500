// Residual, RMSNorm and a cast after an all-reduce of few rows, in one kernel with it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_low_latency.h"
#include "plan/gemm_types.h"

namespace overlap::kernels {

inline constexpr int64_t kFinishGrain = 8;            // of columns
inline constexpr int64_t kMostFinishColumns = 16384;  // a row lies in the registers of one block

// The rows of a sum become results: sum = round(terms) + bias + residual, its norm, and a cast of the norm. Matrices are
// contiguous [rows, columns].
struct FinishParams {
  plan::DType dtype = plan::DType::kBFloat16;  // or float16
  int64_t rows = 0;
  int64_t columns = 0;             // a multiple of kFinishGrain, up to kMostFinishColumns
  const void* terms = nullptr;     // this rank's
  void* sum = nullptr;             // may be `terms`
  const void* bias = nullptr;      // [columns], or null
  const void* residual = nullptr;  // or null
  const void* gain = nullptr;      // [columns]
  float eps = 0.0f;
  float gain_offset = 0.0f;
  bool round_before_gain = false;
  void* normed = nullptr;  // in the operands' type, or null
  // In float8_e4m3fn, or null: by a given scale, or with scales [rows], or [blocks of 128 columns, rows], that are stored.
  void* values = nullptr;
  const float* given_scale = nullptr;
  float* scales = nullptr;
  bool by_blocks = false;
};

// The same with an all-reduce over peers before it, whose data are their own signal. In one step; or in two, where rows
// have owners by turns, who add up and send the sums. A block takes whole rows, so that a row's bits depend on no other
// row.
struct PeerFinishParams : LinePeers {
  bool in_two_steps = false;
  FinishParams finish;
  int32_t most_blocks = kMaxPeerBlocks;  // ranks may differ
};

// True if the kernels take rows of this type and number of columns.
constexpr bool finish_takes(plan::DType dtype, int64_t columns) {
  return (dtype == plan::DType::kBFloat16 || dtype == plan::DType::kFloat16) &&
         columns % kFinishGrain == 0 && columns > 0 && columns <= kMostFinishColumns;
}

cudaError_t peer_finish(const PeerFinishParams& params, cudaStream_t stream);
cudaError_t finish_rows(const FinishParams& params, cudaStream_t stream);

// Loads these kernels on the current device.
cudaError_t load_peer_finish_kernels();

}  // namespace overlap::kernels
