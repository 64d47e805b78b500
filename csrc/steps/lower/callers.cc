#include "steps/lower/callers.h"

#include <algorithm>
#include <utility>

namespace overlap::steps {

void CallersTiles::assign(int64_t rows, const std::vector<Claim>& claims, bool first) {
  KernelTiles& tiles = list_.made.tiles;
  tiles.columns = plan::tiles_n(plan_);
  const int64_t tile_rows = (rows + plan_.tile_m - 1) / plan_.tile_m;
  tiles.chunks.reserve(at(tile_rows * tiles.columns));
  needs_.resize(at(list_.made.counters));
  counts_.resize(at(list_.made.counters));
  for (int64_t row = 0; row < tile_rows; ++row) {
    const plan::Rows own = {row * plan_.tile_m, (row + 1) * plan_.tile_m};
    std::set<int32_t> by;
    for (const Claim& one : claims) {
      if (one.rows.begin < std::min(own.end, one.rows.end) && own.begin < one.rows.end) {
        by.insert(one.chunk);
      }
    }
    const int32_t chunk = by.empty() ? 0 : first ? *by.begin() : *by.rbegin();
    for (const int32_t one : by) needs_[at(one)].insert(chunk);
    tiles.chunks.insert(tiles.chunks.end(), at(tiles.columns), chunk);
    counts_[at(chunk)] += tiles.columns;
  }
}

void CallersTiles::assign(const plan::TileOrder& order) {
  const int64_t rows = (plan_.problem.m + plan_.tile_m - 1) / plan_.tile_m;
  KernelTiles& tiles = list_.made.tiles;
  tiles.columns = order.tiles_n;
  tiles.chunks.resize(at(rows * order.tiles_n));
  counts_.resize(at(order.num_chunks));
  for (int32_t index = 0; index < order.num_tiles(); ++index) {
    const plan::TileCoord tile = plan::tile_coord(order, index);
    if (tile.row >= rows) continue;  // rounds clusters up
    const int32_t chunk = plan::tile_chunk(order, index);
    tiles.chunks[at(int64_t{tile.row} * order.tiles_n + tile.column)] = chunk;
    ++counts_[at(chunk)];
  }
  for (int32_t chunk = 0; chunk < order.num_chunks; ++chunk) needs_.push_back({chunk});
}

void CallersTiles::wait(Lane lane, int32_t chunk) {
  bool first = true;
  for (const int32_t other : needs_[at(chunk)]) {
    list_.add(lane, WaitForTiles{other, counted(other)});
    list_.made.steps.back().held = std::exchange(first, false);
  }
}

void add_callers_kernel(const plan::Plan& plan, int64_t rows, List& list) {
  list.made.counters = 1;
  CallersTiles(plan, list).assign(rows, {}, true);
  list.add(Lane::kCaller, CallersKernel{});
}

}  // namespace overlap::steps
