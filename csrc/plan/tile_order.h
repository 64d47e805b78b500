// Tile index <-> (row, column) <-> chunk <-> place in the buffer: the only definition of all four,
// used by the planner, the GEMM kernels, the reorder kernels and the CPU path alike.
//
//   bands      The output's tile rows are cut into bands. Tiles are taken band after band; inside a
//              band column after column, and inside a column from top to bottom. A band of many rows
//              keeps a wave square (good for L2), one of few rows finishes its rows early (good for
//              communication).
//   clusters   `cluster_m` CTAs along M share one step, so band heights are multiples of it and tile
//              indices c * cluster_m ... c * cluster_m + cluster_m - 1 belong to one cluster.
//   chunks     A chunk is a run of tile indices. Chunk c is [chunk_begin[c], chunk_begin[c + 1]).
//   parts      Where the output's (reduce-scatter) or the input's (all-gather) rows belong to the
//              ranks, a part each, a chunk holds equal tile rows of every part, in rank order:
//
//                tile row  0 1 | 2 3 | 4 5 6 | 7 8 9       two parts of five tile rows,
//                part      0 0 | 1 1 | 0 0 0 | 1 1 1       in chunks of two and three
//                its row   0 1 | 0 1 | 2 3 4 | 2 3 4
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define OVERLAP_HOST_DEVICE __host__ __device__
#else
#define OVERLAP_HOST_DEVICE
#endif

namespace overlap::plan {

inline constexpr int kMaxBandRuns = 16;
inline constexpr int kMaxChunks = 64;
inline constexpr int kMaxLanes = 4;
inline constexpr int kMaxCopyRuns = 16;  // that a GEMM copies meanwhile
inline constexpr int kMaxPeers = 8;      // ranks, at most, that map each other's memory

// `count` consecutive bands of `tile_rows` tile rows each.
struct BandRun {
  int32_t tile_rows = 0;
  int32_t count = 0;

  friend constexpr bool operator==(const BandRun&, const BandRun&) = default;
};

// Position of a tile in units of tiles.
struct TileCoord {
  int32_t row = 0;
  int32_t column = 0;
};

// Plain data, passed to kernels by value.
struct TileOrder {
  int32_t tiles_m = 0;     // rows of tiles, rounded up to a multiple of cluster_m
  int32_t tiles_n = 0;     // columns of tiles
  int32_t num_runs = 0;    // used entries of `runs`
  int32_t num_chunks = 0;  // used chunks
  int32_t parts = 1;       // of the rows; more than one only with chunks of whole tile rows
  BandRun runs[kMaxBandRuns] = {};
  // An all-gather's GEMM has this rank's rows as one more chunk before the plan's.
  int32_t chunk_begin[kMaxChunks + 2] = {};

  OVERLAP_HOST_DEVICE constexpr int32_t num_tiles() const { return tiles_m * tiles_n; }
};

// Tile index -> (row, column).
OVERLAP_HOST_DEVICE constexpr TileCoord tile_coord(const TileOrder& order, int32_t index) {
  int32_t row = 0;
  for (int32_t r = 0; r < order.num_runs; ++r) {
    const int32_t height = order.runs[r].tile_rows;
    const int32_t band_tiles = height * order.tiles_n;
    const int32_t run_tiles = band_tiles * order.runs[r].count;
    if (index < run_tiles) {
      const int32_t band = index / band_tiles;
      const int32_t in_band = index - band * band_tiles;
      const int32_t column = in_band / height;
      return {row + band * height + (in_band - column * height), column};
    }
    index -= run_tiles;
    row += height * order.runs[r].count;
  }
  return {order.tiles_m, order.tiles_n};  // past the last tile
}

// (row, column) -> tile index.
OVERLAP_HOST_DEVICE constexpr int32_t tile_index(const TileOrder& order, TileCoord coord) {
  int32_t index = 0;
  int32_t row = coord.row;
  for (int32_t r = 0; r < order.num_runs; ++r) {
    const int32_t height = order.runs[r].tile_rows;
    const int32_t run_rows = height * order.runs[r].count;
    if (row < run_rows) {
      const int32_t band = row / height;
      return index + (band * order.tiles_n + coord.column) * height + (row - band * height);
    }
    row -= run_rows;
    index += run_rows * order.tiles_n;
  }
  return order.num_tiles();
}

// Tile index -> chunk.
OVERLAP_HOST_DEVICE constexpr int32_t tile_chunk(const TileOrder& order, int32_t index) {
  int32_t low = 0;
  int32_t high = order.num_chunks - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (order.chunk_begin[middle] <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A tile row of one part.
struct PartRow {
  int32_t part = 0;
  int32_t row = 0;  // counted in the part
};

// Tile row -> (part, row).
OVERLAP_HOST_DEVICE constexpr PartRow part_row(const TileOrder& order, int32_t tile_row) {
  if (order.parts == 1) return {0, tile_row};
  const int32_t chunk = tile_chunk(order, tile_row * order.tiles_n);
  const int32_t first = order.chunk_begin[chunk] / order.tiles_n;
  const int32_t height = order.chunk_begin[chunk + 1] / order.tiles_n - first;
  const int32_t part_height = height / order.parts;
  const int32_t part = (tile_row - first) / part_height;
  return {part, first / order.parts + (tile_row - first) - part * part_height};
}

// Where the tile rows of a GEMM lie in its input and in its output.
struct RowMap {
  enum class Mode : int32_t {
    kPlain = 0,    // as they are
    kScatter = 1,  // the input's rows are parts, one after the other; the output holds whole tiles,
                   // in tile order
    kGather = 2,   // the output's rows are parts, one after the other. The tile rows of chunk 0 are
    // this rank's part's; those of each chunk after it are the other parts', as many of
    // each, in order. This rank's rows are an input of their own; the others' lie in the
    // input chunk by chunk, which has room for all parts in each
    kSplit =
        3,  // the input's rows are parts, one after the other, the last of which may be shorter; each has
    // an output of its own. Each is taken in a phase, part_tile_rows after part_tile_rows; or in rounds
    kRanges =
        4,  // the same, of any number of rows each; each is taken as one of the order's chunks
  };
  Mode mode = Mode::kPlain;
  int32_t part_rows =
      0;                 // rows of a part: of the input (kScatter, kSplit), of the output (kGather)
  int32_t own_part = 0;  // kGather: this rank's
  // In memory the rows of a part may be every parts-th block of this number of rows, a multiple of the tiles': those of the
  // input (kScatter, kSplit), or of the output (kGather). 0: parts lie one after the other.
  int32_t block_rows = 0;
  int32_t part_tile_rows = 0;  // kSplit: tile rows of a part ...
  // ... and of a round, a divisor: rounds are mixed as ring_order.h has it. 0: phase after phase.
  int32_t round_tile_rows = 0;
  int32_t first_part = 0;  // kSplit, kRanges: the part that is computed first ...
  int32_t part_step = 1;   // ... and what to add, modulo the number of parts, for the next one
  int32_t range_begin[kMaxPeers] = {};  // kRanges: where each part begins in the input
};

// Where one tile row begins: `input_row` counts rows, `output_row` tile rows of part `output_part`,
// or of output `output_part` (kSplit, kRanges).
struct TileRowPlace {
  int32_t input_row = 0;
  int32_t output_row = 0;
  int32_t output_part = 0;
  bool own_input = false;  // kGather: the row lies in the input that holds this rank's own part
};

// Where a part's row lies in memory.
OVERLAP_HOST_DEVICE constexpr int32_t row_in_memory(const RowMap& map, int32_t parts, int32_t part,
                                                    int32_t row) {
  if (map.block_rows == 0) return part * map.part_rows + row;
  return part * map.block_rows + row + row / map.block_rows * (parts - 1) * map.block_rows;
}

// With rows of mode kSplit: in which phase a tile row is taken, and which of that part's tile rows it is.
struct SplitRow {
  int32_t phase = 0;
  int32_t row = 0;
};

// The round and phase of the `index`-th of ring_order.h's.
OVERLAP_HOST_DEVICE constexpr SplitRow ring_round(int32_t parts, int32_t rounds, int32_t index) {
  const int32_t most = parts < rounds ? parts : rounds;  // in a band
  const int32_t rising = most * (most - 1) / 2;
  const int32_t level = parts * rounds - 2 * rising;
  int32_t band = 0;
  int32_t place = index;
  if (index < rising) {
    while (place > band) place -= ++band;
  } else if (index < rising + level) {
    band = most - 1 + (index - rising) / most;
    place = (index - rising) % most;
  } else {
    band = most - 1 + level / most;
    place = index - rising - level;
    for (int32_t phases = most - 1; place >= phases; ++band) place -= phases--;
  }
  const int32_t first = band >= rounds ? band - rounds + 1 : 0;
  return {first + place, band - first - place};
}

OVERLAP_HOST_DEVICE constexpr SplitRow split_row(const TileOrder& order, const RowMap& map,
                                                 int32_t tile_row) {
  const int32_t height = map.round_tile_rows;
  if (height == 0) {
    const int32_t phase = tile_row / map.part_tile_rows;
    return {phase, tile_row - phase * map.part_tile_rows};
  }
  const int32_t index = tile_row / height;
  const SplitRow round = ring_round(order.parts, map.part_tile_rows / height, index);
  return {round.phase, round.row * height + tile_row - index * height};
}

// A tile row of a part is stored here, with rows of mode kGather. With blocks the output is one
// matrix of all parts.
OVERLAP_HOST_DEVICE constexpr TileRowPlace stored_row_place(const TileOrder& order,
                                                            const RowMap& map, int32_t tile_m,
                                                            int32_t part, int32_t row) {
  if (map.block_rows == 0) return {0, row, part};
  return {0, row_in_memory(map, order.parts, part, row * tile_m) / tile_m, 0};
}

// The place of a tile row with rows of mode kGather.
OVERLAP_HOST_DEVICE constexpr TileRowPlace gathered_row_place(const TileOrder& order,
                                                              const RowMap& map, int32_t tile_m,
                                                              int32_t tile_row) {
  const int32_t chunk = tile_chunk(order, tile_row * order.tiles_n);
  if (chunk == 0) {
    TileRowPlace place = stored_row_place(order, map, tile_m, map.own_part, tile_row);
    place.input_row = tile_row * tile_m;
    place.own_input = true;
    return place;
  }
  const int32_t others = order.parts - 1;
  const int32_t own_height = order.chunk_begin[1] / order.tiles_n;
  const int32_t first = order.chunk_begin[chunk] / order.tiles_n;
  const int32_t height = (order.chunk_begin[chunk + 1] / order.tiles_n - first) / others;
  const int32_t other = (tile_row - first) / height;
  const int32_t row = tile_row - first - other * height;
  const int32_t part = other < map.own_part ? other : other + 1;
  // In each part the chunk begins at this tile row, and has this number of rows: the last chunk may end
  // before its tiles do.
  const int32_t chunk_row = (first - own_height) / others;
  const int32_t left = map.part_rows - chunk_row * tile_m;
  const int32_t rows = left < height * tile_m ? left : height * tile_m;
  TileRowPlace place = stored_row_place(order, map, tile_m, part, chunk_row + row);
  place.input_row = order.parts * chunk_row * tile_m + part * rows + row * tile_m;
  return place;
}

OVERLAP_HOST_DEVICE constexpr TileRowPlace tile_row_place(const TileOrder& order, const RowMap& map,
                                                          int32_t tile_m, int32_t tile_row) {
  if (map.mode == RowMap::Mode::kPlain) return {tile_row * tile_m, tile_row, 0};
  if (map.mode == RowMap::Mode::kSplit) {
    const auto [phase, row] = split_row(order, map, tile_row);
    const int32_t part = (map.first_part + phase * map.part_step) % order.parts;
    return {row_in_memory(map, order.parts, part, row * tile_m), row, part};
  }
  if (map.mode == RowMap::Mode::kGather) return gathered_row_place(order, map, tile_m, tile_row);
  if (map.mode == RowMap::Mode::kRanges) {
    const int32_t chunk = tile_chunk(order, tile_row * order.tiles_n);
    const int32_t row = tile_row - order.chunk_begin[chunk] / order.tiles_n;
    const int32_t part = (map.first_part + chunk * map.part_step) % order.parts;
    return {map.range_begin[part] + row * tile_m, row, part};
  }
  const PartRow place = part_row(order, tile_row);
  return {row_in_memory(map, order.parts, place.part, place.row * tile_m), tile_row, 0};
}

// The chunk's tiles: what its counter shows when it is finished.
OVERLAP_HOST_DEVICE constexpr int32_t chunk_tiles(const TileOrder& order, int32_t chunk) {
  return order.chunk_begin[chunk + 1] - order.chunk_begin[chunk];
}

// Packed layout: tile `index` is a contiguous, row-major tile_m x tile_n block that starts at this
// element.
OVERLAP_HOST_DEVICE constexpr int64_t packed_offset(int32_t index, int32_t tile_m, int32_t tile_n) {
  return static_cast<int64_t>(index) * tile_m * tile_n;
}

// Packed layout in which each chunk's region holds `terms` of a sum, one after the other: the place, in tiles,
// of tile `index` of term `term`. With one it is the index itself.
OVERLAP_HOST_DEVICE constexpr int32_t packed_slot(const TileOrder& order, int32_t index,
                                                  int32_t terms, int32_t term) {
  if (terms == 1) return index;
  const int32_t chunk = tile_chunk(order, index);
  return index + (terms - 1) * order.chunk_begin[chunk] + term * chunk_tiles(order, chunk);
}

}  // namespace overlap::plan
