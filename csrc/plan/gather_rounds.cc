#include "plan/gather_rounds.h"

#include <algorithm>
#include <cstddef>

namespace overlap::plan {

std::vector<GatherLaunch> gather_launches(const std::vector<int32_t>& arriving, int32_t cluster_m,
                                          int32_t beside, int32_t alone) {
  // A grid is of whole clusters.
  const auto grid = [&](int32_t ctas) { return std::max(ctas / cluster_m, 1) * cluster_m; };
  std::vector<GatherLaunch> launches;
  int32_t begin = 0;
  int32_t there = 0;
  for (size_t i = 0; i < arriving.size(); ++i) {
    there += arriving[i];
    const bool last = i + 1 == arriving.size();
    const int32_t at_once = grid(last ? alone : beside);
    const int32_t left = there - begin;
    const int32_t taken = last || left < at_once ? left : left / at_once * at_once;
    launches.push_back({begin, begin + taken, at_once});
    begin += taken;
  }
  return launches;
}

std::vector<GatherLaunch> gather_launches(const Plan& plan, int32_t sm_count) {
  const int32_t beside = std::max(1, sm_count - plan.resources.comm_sms);
  const std::vector<int32_t> arriving = gather_arrivals(plan, tiles_n(plan));
  if (plan.kernel != Kernel::kLibrary) {
    return gather_launches(arriving, plan.cluster_m, beside, sm_count);
  }
  std::vector<GatherLaunch> launches;
  int32_t begin = 0;
  for (const int32_t count : arriving) {
    launches.push_back({begin, begin + count, beside});
    begin += count;
  }
  return launches;
}

std::vector<int32_t> gather_arrivals(const Plan& plan, int32_t tile_columns) {
  const int32_t parts = row_parts(plan);
  std::vector<int32_t> tiles{tiles_m(plan) / parts * tile_columns};
  for (const Chunk& chunk : plan.chunks) {
    tiles.push_back(chunk.tiles / tiles_n(plan) / parts * (parts - 1) * tile_columns);
  }
  return tiles;
}

TileOrder gather_order(const Plan& plan, int64_t columns) {
  TileOrder order = chunked_order(plan, columns, gather_arrivals(plan, 1));
  order.parts = row_parts(plan);
  return order;
}

}  // namespace overlap::plan
