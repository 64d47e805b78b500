// Tiles that a peer has stored into this device's memory on their way to the output, by bulk copies
// through a little shared memory: of one thread, beside a GEMM, to which they cost no time of an SM. (The
// copy engine moves 100 GB/s within a device whose SMs a GEMM keeps busy.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

namespace overlap::kernels {

// Rows of kColumns elements, cut into pieces.
template <class Element, int kColumns>
struct TileCollector {
  static constexpr int kPieceRows = 16;
  static constexpr int kPieces = 4;  // on their way at a time ...
  static constexpr int kLoads = 2;   // ... as many of them into shared memory, the others out of it
  static constexpr uint32_t kPieceBytes = kPieceRows * kColumns * sizeof(Element);

  // Tensor maps of where tiles lie and where they go.
  struct Params {
    cute::TmaDescriptor from = {};
    cute::TmaDescriptor to = {};
    int32_t rows = 0;  // 0: nothing is collected
  };

  struct SharedStorage {
    alignas(128) char pieces[kPieces][kPieceBytes];
    alignas(8) uint64_t full[kPieces];  // barriers: the piece is there
    int32_t row[kPieces];               // where it goes
    int32_t column[kPieces];
  };

  static cute::TmaDescriptor tensor_map(const void* base, int rows, int columns, int64_t stride) {
    using PieceLayout = cute::Layout<cute::Shape<cute::Int<kPieceRows>, cute::Int<kColumns>>,
                                     cute::Stride<cute::Int<kColumns>, cute::_1>>;
    const auto tensor = cute::make_tensor(
        cute::make_gmem_ptr(static_cast<const Element*>(base)),
        cute::make_layout(cute::make_shape(rows, columns), cute::make_stride(stride, cute::_1{})));
    return *cute::make_tma_copy(cute::SM90_TMA_LOAD{}, tensor, PieceLayout{}).get_tma_descriptor();
  }

  static Params make_params(const void* from, void* to, int rows, int columns, int64_t stride) {
    return {tensor_map(from, rows, columns, stride), tensor_map(to, rows, columns, stride), rows};
  }

  // By one thread of the CTA, before a fence of barriers and a meeting.
  __device__ __forceinline__ static void init(SharedStorage& shared) {
    for (uint64_t& barrier : shared.full) cute::initialize_barrier(barrier, 1);
  }

  // By one thread: which pieces it moves.
  class Copier {
   public:
    __device__ __forceinline__ Copier(const Params& params, SharedStorage& shared)
        : params_(params), shared_(shared) {}

    // `rows` rows from `row` on, at `column`, which other threads' bulk stores have written. The caller has
    // acquired what announced them.
    __device__ __forceinline__ void copy(int32_t row, int32_t rows, int32_t column) {
      // What was acquired, bulk loads see, too.
      asm volatile("fence.proxy.async;" ::: "memory");
      const int32_t end = min(row + rows, params_.rows);
      for (; row < end; row += kPieceRows) {
        const uint32_t place = moved_ % kPieces;
        // The store from this place before has read it.
        wait_stores_read<kPieces - kLoads - 1>();
        shared_.row[place] = row;
        shared_.column[place] = column;
        cute::set_barrier_transaction_bytes(shared_.full[place], kPieceBytes);
        cute::SM90_TMA_LOAD_2D::copy(&params_.from, &shared_.full[place],
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                     shared_.pieces[place], column, row);
        ++moved_;
        if (moved_ > kLoads) store_next();
      }
    }

    // Behind the last one.
    __device__ __forceinline__ void finish() {
      while (stored_ < moved_) store_next();
      wait_stores_read<0>();
    }

   private:
    __device__ __forceinline__ void store_next() {
      const uint32_t place = stored_ % kPieces;
      cute::wait_barrier(shared_.full[place], static_cast<int>(stored_ / kPieces % 2));
      cute::tma_store_fence();
      cute::SM90_TMA_STORE_2D::copy(&params_.to, shared_.pieces[place], shared_.column[place],
                                    shared_.row[place]);
      cute::tma_store_arrive();
      ++stored_;
    }

    template <int kLeft>
    __device__ __forceinline__ static void wait_stores_read() {
      cute::tma_store_wait<kLeft>();
    }

    const Params& params_;
    SharedStorage& shared_;
    uint32_t moved_ = 0;
    uint32_t stored_ = 0;
  };
};

}  // namespace overlap::kernels
