// fp8 operands with scales: a tile's sums are multiplied by those of its rows and columns, after the product.
#pragma once

#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

// A thread's scales of a tile. It has the same columns in every row of its own, two of eight, and rows in pairs, eight
// apart, one pair of each 64 rows: as wgmma leaves them.
template <class Types>
class TileScales {
  static constexpr int kSlabRows = 64;  // of one wgmma
  static constexpr int kPieceColumns = 8;
  static constexpr int kRows = 2 * Types::kTileM / kSlabRows;
  static constexpr int kColumns = 2 * Types::kTileN / kPieceColumns;
  static_assert(Types::kTeamThreads == cutlass::NumThreadsPerWarpGroup);

 public:
  using Params = GemmScales;

  template <class KernelParams>
  CUTLASS_DEVICE TileScales(const KernelParams& params, const plan::TileCoord& tile, int thread)
      : scales_(params) {
    const auto [m, n, k, l] = params.gemm_shape;
    const plan::TileRowPlace place = params.place(tile.row);
    last_row_ = m - 1;
    last_column_ = n - 1;
    // Gathered rows lie as they arrive, their scales in order.
    const bool gathers = params.rows.mode == plan::RowMap::Mode::kGather;
    const int row =
        gathers ? place.output_part * params.rows.part_rows + place.output_row * Types::kTileM
                : place.input_row;
    row_ = row + thread / cutlass::NumThreadsPerWarp * 16 + thread % cutlass::NumThreadsPerWarp / 4;
    column_ = tile.column * Types::kTileN + thread % 4 * 2;
  }

  template <class Sums>
  CUTLASS_DEVICE void scale(Sums& sums) const {
    float rows[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i)
      rows[i] = __ldg(scales_.input + row(i) / scales_.rows_per_scale);
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

 private:
  // A row that is stored, or the last one that has a scale.
  CUTLASS_DEVICE int row(int i) const {
    return min(row_ + i / 2 * kSlabRows + i % 2 * 8, last_row_);
  }

  const GemmScales& scales_;
  int row_;
  int last_row_;
  int column_;
  int last_column_;
};

// Both contiguous along K, the weight of e4m3, the output of bfloat16.
template <class InputElement>
struct ScaledOperands {
  using Input = InputElement;
  using Weight = cutlass::float_e4m3_t;
  using Output = cutlass::bfloat16_t;
  static constexpr bool kWeightKContiguous = true;
  static constexpr bool kFp8 = true;
  template <class Types>
  using Scaling = TileScales<Types>;
  template <class Types>
  using Groups = OneGroup<Types>;
};

template <plan::Kernel kKernel, class InputElement, bool kPeers = false>
GemmSm90Instance make_scaled_gemm_sm90_instance() {
  using Launcher = GemmSm90Launcher<GemmSm90Of<kKernel, ScaledOperands<InputElement>, kPeers>>;
  return {&Launcher::launch, &Launcher::load};
}

}  // namespace overlap::kernels
