// Plans by template, as the planner and users make them.
#pragma once

#include <optional>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

// Tile shape and cluster of a kernel.
KernelShape kernel_shape(Kernel kernel, bool on_cpu);

// The problem in the kernel's tiles, without bands and chunks. `shape` as below.
Plan base_plan(const Problem& problem, Kernel kernel, Transport transport,
               const KernelShape& shape);

// Tile rows of one part.
int32_t part_tile_rows(const Plan& plan);

// GEMM, then one collective.
Plan make_sequential(const Problem& problem, const Machine& machine);

// The templates below make overlapped plans, valid ones: they throw as validate does. Plans over
// gloo are CPU plans. `shape` replaces the kernel's own tile shape where its tile_m is not 0; only
// kLibrary takes any.

// Row panels: `chunk_rows_of_tiles` are the chunks' heights in tile rows, top to bottom (they must
// sum up to the tile grid's height, or to that of one part: such a chunk holds as many rows of each
// part), each cut into bands of at most `band_rows` tile rows. `collective`: in place of the op's
// own, or of a ring. `clique`: of the collective hierarchical.
Plan make_row_panels(const Problem& problem, Kernel kernel,
                     const std::vector<int32_t>& chunk_rows_of_tiles, int32_t band_rows,
                     const Resources& resources, int32_t max_ctas,
                     Transport transport = Transport::kNccl, const KernelShape& shape = {},
                     std::optional<Collective> collective = {}, int32_t clique = 0);

// Packed tiles, cut anywhere: `chunk_tiles` sum up to the number of tiles.
Plan make_packed(const Problem& problem, Kernel kernel, const std::vector<int32_t>& chunk_tiles,
                 int32_t band_rows, const Resources& resources, int32_t max_ctas,
                 Transport transport = Transport::kNccl, const KernelShape& shape = {});

// Over peers in one step: reductions are direct, from the kernel's own stores, or with kLibrary from
// one kernel after its GEMM; an all-gather, with kLibrary, is one kernel before it. A schedule says which, for a kernel of
// this package: sequential has its GEMM first, and the kernel that sends and adds after it.
Plan make_at_once(const Problem& problem, Kernel kernel,
                  std::optional<Schedule> schedule = std::nullopt);

// gemm_alltoall: kernel, resources and transport of what is sent. In how many pieces follows, pair by
// pair, from the rows that the two ranks exchange. Over peers `max_ctas` is that of long messages, which
// travel by NCCL; resources.one_launch is its way only over peers.
Plan make_all_to_all(const Problem& problem, Kernel kernel, const Resources& resources,
                     int32_t max_ctas, Transport transport = Transport::kNccl);

}  // namespace overlap::plan
