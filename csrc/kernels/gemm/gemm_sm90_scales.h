// How the Hopper GEMM scales products of fp8: whole rows and columns behind the product, blocks while it is summed up.
#pragma once

#include "kernels/gemm/gemm_sm90_types.h"

namespace overlap::kernels {

struct Unscaled {};

// The scales of a thread's sums of a tile. It has the same columns in every row of its own, and rows in pairs, eight
// apart, one pair of each 64 rows: as wgmma leaves them.
template <class Types, bool kScaled = Types::kScaled>
class TileScales {
 public:
  template <class Params>
  CUTLASS_DEVICE TileScales(const Params&, const plan::TileCoord&, int) {}
  template <class Sums>
  CUTLASS_DEVICE void scale(Sums&) const {}
};

template <class Types>
class TileScales<Types, true> {
  using TileShape = typename Types::TileShape;
  static constexpr int kSlabRows = 64;  // of one wgmma
  static constexpr int kTeamRows =
      kSlabRows * Types::kTeamThreads / cutlass::NumThreadsPerWarpGroup;
  static constexpr int kSlabs = Types::kTileM / kTeamRows;
  static constexpr int kPieces = Types::kTileN / 8;  // of eight columns, of which a thread has two

 public:
  static constexpr int kBlock = plan::kScaleBlock;

  // The columns' are read at once, the rows' when the product is there: rows of an all-gather arrive with it.
  template <class Params>
  CUTLASS_DEVICE TileScales(const Params& params, const plan::TileCoord& tile, int thread)
      : scales_(params.scales) {
    const auto [m, n, k, l] = params.gemm_shape;
    const plan::TileRowPlace place = params.place(tile.row);
    const bool own = place.own_input;
    input_ = own ? scales_.own_input : scales_.input;
    last_row_ = (own ? params.rows.part_rows : m) - 1;
    const int in_group = thread % cutlass::NumThreadsPerWarpGroup;
    row_ = place.input_row + thread / cutlass::NumThreadsPerWarpGroup * kSlabRows +
           in_group / cutlass::NumThreadsPerWarp * 16 + in_group % cutlass::NumThreadsPerWarp / 4;
    if (scales_.by_blocks) {
      blocks_ = (k + kBlock - 1) / kBlock;
      weight_ =
          scales_.weight + static_cast<int64_t>(tile.column) * Types::kTileN / kBlock * blocks_;
      return;
    }
    const int column = tile.column * Types::kTileN + in_group % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kPieces; ++i) {
      const int at = min(column + i / 2 * 8 + i % 2, n - 1);
      columns_[i] = __ldg(scales_.weight + at * scales_.weight_stride);
    }
  }

  // Factors of the sums of a block along K, for each of the thread's rows.
  struct Factors {
    float of_row[2 * kSlabs];
  };
  CUTLASS_DEVICE Factors factors(int block) const {
    Factors factors;
    const float weight = scales_.by_blocks ? __ldg(weight_ + block) : 1.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kSlabs; ++i) {
      factors.of_row[i] =
          scales_.by_blocks ? weight * read(input_ + static_cast<int64_t>(row(i)) * blocks_ + block)
                            : 1.0f;
    }
    return factors;
  }

  // sums += products, each row's times its factor.
  template <class Sums, class Products>
  CUTLASS_DEVICE static void add(Sums& sums, const Products& products, const Factors& factors) {
    each(sums, [&](int row, int, auto at) {
      sums(at) = fmaf(products(at), factors.of_row[row], sums(at));
    });
  }

  template <class Sums>
  CUTLASS_DEVICE void scale(Sums& sums) const {
    if (scales_.by_blocks) return;
    float rows[2 * kSlabs];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kSlabs; ++i) rows[i] = read(input_ + row(i) / scales_.rows_per_scale);
    each(sums, [&](int row, int column, auto at) { sums(at) *= rows[row] * columns_[column]; });
  }

 private:
  // Of rows that arrive while this runs: not through the cache of what never changes.
  CUTLASS_DEVICE static float read(const float* from) {
    return *static_cast<const volatile float*>(from);
  }

  // A row that is stored, or the last one that has a scale.
  CUTLASS_DEVICE int row(int i) const {
    return min(row_ + i / 2 * kTeamRows + i % 2 * 8, last_row_);
  }

  // Each sum with the numbers of its row and column in the thread.
  template <class Sums, class Do>
  CUTLASS_DEVICE static void each(Sums& sums, Do act) {
    static_assert(cute::size(Sums{}) == 2 * kSlabs * 2 * kPieces);
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kPieces; ++i) {
          act(2 * slab + half, i, cute::make_coord(cute::make_coord(i % 2, half, i / 2), slab, 0));
        }
      }
    }
  }

  const GemmScales& scales_;
  const float* input_;
  const float* weight_ = nullptr;
  int row_;
  int last_row_;
  int blocks_ = 0;
  float columns_[2 * kPieces];
};

// The product of a tile, with the sums of each block along K added up in fp32. In place of the mainloop's mma.
template <class Types, class Sums>
CUTLASS_DEVICE void multiply_promoted(typename Types::MainloopPipeline& pipeline,
                                      typename Types::Mainloop::PipelineState state, Sums& sums,
                                      int k_tiles, int thread,
                                      typename Types::Mainloop::TensorStorage& shared,
                                      const TileScales<Types>& scales) {
  using Mainloop = typename Types::Mainloop;
  static_assert(cute::size<2>(typename Types::TileShape{}) == TileScales<Types>::kBlock);
  const auto input = cute::make_tensor(cute::make_smem_ptr(shared.smem_A.data()),
                                       typename Mainloop::SmemLayoutA{});
  const auto weight = cute::make_tensor(cute::make_smem_ptr(shared.smem_B.data()),
                                        typename Mainloop::SmemLayoutB{});
  typename Types::TiledMma mma;
  const int group = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
  const auto slice = mma.get_slice(group * cutlass::NumThreadsPerWarpGroup);
  const auto a = slice.make_fragment_A(slice.partition_A(input));   // (mma, m, k, stage)
  const auto b = slice.make_fragment_B(slice.partition_B(weight));  // (mma, n, k, stage)
  auto products = cute::make_fragment_like(sums);
  cute::clear(sums);
  for (int block = 0; block < k_tiles; ++block, ++state) {
    pipeline.consumer_wait(state);
    cute::warpgroup_fence_operand(products);
    cute::warpgroup_arrive();
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < cute::size<2>(a); ++k) {
      cute::gemm(mma, a(cute::_, cute::_, k, state.index()), b(cute::_, cute::_, k, state.index()),
                 products);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    const auto factors = scales.factors(block);  // while the tensor cores work
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(products);
    pipeline.consumer_release(state);
    TileScales<Types>::add(sums, products, factors);
  }
}

}  // namespace overlap::kernels
