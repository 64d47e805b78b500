#include "plan/gather_rounds.h"

#include <algorithm>
#include <cstddef>

namespace overlap::plan {

namespace {

int32_t rounds(int32_t tiles, int32_t at_once) {
  return (tiles + at_once - 1) / at_once;
}

// The rounds of the launches from `arrival` on, which leave tiles that do not fill a round; `left`
// tiles come from the launches before.
int32_t rounds_from(size_t arrival, int32_t left, const std::vector<int32_t>& arriving,
                    int32_t beside, int32_t alone) {
  int32_t total = 0;
  for (size_t i = arrival; i < arriving.size(); ++i) {
    left += arriving[i];
    if (i + 1 == arriving.size()) return total + rounds(left, alone);
    if (left < beside) {
      total += left > 0 ? 1 : 0;
      left = 0;
    } else {
      total += left / beside;
      left %= beside;
    }
  }
  return total;
}

}  // namespace

std::vector<GatherLaunch> gather_launches(const std::vector<int32_t>& arriving, int32_t cluster_m,
                                          int32_t beside, int32_t alone) {
  // A grid is of whole clusters.
  const auto grid = [&](int32_t ctas) { return std::max(ctas / cluster_m, 1) * cluster_m; };
  const int32_t few = grid(beside);
  const int32_t all = grid(alone);
  std::vector<GatherLaunch> launches;
  int32_t begin = 0;
  int32_t there = 0;
  for (size_t i = 0; i < arriving.size(); ++i) {
    there += arriving[i];
    const bool last = i + 1 == arriving.size();
    const int32_t left = there - begin;
    // A round later, if that is a round less: else it hides more of what is still to arrive.
    const int32_t rest = last || left < few ? 0 : left % few;
    const bool leaves = rest > 0 && rounds_from(i + 1, rest, arriving, few, all) <
                                        1 + rounds_from(i + 1, 0, arriving, few, all);
    const int32_t taken = left - (leaves ? rest : 0);
    launches.push_back({begin, begin + taken, last ? all : few});
    begin += taken;
  }
  return launches;
}

bool gathers_in_one_launch(const Plan& plan) {
  const int64_t runs = 1 + static_cast<int64_t>(plan.chunks.size()) * (plan.problem.world_size - 1);
  return over_peers(plan) && !hierarchical(plan) && can(plan.kernel, kCopiesBeside) &&
         plan.resources.comm_sms >= plan.cluster_m && runs <= kMaxCopyRuns;
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
