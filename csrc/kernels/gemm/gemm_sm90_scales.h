// fp8 operands with scales: a tile's sums are multiplied by those of its rows and columns, behind the product.
#pragma once

#include "kernels/gemm/gemm_sm90_launcher.h"

namespace overlap::kernels {

// A thread's scales of a tile. It has the same columns in every row of its own, two of eight, and rows in pairs, eight
// apart, one pair of each 64 rows: as wgmma leaves them.
template <class Types>
class TileScales {
  static constexpr int kSlabRows = 64;  // of one wgmma
  static constexpr int kPieceColumns = 8;
  static constexpr int kRows = 2 * Types::kTeamRows / kSlabRows;
  static constexpr int kColumns = 2 * Types::kTileN / kPieceColumns;
  static_assert(Types::kTeamThreads == cutlass::NumThreadsPerWarpGroup);

 public:
  using Params = GemmScales;

  template <class KernelParams>
  CUTLASS_DEVICE TileScales(const KernelParams& params, const plan::TileCoord& tile, int thread,
                            int first_row)
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
    row_ = row + first_row + thread / cutlass::NumThreadsPerWarp * 16 +
           thread % cutlass::NumThreadsPerWarp / 4;
    column_ = tile.column * Types::kTileN + thread % 4 * 2;
  }

  // Into L1, while the product is computed: one line of 128 bytes by each of the first threads.
  CUTLASS_DEVICE void prefetch(int thread) const {
    constexpr int kLine = 128 / sizeof(float);
    if (thread < Types::kTileN / kLine) {
      const int at = min(column_ - thread % 4 * 2 + thread * kLine, last_column_);
      prefetch_l1(scales_.weight + at * scales_.weight_stride);
    }
    if (thread < Types::kTeamRows / kLine) {
      const int lane_row = thread % cutlass::NumThreadsPerWarp / 4;
      const int at = min(row_ - lane_row + thread * kLine, last_row_);
      prefetch_l1(scales_.input + at / scales_.rows_per_scale);
    }
  }

  template <class Sums>
  CUTLASS_DEVICE void scale(Sums& sums) const {
    float rows[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i)
      rows[i] = __ldg(scales_.input + row(i) / scales_.rows_per_scale);
    if constexpr (Types::kHalves) {
      // Where these fit they are a fraction of the instructions below, which take as long as a block or two along K.
      if (scales_.weight_stride == 0) {
        const float one = __ldg(scales_.weight);
        return scale_by(sums, rows, [&](int) { return make_float2(one, one); });
      }
      const float* const first = scales_.weight + column_;
      const bool inside = column_ + kPieceColumns * (kColumns / 2) <= last_column_ + 1;
      if (scales_.weight_stride == 1 && inside && reinterpret_cast<uintptr_t>(first) % 8 == 0) {
        return scale_by(sums, rows, [&](int piece) {
          return __ldg(reinterpret_cast<const float2*>(first + piece * kPieceColumns));
        });
      }
    }
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
  // `columns_of(piece)`: the scales of a thread's two columns in each eight.
  template <class Sums, class ColumnsOf>
  CUTLASS_DEVICE static void scale_by(Sums& sums, const float (&rows)[kRows],
                                      ColumnsOf columns_of) {
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kColumns / 2; ++piece) {
      const float2 columns = columns_of(piece);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kRows; ++j) {
          sums(cute::make_coord(cute::make_coord(i, j % 2, piece), j / 2, 0)) *=
              rows[j] * (i == 0 ? columns.x : columns.y);
        }
      }
    }
  }

  CUTLASS_DEVICE static void prefetch_l1(const float* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
  }

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
};

template <plan::Kernel kKernel, class InputElement, bool kPeers = false>
GemmSm90Instance make_scaled_gemm_sm90_instance() {
  using Launcher = GemmSm90Launcher<GemmSm90Of<kKernel, ScaledOperands<InputElement>, kPeers>>;
  return {&Launcher::launch, &Launcher::load};
}

}  // namespace overlap::kernels
