// fp8 operands with scales: those of rows and columns multiply the product, those of blocks its sums on the way.
//
// The tensor cores' own sums of fp8 products have some 14 bits. Where these do not do, or blocks have scales, the sums of
// 128 products each are promoted: added up in fp32. A quarter of the tile is multiplied while the one before is added.
#pragma once

#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

// A thread's scales of a tile. It has the same columns in every row of its own, and rows in pairs, eight apart, one pair
// of each 64 rows: as wgmma leaves them.
template <class Types>
class TileScales {
  static constexpr int kSlabRows = 64;     // of one wgmma
  static constexpr int kPieceColumns = 8;  // of which a thread has two
  static constexpr int kSlabs = Types::kTileM / kSlabRows;
  static constexpr int kRows = 2 * kSlabs;
  static constexpr int kColumns = 2 * Types::kTileN / kPieceColumns;
  static_assert(Types::kTeamThreads == cutlass::NumThreadsPerWarpGroup);

 public:
  using Params = GemmScales;
  static constexpr bool kMultiplies = false;
  static constexpr int kBlock = plan::kScaleBlock;

  template <class KernelParams>
  CUTLASS_DEVICE TileScales(const KernelParams& params, const plan::TileCoord& tile, int thread)
      : scales_(params.scales) {
    const auto [m, n, k, l] = params.gemm_shape;
    const plan::TileRowPlace place = params.place(tile.row);
    input_ = place.own_input ? scales_.own_input : scales_.input;
    last_row_ = (place.own_input ? params.rows.part_rows : m) - 1;
    last_column_ = n - 1;
    row_ = place.input_row + thread / cutlass::NumThreadsPerWarp * 16 +
           thread % cutlass::NumThreadsPerWarp / 4;
    column_ = tile.column * Types::kTileN + thread % 4 * 2;
    blocks_ = (k + kBlock - 1) / kBlock;
  }

  // Of whole rows and columns.
  template <class Sums>
  CUTLASS_DEVICE void scale(Sums& sums) const {
    if (scales_.by_blocks) return;
    float rows[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i] = read(input_ + row(i) / scales_.rows_per_scale);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int at = min(column_ + i / 2 * kPieceColumns + i % 2, last_column_);
      const float column = __ldg(scales_.weight + at * scales_.weight_stride);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kRows; ++j) {
        sums(cute::make_coord(cute::make_coord(i % 2, j % 2, i / 2), j / 2, 0)) *= rows[j] * column;
      }
    }
  }

  // Of a block along K: a factor for each of the thread's rows.
  struct Factors {
    float of_row[kRows];
  };
  CUTLASS_DEVICE Factors factors(int block) const {
    const int64_t blocks_before = int64_t{column_ / kBlock} * blocks_;  // the same in all of a tile
    const float weight = __ldg(scales_.weight + blocks_before + block);
    Factors factors;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      factors.of_row[i] = weight * read(input_ + int64_t{row(i)} * blocks_ + block);
    }
    return factors;
  }
  CUTLASS_DEVICE bool by_blocks() const { return scales_.by_blocks; }

 private:
  // Rows of an all-gather arrive while this runs: not through the cache of what never changes.
  CUTLASS_DEVICE static float read(const float* from) {
    return *static_cast<const volatile float*>(from);
  }

  // A row that is stored, or the last one that has a scale.
  CUTLASS_DEVICE int row(int i) const {
    return min(row_ + i / 2 * kSlabRows + i % 2 * 8, last_row_);
  }

  const GemmScales& scales_;
  const float* input_;
  int row_;
  int last_row_;
  int column_;
  int last_column_;
  int blocks_;
};

// The same, which multiplies in place of the mainloop, as that has no fp32 sums beside the tensor cores'.
template <class Types>
class PromotedScales : public TileScales<Types> {
  using Base = TileScales<Types>;
  using Base::kBlock;
  using typename Base::Factors;
  using Mainloop = typename Types::Mainloop;
  static constexpr int kHalf = 64;  // rows and columns of a quarter
  static_assert(Types::kTileM == 2 * kHalf && Types::kTileN == 2 * kHalf);
  static_assert(cute::size<2>(typename Types::TileShape{}) == kBlock);
  using Quarter = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<typename Types::Input, typename Types::Weight, float,
                                 cute::Shape<cute::Int<kHalf>, cute::Int<kHalf>, cute::Int<kBlock>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));

 public:
  static constexpr bool kMultiplies = true;
  using Base::Base;

  template <class Pipeline, class State, class Sums>
  CUTLASS_DEVICE void multiply(Pipeline& pipeline, State state, Sums& sums, int k_tiles,
                               typename Mainloop::TensorStorage& shared) const {
    if (this->by_blocks()) {
      multiply<true>(pipeline, state, sums, k_tiles, shared);
    } else {
      multiply<false>(pipeline, state, sums, k_tiles, shared);
    }
  }

 private:
  template <bool kScales, class Pipeline, class State, class Sums>
  CUTLASS_DEVICE void multiply(Pipeline& pipeline, State state, Sums& sums, int k_tiles,
                               typename Mainloop::TensorStorage& shared) const {
    const auto input = cute::make_tensor(cute::make_smem_ptr(shared.smem_A.data()),
                                         typename Mainloop::SmemLayoutA{});
    const auto weight = cute::make_tensor(cute::make_smem_ptr(shared.smem_B.data()),
                                          typename Mainloop::SmemLayoutB{});
    Quarter mma;
    const auto slice = mma.get_slice(0);
    const auto a = slice.make_fragment_A(slice.partition_A(input));   // (mma, m, k, stage)
    const auto b = slice.make_fragment_B(slice.partition_B(weight));  // (mma, n, k, stage)
    const auto start = [&](int m, int n, auto& products) {
      cute::warpgroup_fence_operand(products);
      cute::warpgroup_arrive();
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < cute::size<2>(a); ++k) {
        cute::gemm(mma, a(cute::_, m, k, state.index()), b(cute::_, n, k, state.index()), products);
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
      }
      cute::warpgroup_commit_batch();
    };
    Factors factors;
    const auto add = [&](int m, int n, auto& products) {
      cute::warpgroup_fence_operand(products);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(products); ++i) {
        float& sum = sums(
            cute::make_coord(cute::make_coord(i % 2, i / 2 % 2, i / 4 + n * (kHalf / 8)), m, 0));
        sum =
            kScales ? fmaf(products(i), factors.of_row[2 * m + i / 2 % 2], sum) : sum + products(i);
      }
    };

    auto even = cute::make_tensor<float>(
        cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kHalf / 8>>>{});
    auto odd = cute::make_fragment_like(even);
    cute::clear(sums);
    pipeline.consumer_wait(state);
    start(0, 0, even);
    if constexpr (kScales) factors = this->factors(0);
    for (int block = 0;; ++block) {
      Factors next;
      if constexpr (kScales) next = this->factors(min(block + 1, k_tiles - 1));
      start(0, 1, odd);
      cute::warpgroup_wait<1>();
      add(0, 0, even);
      start(1, 0, even);
      cute::warpgroup_wait<1>();
      add(0, 1, odd);
      start(1, 1, odd);
      cute::warpgroup_wait<1>();
      add(1, 0, even);
      if (block + 1 == k_tiles) break;
      const State read = state;
      ++state;
      pipeline.consumer_wait(state);
      start(0, 0, even);
      cute::warpgroup_wait<1>();
      add(1, 1, odd);
      pipeline.consumer_release(read);
      if constexpr (kScales) factors = next;
    }
    cute::warpgroup_wait<0>();
    add(1, 1, odd);
    pipeline.consumer_release(state);
  }
};

// Both operands contiguous along K, the weight of e4m3, the output of bfloat16.
template <class InputElement, bool kPromotes>
struct ScaledOperands {
  using Input = InputElement;
  using Weight = cutlass::float_e4m3_t;
  using Output = cutlass::bfloat16_t;
  static constexpr bool kWeightKContiguous = true;
  static constexpr bool kFp8 = true;
  static constexpr bool kManyRegisters = kPromotes;
  template <class Types>
  using Scaling = std::conditional_t<kPromotes, PromotedScales<Types>, TileScales<Types>>;
};

template <class InputElement, bool kPromotes, bool kPeers = false>
GemmSm90Instance make_scaled_gemm_sm90_instance() {
  using Launcher = GemmSm90Launcher<
      GemmSm90Of<plan::Kernel::kSm90Pingpong, ScaledOperands<InputElement, kPromotes>, kPeers>>;
  return {&Launcher::launch, &Launcher::load};
}

}  // namespace overlap::kernels
