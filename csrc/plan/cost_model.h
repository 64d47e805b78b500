// What the planner and the cost model's parts share.
#pragma once

#include <algorithm>

#include "plan/plan.h"
#include "plan/planner.h"

namespace overlap::plan {

// GB/s: below it, as over PCIe or host memory, a few CTAs fill the link.
inline constexpr double kSlowLinkGbps = 60.0;

inline bool slow_link(const Machine& machine) {
  return machine.arch == 0 || machine.link_gbps < kSlowLinkGbps;
}

// Rounds of tiles, the last one whether full or not.
inline double rounds_of(int64_t tiles, int32_t at_once) {
  return static_cast<double>((tiles + at_once - 1) / at_once);
}

// Tiles of the framework's GEMM as work: it takes other tiles where these would reach beyond the matrix. (That of
// 1026 x 28672 x 4096 runs at the rate of whole tiles, and has a ninth less to do than nine rows of them.)
inline double library_tiles(const Plan& plan, int64_t rows) {
  const auto along = [](int64_t size, int32_t tile) {
    return std::max(1.0, static_cast<double>(size) / tile);
  };
  return along(rows, plan.tile_m) * along(plan.problem.n, plan.tile_n);
}

// Time of one tile on an SM; on CPU on all cores.
double tile_us(const Plan& plan, const Machine& machine);

// What a plan over the peers' memory is expected to cost, given the time of one tile.
Prediction predict_peers(const Plan& plan, const Machine& machine, double per_tile_us);

}  // namespace overlap::plan
