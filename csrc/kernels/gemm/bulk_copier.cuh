// Copies within a device by one thread beside a GEMM, through a little shared memory, by the bulk copies
// of Hopper: they take no SM from the GEMM. (The runtime's copies within a device are kernels: beside a GEMM
// on all SMs they wait for its end, and where they come first, the next GEMM waits for theirs.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

// Pieces of what `Route` says: how one is loaded into shared memory, and stored from there.
template <class Route>
class BulkCopier {
 public:
  using Piece = typename Route::Piece;
  // Pieces under way at a time, and those of them that come into shared memory; the others leave it.
  static constexpr int kPieces = Route::kPieces;
  static constexpr int kLoads = Route::kLoads;

  struct SharedStorage {
    alignas(128) char memory[kPieces][Route::kPieceBytes];
    alignas(8) uint64_t full[kPieces];  // barriers: the piece is there
    Piece pieces[kPieces];
  };

  // By one thread of the CTA, before a meeting.
  __device__ __forceinline__ static void init(SharedStorage& shared) {
    for (uint64_t& barrier : shared.full) cute::initialize_barrier(barrier, 1);
    cutlass::arch::fence_barrier_init();
  }

  __device__ __forceinline__ BulkCopier(const Route& route, SharedStorage& shared)
      : route_(route), shared_(shared) {}

  __device__ __forceinline__ void copy(const Piece& piece) {
    const uint32_t place = loaded_ % kPieces;
    // The store from this place before has read it.
    cute::tma_store_wait<kPieces - kLoads - 1>();
    shared_.pieces[place] = piece;
    cute::set_barrier_transaction_bytes(shared_.full[place], route_.bytes(piece));
    route_.load(piece, shared_.memory[place], &shared_.full[place]);
    ++loaded_;
    if (loaded_ > kLoads) store_next();
  }

  // After the last one.
  __device__ __forceinline__ void finish() {
    while (stored_ < loaded_) store_next();
    cute::tma_store_wait<0>();
  }

 private:
  __device__ __forceinline__ void store_next() {
    const uint32_t place = stored_ % kPieces;
    cute::wait_barrier(shared_.full[place], static_cast<int>(stored_ / kPieces % 2));
    cute::tma_store_fence();
    route_.store(shared_.pieces[place], shared_.memory[place]);
    cute::tma_store_arrive();
    ++stored_;
  }

  const Route& route_;
  SharedStorage& shared_;
  uint32_t loaded_ = 0;
  uint32_t stored_ = 0;
};

// Parts of tiles: some rows of kColumns elements of one of several matrices, to the same place of another
// one's of its shape; of the last matrix as many rows as there are.
template <class Element, int kColumns>
struct TileRoute {
  // As many as fit beside five stages of operands, four of wide tiles: between four ranks a cluster collects
  // three tiles for each that it computes last, and two loads of 4 KiB at a time are 420 GB/s on all SMs.
  static constexpr int kPieces = kColumns > 128 ? 5 : 8;
  static constexpr int kLoads = kColumns > 128 ? 3 : 5;
  static constexpr int kRows = 16;
  static constexpr uint32_t kPieceBytes = kRows * kColumns * sizeof(Element);
  struct Piece {
    int32_t row;
    int32_t column;
    int32_t matrix;
  };

  cute::TmaDescriptor from = {};
  cute::TmaDescriptor to = {};
  cute::TmaDescriptor to_last = {};  // the same place, where every matrix ends as the last one does
  int32_t rows = 0;                  // 0: nothing is copied
  int32_t last = 0;                  // matrix

  // `count` matrices, one after the other, the last of which is copied up to `last_rows`.
  static TileRoute make(const void* from, void* to, int rows, int last_rows, int columns, int count,
                        int64_t stride) {
    const int64_t matrix = rows * stride;
    return {tensor_map(from, rows, columns, count, stride, matrix),
            tensor_map(to, rows, columns, count, stride, matrix),
            tensor_map(to, last_rows, columns, count, stride, matrix), rows, count - 1};
  }

  __device__ __forceinline__ static uint32_t bytes(const Piece&) { return kPieceBytes; }
  __device__ __forceinline__ void load(const Piece& piece, void* memory, uint64_t* full) const {
    cute::SM90_TMA_LOAD_3D::copy(&from, full,
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                 memory, piece.column, piece.row, piece.matrix);
  }
  __device__ __forceinline__ void store(const Piece& piece, const void* memory) const {
    cute::SM90_TMA_STORE_3D::copy(piece.matrix == last ? &to_last : &to, memory, piece.column,
                                  piece.row, piece.matrix);
  }

 private:
  static cute::TmaDescriptor tensor_map(const void* base, int rows, int columns, int count,
                                        int64_t stride, int64_t matrix) {
    using Layout = cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>,
                                cute::Stride<cute::Int<kColumns>, cute::_1>>;
    const auto tensor =
        cute::make_tensor(cute::make_gmem_ptr(static_cast<const Element*>(base)),
                          cute::make_layout(cute::make_shape(rows, columns, count),
                                            cute::make_stride(stride, cute::_1{}, matrix)));
    return *cute::make_tma_copy(cute::SM90_TMA_LOAD{}, tensor, Layout{}).get_tma_descriptor();
  }
};

// Runs of bytes.
struct RunRoute {
  static constexpr int kPieces = 4;
  static constexpr int kLoads = 2;
  static constexpr uint32_t kPieceBytes = 4096;
  struct Piece {
    const char* from;
    char* to;
    uint32_t count;
  };

  __device__ __forceinline__ static uint32_t bytes(const Piece& piece) { return piece.count; }
  __device__ __forceinline__ static void load(const Piece& piece, void* memory, uint64_t* full) {
    cute::SM90_BULK_COPY_G2S::copy(piece.from, full, memory, static_cast<int32_t>(piece.count));
  }
  __device__ __forceinline__ static void store(const Piece& piece, const void* memory) {
    cute::SM90_BULK_COPY_S2G::copy(memory, piece.to, static_cast<int32_t>(piece.count));
  }
};

// A piece of a run, in as many parts as it has in blocks.
template <class Copier>
__device__ __forceinline__ void copy_into_blocks(const CopyRun& run, int64_t at, int64_t bytes,
                                                 Copier& copier) {
  while (bytes > 0) {
    const int64_t place = run.first + at;
    const int64_t block = place / run.block_bytes;
    const int64_t room = (block + 1) * run.block_bytes - place;
    const int64_t count = bytes < room ? bytes : room;
    copier.copy({static_cast<const char*>(run.from) + at,
                 static_cast<char*>(run.to) + place + block * run.gap_bytes,
                 static_cast<uint32_t>(count)});
    at += count;
    bytes -= count;
  }
}

// Every `step`-th piece of all runs, from the `first`-th on; those of a chunk once it has been awaited.
template <class Copier, class Await>
__device__ __forceinline__ void copy_runs(const CopyRun* runs, int32_t count, int64_t first,
                                          int64_t step, Copier& copier, Await await) {
  constexpr int64_t kBytes = RunRoute::kPieceBytes;
  int64_t at = first * kBytes;
  for (int32_t i = 0; i < count; ++i) {
    const CopyRun& run = runs[i];
    if (at < run.bytes) await(run.chunk);
    for (; at < run.bytes; at += step * kBytes) {
      const int64_t left = run.bytes - at;
      const int64_t bytes = left < kBytes ? left : kBytes;
      if (run.block_bytes != 0) {
        copy_into_blocks(run, at, bytes, copier);
      } else {
        copier.copy({static_cast<const char*>(run.from) + at, static_cast<char*>(run.to) + at,
                     static_cast<uint32_t>(bytes)});
      }
    }
    at -= (run.bytes + kBytes - 1) / kBytes * kBytes;
  }
}

}  // namespace overlap::kernels
