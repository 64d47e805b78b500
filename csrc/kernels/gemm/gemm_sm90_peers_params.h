// The parameters of the Hopper GEMM for peers, and the sum of its peers' terms.
#pragma once

#include "kernels/gemm/gemm_sm90_body.h"
#include "kernels/peer/pair_sum.cuh"

namespace overlap::kernels {

// The parameters of a GEMM whose tiles go to peers' memory, and come from there.
template <class Types>
struct GemmSm90PeersParams : GemmSm90Params<Types> {
  using GemmSm90Params<Types>::end_tile;
  using GemmSm90Params<Types>::order;
  using GemmSm90Params<Types>::rows;

  uint32_t sources;  // bit mask of the outputs that have one
  uint32_t sent;     // and of those that peers' memory holds, too
  int32_t spread_ns;
  PeerTiles tiles;
  typename Types::Collected collected;
  cute::TmaDescriptor mirrors[kMaxMoreOutputs];
  GemmMessages messages;  // stored: null: there are none
  PeerTerms peer_terms;   // first: null: there are none
  bool rounds;            // terms to which a source is added

  CUTLASS_DEVICE bool sends_messages() const { return messages.stored != nullptr; }
  CUTLASS_DEVICE bool has_outputs() const {
    return rows.mode == plan::RowMap::Mode::kSplit || rows.mode == plan::RowMap::Mode::kRanges;
  }
  // The output that a tile row goes to, and whether something is added there.
  CUTLASS_DEVICE int32_t output(const plan::TileRowPlace& place) const {
    return has_outputs() ? place.output_part : 0;
  }
  CUTLASS_DEVICE int32_t matrix(const plan::TileRowPlace& place) const {
    return has_outputs() ? 0 : place.output_part;
  }
  CUTLASS_DEVICE bool has_source(const plan::TileRowPlace& place) const {
    return (sources >> output(place) & 1) != 0;
  }
  // How long a tile waits for its turn on the link.
  CUTLASS_DEVICE int32_t hold_ns(int32_t index, const plan::TileRowPlace& place) const {
    const bool last_round = index + static_cast<int32_t>(gridDim.x) >= end_tile;
    if (last_round || (sent >> output(place) & 1) == 0) return 0;
    return static_cast<int32_t>(int64_t{spread_ns} * blockIdx.x / gridDim.x);
  }
  // Tiles between a rank's and those of the next rank that are added to it.
  CUTLASS_DEVICE int32_t part_tiles() const { return rows.part_tile_rows * order.tiles_n; }
  CUTLASS_DEVICE bool collects() const { return collected.rows != 0; }
  // A tile of this row is final if it belongs to this rank's part.
  CUTLASS_DEVICE bool is_final(int32_t tile_row) const {
    return plan::split_row(order, rows, tile_row).phase + 1 == order.parts;
  }
  // A tile is announced if another rank waits for it.
  CUTLASS_DEVICE bool is_announced(int32_t tile_row) const {
    return tiles.announce[0] != nullptr && (collects() || !is_final(tile_row));
  }
  // The number of a tile's flag: parts in the order in which they are computed.
  CUTLASS_DEVICE int32_t flag(const plan::SplitRow& row, int32_t column) const {
    return (row.phase * rows.part_tile_rows + row.row) * order.tiles_n + column;
  }
  CUTLASS_DEVICE int32_t flag(const plan::TileCoord& coord) const {
    return flag(plan::split_row(order, rows, coord.row), coord.column);
  }
  // With terms: that of a tile in its part, whichever it is. Each source has numbers of its own at the owner.
  CUTLASS_DEVICE int32_t flag_in_part(const plan::TileCoord& coord) const {
    return flag({0, plan::split_row(order, rows, coord.row).row}, coord.column);
  }
  CUTLASS_DEVICE bool adds_terms() const { return peer_terms.first != nullptr; }
  // The `index`-th of the tiles that are final, in this rank's own part; of rounds, as all that is collected.
  CUTLASS_DEVICE plan::TileCoord final_tile(int32_t index) const {
    const int32_t height = rows.round_tile_rows;
    const int32_t round_tiles = height * order.tiles_n;
    const int32_t round = index / round_tiles;
    const int32_t in_round = index - round * round_tiles;
    return {round * height + in_round % height, in_round / height};
  }
};

// A tile's sum of the ranks' terms, each rounded to the output's type, in the ranks' order or, of groups of K, by pairs:
// so a row's bits do not depend on its owner. Threads have the sums that wgmma leaves them: of every eight columns two next to each other, of
// every 64 rows two of each warp's 16.
template <class Types, class Params, class Sums>
CUTLASS_DEVICE void add_peer_terms(const Params& params, const typename Types::Step& step,
                                   const plan::TileRowPlace& place, Sums& sums, int thread) {
  using Output = typename Types::Output;
  constexpr int kSlabRows = 64;
  constexpr int kPieceColumns = 8;
  constexpr int kPieces = Types::kTileN / kPieceColumns;
  // Loads in flight of each thread. Wide tiles have no registers for any, and sums by pairs take many.
  constexpr int kAtOnce = Types::Groups::kInGroups ? 4 : 8;
  static_assert(kPieces % kAtOnce == 0);
  const PeerTiles& tiles = params.tiles;
  const int lane = thread % cutlass::NumThreadsPerWarp;
  if (lane + 1 < tiles.ranks) {
    wait_for_tile(tiles, params.flag_in_part(step.coord) + lane * params.part_tiles(),
                  tile_number(tiles), lane + 1);
  }
  __syncwarp();
  const PeerTerms& terms = params.peer_terms;
  const int first_row =
      place.output_row * Types::kTileM + thread / cutlass::NumThreadsPerWarp * 16 + lane / 4;
  const int first_column = step.coord.column * Types::kTileN + lane % 4 * 2;
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < 2 * Types::kTileM / kSlabRows; ++j) {
    const int row = first_row + j / 2 * kSlabRows + j % 2 * 8;
    const bool is_stored = row < terms.rows;
    CUTLASS_PRAGMA_UNROLL
    for (int begin = 0; begin < kPieces; begin += kAtOnce) {
      float total[2 * kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kAtOnce; ++i) total[i] = kNoSum;
      [[maybe_unused]] PairSum<2 * kAtOnce> pairs;
      for (int rank = 0; rank < tiles.ranks; ++rank) {
        Output term[kAtOnce][2];
        if (rank == tiles.rank) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2 * kAtOnce; ++i) {
            const auto at =
                cute::make_coord(cute::make_coord(i % 2, j % 2, begin + i / 2), j / 2, 0);
            term[i / 2][i % 2] = static_cast<Output>(sums(at));
          }
        } else {
          const auto* const from = static_cast<const Output*>(terms.first) + rank * terms.stride +
                                   row * terms.row_stride;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            const int column = first_column + (begin + i) * kPieceColumns;
            uint32_t pair = 0;
            if (is_stored && column < terms.columns) {
              pair = *reinterpret_cast<const uint32_t*>(from + column);
            }
            *reinterpret_cast<uint32_t*>(term[i]) = pair;
          }
        }
        if constexpr (Types::Groups::kInGroups) {
          float terms[2 * kAtOnce];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2 * kAtOnce; ++i) {
            terms[i] = static_cast<float>(term[i / 2][i % 2]);
          }
          pairs.add(terms, rank,
                    [](float sum) { return static_cast<float>(static_cast<Output>(sum)); });
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2 * kAtOnce; ++i) {
            total[i] += static_cast<float>(term[i / 2][i % 2]);
          }
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const auto at = cute::make_coord(cute::make_coord(i % 2, j % 2, begin + i / 2), j / 2, 0);
        if constexpr (Types::Groups::kInGroups) {
          sums(at) = pairs.value[i];
        } else {
          sums(at) = total[i];
        }
      }
    }
  }
}

}  // namespace overlap::kernels
