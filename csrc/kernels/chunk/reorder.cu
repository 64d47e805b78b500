// Packed <-> row-major, sums of terms, and the bias. All are one thing: a grid of threads moves rectangular
// blocks, 16 bytes a thread and access where n and the pointers allow it and one element otherwise,
// with kRows independent loads in flight.
#include "kernels/chunk/reorder.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "kernels/chunk/element.cuh"

namespace overlap::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;  // accesses of one thread in one block, all loads before the first store

enum class Move { kUnpack, kUnpackSum, kPack, kAddBias, kAddTerms };

constexpr bool from_packed(Move move) {
  return move == Move::kUnpack || move == Move::kUnpackSum;
}
constexpr bool row_major_alone(Move move) {
  return move == Move::kAddBias || move == Move::kAddTerms;
}

struct MoveParams {
  int64_t m;  // rows of the row-major matrix
  int64_t n;  // its columns
  int64_t
      tile_m;  // rows and columns of one tile; if all rows are row-major, the matrix is the only tile
  int64_t tile_n;
  int32_t first_tile;  // index of the chunk's first tile
  // A tile is cut into blocks of kRows * (kThreads >> lanes_log2) rows and (1 << lanes_log2)
  // accesses along the columns.
  int32_t lanes_log2;
  uint32_t column_blocks;
  uint32_t tile_blocks;
  uint32_t blocks;
  const void* source;
  void* destination;
  const void* bias;
  int32_t terms;
  int64_t term_stride;  // elements from term to term
  plan::TileOrder order;
};

// One thread's share of a block: kRows accesses, `row_step` rows apart, in one column.
template <class T>
struct Share {
  const T* source = nullptr;
  T* destination = nullptr;
  const T* bias = nullptr;
  int64_t source_stride = 0;
  int64_t destination_stride = 0;
  int32_t rows_to_read =
      0;  // of the kRows accesses, how many lie inside the source; the others read as zero
  int32_t rows_to_write = 0;
};

template <class T, int kVector, Move kMove>
__device__ __forceinline__ Share<T> locate(const MoveParams& params, uint32_t block) {
  const uint32_t tile = row_major_alone(kMove) ? 0 : block / params.tile_blocks;
  const uint32_t in_tile = block - tile * params.tile_blocks;
  const uint32_t row_block = in_tile / params.column_blocks;
  const uint32_t column_block = in_tile - row_block * params.column_blocks;
  const int32_t lanes = 1 << params.lanes_log2;
  const int32_t row_step = kThreads >> params.lanes_log2;

  // Inside the tile.
  const int64_t row = int64_t{row_block} * row_step * kRows + (threadIdx.x >> params.lanes_log2);
  const int64_t column = (int64_t{column_block} * lanes + (threadIdx.x & (lanes - 1))) * kVector;

  // Inside the matrix.
  int64_t matrix_row = row;
  int64_t matrix_column = column;
  int64_t packed = 0;
  if constexpr (!row_major_alone(kMove)) {
    const int32_t index = params.first_tile + static_cast<int32_t>(tile);
    const plan::TileCoord coord = plan::tile_coord(params.order, index);
    matrix_row += coord.row * params.tile_m;
    matrix_column += coord.column * params.tile_n;
    packed = plan::packed_offset(index, static_cast<int32_t>(params.tile_m),
                                 static_cast<int32_t>(params.tile_n)) +
             row * params.tile_n + column;
  }
  const int64_t row_major = matrix_row * params.n + matrix_column;

  // How many accesses, row_step rows apart from `from` on, end before `to`.
  const auto accesses = [&](int64_t from, int64_t to) {
    const int64_t rows = to - from;
    return rows <= 0 ? 0
                     : static_cast<int32_t>(min(int64_t{kRows}, (rows + row_step - 1) / row_step));
  };
  const int32_t in_tile_rows = column < params.tile_n ? accesses(row, params.tile_m) : 0;
  const int32_t in_matrix_rows =
      matrix_column < params.n ? min(in_tile_rows, accesses(matrix_row, params.m)) : 0;

  const T* source = static_cast<const T*>(params.source);
  T* destination = static_cast<T*>(params.destination);
  Share<T> share;
  share.source = source + (from_packed(kMove) ? packed : row_major);
  share.destination = destination + (kMove == Move::kPack ? packed : row_major);
  share.source_stride = row_step * (from_packed(kMove) ? params.tile_n : params.n);
  share.destination_stride = row_step * (kMove == Move::kPack ? params.tile_n : params.n);
  share.rows_to_read = in_matrix_rows;
  share.rows_to_write = kMove == Move::kPack ? in_tile_rows : in_matrix_rows;
  share.bias =
      params.bias == nullptr ? nullptr : static_cast<const T*>(params.bias) + matrix_column;
  return share;
}

// Adds the other terms to the first one's values, rounded once.
template <class T, int kVector>
__device__ __forceinline__ void add_other_terms(const MoveParams& params, const Share<T>& share,
                                                Access<T, kVector> (&values)[kRows]) {
  float sums[kRows][kVector];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sums[i][e] = to_float(values[i].element[e]);
  }
  for (int32_t term = 1; term < params.terms; ++term) {
    const T* const source = share.source + term * params.term_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < share.rows_to_read) {
        values[i] = *reinterpret_cast<const Access<T, kVector>*>(source + i * share.source_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[i][e] += to_float(values[i].element[e]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) round_to(sums[i][e], values[i].element[e]);
  }
}

template <class T, int kVector, Move kMove>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveParams params) {
  using Vector = Access<T, kVector>;
  uint32_t block = blockIdx.x;
  Share<T> share = locate<T, kVector, kMove>(params, block);
  while (true) {
    Vector values[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < share.rows_to_read) {
        values[i] = *reinterpret_cast<const Vector*>(share.source + i * share.source_stride);
      }
    }
    Vector others[kMove == Move::kUnpackSum ? kRows : 1] = {};
    if constexpr (kMove == Move::kUnpackSum) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i < share.rows_to_read) {
          others[i] = *reinterpret_cast<const Vector*>(share.source + params.term_stride +
                                                       i * share.source_stride);
        }
      }
    }
    Vector bias = {};
    if (kMove != Move::kPack && share.bias != nullptr && share.rows_to_read > 0) {
      bias = *reinterpret_cast<const Vector*>(share.bias);
    }
    if constexpr (kMove == Move::kAddTerms) add_other_terms<T, kVector>(params, share, values);

    // The next block's place is found while the loads are under way.
    const uint32_t next = block + gridDim.x;
    const bool more = next < params.blocks;
    Share<T> next_share;
    if (more) {
      next_share = locate<T, kVector, kMove>(params, next);
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < share.rows_to_write) {
        if constexpr (kMove == Move::kUnpackSum) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            // The sum is rounded before the bias is added, as the unfused composition rounds it.
            round_to(to_float(values[i].element[e]) + to_float(others[i].element[e]),
                     values[i].element[e]);
          }
        }
        if (kMove != Move::kPack && share.bias != nullptr) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            round_to(to_float(values[i].element[e]) + to_float(bias.element[e]),
                     values[i].element[e]);
          }
        }
        *reinterpret_cast<Vector*>(share.destination + i * share.destination_stride) = values[i];
      }
    }
    if (!more) {
      return;
    }
    block = next;
    share = next_share;
  }
}

cudaError_t default_ctas(int& ctas) {
  constexpr int kCtasPerSm = 4;
  static std::atomic<int> cached{
      0};  // every device of a process has about as many SMs: enough for a default
  ctas = cached.load(std::memory_order_relaxed);
  if (ctas > 0) {
    return cudaSuccess;
  }
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  ctas = std::max(1, sms) * kCtasPerSm;
  if (error == cudaSuccess) {
    cached.store(ctas, std::memory_order_relaxed);
  }
  return error;
}

template <class T, int kVector, Move kMove>
cudaError_t launch(MoveParams params, int64_t tiles, int32_t ctas, cudaStream_t stream) {
  const int64_t accesses = (params.tile_n + kVector - 1) / kVector;  // along one row of a tile
  params.lanes_log2 = 0;
  while ((1 << params.lanes_log2) < std::min<int64_t>(accesses, kThreads)) {
    ++params.lanes_log2;
  }
  const int64_t lanes = int64_t{1} << params.lanes_log2;
  const int64_t block_rows = (kThreads / lanes) * kRows;
  const int64_t column_blocks = (accesses + lanes - 1) / lanes;
  const int64_t tile_blocks = (params.tile_m + block_rows - 1) / block_rows * column_blocks;
  if (tile_blocks * tiles > std::numeric_limits<int32_t>::max()) {
    return cudaErrorInvalidValue;  // more elements than any device's memory holds
  }
  params.column_blocks = static_cast<uint32_t>(column_blocks);
  params.tile_blocks = static_cast<uint32_t>(tile_blocks);
  params.blocks = static_cast<uint32_t>(tile_blocks * tiles);
  if (ctas <= 0) {
    const cudaError_t error = default_ctas(ctas);
    if (error != cudaSuccess) {
      return error;
    }
  }
  const uint32_t grid = std::min(static_cast<uint32_t>(ctas), params.blocks);
  void* arguments[] = {&params};
  return cudaLaunchKernel(move_kernel<T, kVector, kMove>, dim3(grid), dim3(kThreads), arguments, 0,
                          stream);
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// 16-byte accesses where every row starts at a multiple of 16 bytes; a null bias is aligned.
template <class T, Move kMove>
cudaError_t launch(const MoveParams& params, int64_t tiles, int32_t ctas, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool wide = params.n % kVector == 0 && params.tile_n % kVector == 0 &&
                    params.term_stride % kVector == 0 && aligned(params.source) &&
                    aligned(params.destination) && aligned(params.bias);
  return wide ? launch<T, kVector, kMove>(params, tiles, ctas, stream)
              : launch<T, 1, kMove>(params, tiles, ctas, stream);
}

template <Move kMove>
cudaError_t launch(const MoveParams& params, plan::DType dtype, int64_t tiles, int32_t ctas,
                   cudaStream_t stream) {
  if (params.m <= 0 || params.n <= 0 || tiles <= 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case plan::DType::kBFloat16:
      return launch<__nv_bfloat16, kMove>(params, tiles, ctas, stream);
    case plan::DType::kFloat16:
      return launch<__half, kMove>(params, tiles, ctas, stream);
    case plan::DType::kFloat32:
      return launch<float, kMove>(params, tiles, ctas, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <Move kMove>
cudaError_t launch_chunk(const ReorderParams& params, cudaStream_t stream) {
  if (params.chunk < 0 || params.chunk >= params.order.num_chunks || params.tile_m <= 0 ||
      params.tile_n <= 0) {
    return cudaErrorInvalidValue;
  }
  MoveParams move{};
  move.m = params.m;
  move.n = params.n;
  move.tile_m = params.tile_m;
  move.tile_n = params.tile_n;
  move.first_tile = params.order.chunk_begin[params.chunk];
  // The tile index counts from the buffer's start as if there were one part.
  const int64_t chunk_elements = plan::packed_offset(plan::chunk_tiles(params.order, params.chunk),
                                                     params.tile_m, params.tile_n);
  const int64_t region =
      plan::packed_offset((params.terms - 1) * move.first_tile, params.tile_m, params.tile_n);
  void* packed = static_cast<char*>(params.packed) +
                 (region + params.term * chunk_elements) * plan::element_bytes(params.dtype);
  move.term_stride = chunk_elements;
  move.source = from_packed(kMove) ? packed : params.row_major;
  move.destination = from_packed(kMove) ? params.row_major : packed;
  move.bias = from_packed(kMove) ? params.bias : nullptr;
  move.order = params.order;
  return launch<kMove>(move, params.dtype, plan::chunk_tiles(params.order, params.chunk),
                       params.ctas, stream);
}

template <class T>
cudaError_t load() {
  constexpr int kVector = 16 / sizeof(T);
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const cudaError_t error :
       {cudaFuncGetAttributes(&attributes, move_kernel<T, kVector, Move::kUnpack>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, kVector, Move::kUnpackSum>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, kVector, Move::kPack>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, kVector, Move::kAddBias>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, kVector, Move::kAddTerms>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, 1, Move::kUnpack>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, 1, Move::kUnpackSum>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, 1, Move::kPack>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, 1, Move::kAddBias>),
        cudaFuncGetAttributes(&attributes, move_kernel<T, 1, Move::kAddTerms>)}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t unpack_chunk(const ReorderParams& params, cudaStream_t stream) {
  if (params.terms < 1 || params.terms > 2) {
    return cudaErrorInvalidValue;
  }
  return params.terms == 2 ? launch_chunk<Move::kUnpackSum>(params, stream)
                           : launch_chunk<Move::kUnpack>(params, stream);
}

cudaError_t pack_chunk(const ReorderParams& params, cudaStream_t stream) {
  return launch_chunk<Move::kPack>(params, stream);
}

cudaError_t add_terms(const TermsParams& params, cudaStream_t stream) {
  MoveParams move{};
  move.m = params.rows;
  move.n = params.n;
  // Without a bias nobody asks where rows end: whole accesses, whatever n.
  constexpr int64_t kWhole = 16;
  if (params.bias == nullptr && params.n % kWhole != 0 && params.rows * params.n % kWhole == 0) {
    move.m = params.rows * params.n / kWhole;
    move.n = kWhole;
  }
  move.tile_m = move.m;
  move.tile_n = move.n;
  move.terms = params.terms;
  move.term_stride = params.stride;
  move.source = params.source;
  move.destination = params.destination;
  move.bias = params.bias;
  return params.terms == 1 ? launch<Move::kAddBias>(move, params.dtype, 1, params.ctas, stream)
                           : launch<Move::kAddTerms>(move, params.dtype, 1, params.ctas, stream);
}

cudaError_t load_reorder_kernels() {
  for (const cudaError_t error : {load<__nv_bfloat16>(), load<__half>(), load<float>()}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
