#include "plan/ring_order.h"

#include <algorithm>

namespace overlap::plan {

int32_t ring_round_rows(const Plan& plan) {
  const int32_t parts = plan.problem.world_size;
  const int32_t part_tile_rows = tiles_m(plan) / parts;
  const bool few = plan.problem.traits().all_reduces() && parts > 2;
  int32_t clusters = few ? 1 : std::max(kBandRows / parts / plan.cluster_m, 1);
  while (part_tile_rows % (clusters * plan.cluster_m) != 0) --clusters;
  return clusters * plan.cluster_m;
}

RingBand ring_band(int32_t parts, int32_t rounds, int32_t band) {
  return {std::max(0, band - rounds + 1), std::min(parts, band + 1)};
}

TileOrder ring_order(int32_t parts, int32_t part_tile_rows, int32_t tiles_n, int32_t round_rows) {
  TileOrder order;
  order.tiles_m = parts * part_tile_rows;
  order.tiles_n = tiles_n;
  order.parts = parts;
  const int32_t rounds = part_tile_rows / round_rows;
  for (int32_t band = 0; band < rounds + parts - 1; ++band) {
    const RingBand phases = ring_band(parts, rounds, band);
    add_bands(order, (phases.end_phase - phases.first_phase) * round_rows, 1);
  }
  order.num_chunks = 1;
  order.chunk_begin[1] = order.num_tiles();
  return order;
}

}  // namespace overlap::plan
