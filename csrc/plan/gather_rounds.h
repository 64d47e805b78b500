// Each launch of an all-gather's GEMM computes these tiles.
//
// The rows arrive chunk by chunk, and all launches walk one tile order:
//
//   own rows | the other ranks' rows of chunk 0 | of chunk 1 | ...
//
// Where copy engines bring the rows, one launch computes all tiles, and waits for each chunk inside. Where
// what brings them needs SMs, as NCCL does, no GEMM may hold its SMs and wait: each arrival starts a launch.
// A launch takes whole rounds of tiles out of what is there and not computed yet, and leaves the rest to
// the one after it, if that saves a round: else the rest hides more of what is still to arrive. So,
// instead of ending each with a round that is not full, all of them together take no more rounds than one
// launch would on the SMs beside communication, and one more for each launch that finds less than a round.
// The last launch has nothing beside it, and takes all SMs.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

// Tiles [first_tile, end_tile), `at_once` at a time. Nothing is launched for none.
struct GatherLaunch {
  int32_t first_tile = 0;
  int32_t end_tile = 0;
  int32_t at_once = 0;

  int32_t tiles() const { return end_tile - first_tile; }
};

// One launch for each count of `arriving`, after which that number of tiles more can be computed (whole
// clusters). `beside`, `alone`: CTAs of a launch beside communication, and of the last one.
std::vector<GatherLaunch> gather_launches(const std::vector<int32_t>& arriving, int32_t cluster_m,
                                          int32_t beside, int32_t alone);

// True if a plan's GEMM is one launch that waits for rows itself: over peers, by a kernel that can,
// which leaves a cluster's SMs to the signals after the copies, and copies all runs of rows that
// arrive.
bool gathers_in_one_launch(const Plan& plan);

// Tiles that can be computed at once, of this rank's rows, and after each chunk, of the other ranks', for
// a weight of this number of tile columns.
std::vector<int32_t> gather_arrivals(const Plan& plan, int32_t tile_columns);

// The order of them all, for a weight of this number of columns; the chunks are those arrivals. See
// RowMap::Mode::kGather.
TileOrder gather_order(const Plan& plan, int64_t columns);

}  // namespace overlap::plan
