// Moves between the packed and the row-major layout, sums, and the bias: what happens to a chunk after
// its communication.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/gemm_types.h"
#include "plan/tile_order.h"

namespace overlap::kernels {

struct ReorderParams {
  int64_t m = 0;
  int64_t n = 0;
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  plan::DType dtype = plan::DType::kBFloat16;
  plan::TileOrder order;
  int32_t chunk = 0;          // only tiles of this chunk
  void* row_major = nullptr;  // [m, n], contiguous
  void* packed = nullptr;     // the whole packed buffer
  int32_t terms = 1;  // of the sum, that lie in a chunk's region of the packed buffer: 1 or 2
  int32_t term = 0;   // the one that pack_chunk writes
  const void* bias = nullptr;  // [n] of the same dtype, or null; added by unpack_chunk
  int32_t ctas = 0;            // grid size, at most
};

// packed -> row-major: the sum of the terms, plus bias, each added in fp32 and rounded. Tile parts
// beyond m and n are dropped.
cudaError_t unpack_chunk(const ReorderParams& params, cudaStream_t stream);

// row-major -> packed. Tile parts beyond m and n become zero.
cudaError_t pack_chunk(const ReorderParams& params, cudaStream_t stream);

struct TermsParams {
  int64_t rows = 0;
  int64_t n = 0;
  int32_t terms = 1;
  int64_t stride = 0;  // elements from term to term
  plan::DType dtype = plan::DType::kBFloat16;
  const void* source = nullptr;  // [rows, n], contiguous, the first term
  void* destination = nullptr;   // [rows, n], contiguous; may be `source`
  const void* bias = nullptr;    // [n], or null
  int32_t ctas = 0;              // grid size, at most
};

// destination = the sum of the terms in their order, in fp32, rounded once; + bias, rounded again. bf16, fp16, fp32.
cudaError_t add_terms(const TermsParams& params, cudaStream_t stream);

// Loads all of these kernels on the current device, so that none is loaded while something waits.
cudaError_t load_reorder_kernels();

}  // namespace overlap::kernels
