// The order in which a ring's GEMM takes its tiles in one launch. A part is computed in phases, one on each
// rank, and in its last phase, on its owner, an all-reduce's tile goes to everyone: taken phase after phase, the
// link would have less to carry than it can at first, and more at last. So the tile rows of the parts are cut
// into rounds, and each band of tiles holds one round of every phase, each after the one whose sums it adds:
//
//   band         0     1      2        3     4      three parts of three rounds;
//   phase, round  0,0   0,1    0,2      1,2   2,2    phase t of a round lies in the band after
//                      1,0    1,1      2,1          that of its phase t - 1
//                             2,0
#pragma once

#include <cstdint>

#include "plan/plan.h"
#include "plan/tile_order.h"

namespace overlap::plan {

// Tile rows of each part in a round of such a plan.
int32_t ring_round_rows(const Plan& plan);

// The phases of which a band, of rounds + parts - 1, holds a round each.
struct RingBand {
  int32_t first_phase = 0;
  int32_t end_phase = 0;
};
RingBand ring_band(int32_t parts, int32_t rounds, int32_t band);

// For parts of `part_tile_rows`, a multiple of `round_rows`, which are whole clusters. One chunk.
TileOrder ring_order(int32_t parts, int32_t part_tile_rows, int32_t tiles_n, int32_t round_rows);

}  // namespace overlap::plan
