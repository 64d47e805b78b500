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
  BandRun runs[kMaxBandRuns] = {};
  int32_t chunk_begin[kMaxChunks + 1] = {};

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

// The chunk's tiles: what its counter shows when it is finished.
OVERLAP_HOST_DEVICE constexpr int32_t chunk_tiles(const TileOrder& order, int32_t chunk) {
  return order.chunk_begin[chunk + 1] - order.chunk_begin[chunk];
}

// Packed layout: tile `index` is a contiguous, row-major tile_m x tile_n block that starts at this
// element.
OVERLAP_HOST_DEVICE constexpr int64_t packed_offset(int32_t index, int32_t tile_m, int32_t tile_n) {
  return static_cast<int64_t>(index) * tile_m * tile_n;
}

// Packed layout in which each chunk's region holds `parts` copies of the chunk, one after the
// other: the place, in tiles, of tile `index` of copy `part`. With one part it is the index itself.
OVERLAP_HOST_DEVICE constexpr int32_t packed_slot(const TileOrder& order, int32_t index,
                                                  int32_t parts, int32_t part) {
  if (parts == 1) return index;
  const int32_t chunk = tile_chunk(order, index);
  return index + (parts - 1) * order.chunk_begin[chunk] + part * chunk_tiles(order, chunk);
}

}  // namespace overlap::plan
