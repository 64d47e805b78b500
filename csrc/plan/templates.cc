#include "plan/templates.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/message.h"

namespace overlap::plan {
namespace {

// True if the tables' 32-bit tile indices can count the tiles.
bool grid_fits(const Problem& problem, const KernelShape& shape) {
  const double rows = static_cast<double>(problem.m) / shape.tile_m + shape.cluster_m + 1;
  const double columns = static_cast<double>(problem.n) / shape.tile_n + 1;
  return rows * columns < static_cast<double>(std::numeric_limits<int32_t>::max());
}

void check_band_rows(int32_t band_rows) {
  if (band_rows <= 0) {
    fail("band_rows is ", band_rows,
         ", allowed is 1 or more, a multiple of the kernel's cluster_m");
  }
}

void add_bands(Plan& plan, int32_t tile_rows, int32_t count) {
  if (count == 0 || tile_rows == 0) return;
  if (!plan.bands.empty() && plan.bands.back().tile_rows == tile_rows) {
    plan.bands.back().count += count;
  } else {
    plan.bands.push_back({tile_rows, count});
  }
}

// `rows` tile rows as bands of `band_rows`, the last one lower where it does not come out even.
void cut_into_bands(Plan& plan, int32_t rows, int32_t band_rows) {
  add_bands(plan, band_rows, rows / band_rows);
  add_bands(plan, rows % band_rows, 1);
}

// Bands of one height that all chunks are whole numbers of: for chunks that cut_into_bands would
// give more runs than the tables hold. Leaves the bands alone where there is no such height.
void cut_into_equal_bands(Plan& plan, const std::vector<int32_t>& chunk_rows, int32_t band_rows) {
  int32_t divisor = 0;
  for (const int32_t rows : chunk_rows) divisor = std::gcd(divisor, rows);
  int32_t height = std::min(band_rows, divisor) / plan.cluster_m * plan.cluster_m;
  while (height > 0 && divisor % height != 0) height -= plan.cluster_m;
  if (height > 0) plan.bands = {{height, tiles_m(plan) / height}};
}

}  // namespace

KernelShape kernel_shape(Kernel kernel, bool on_cpu) {
  if (kernel == Kernel::kLibrary && on_cpu) return {256, 512, 1};
  return traits(kernel).shape;
}

Plan base_plan(const Problem& problem, Kernel kernel, Transport transport,
               const KernelShape& shape) {
  Plan plan;
  plan.problem = problem;
  plan.kernel = kernel;
  const KernelShape own =
      shape.tile_m != 0 ? shape : kernel_shape(kernel, traits(transport).on_cpu);
  if (own.tile_m <= 0 || own.tile_n <= 0 || own.cluster_m <= 0) {
    fail("tile shape ", own.tile_m, "x", own.tile_n, " in clusters of ", own.cluster_m,
         ": all three must be 1 or more");
  }
  if (!grid_fits(problem, own)) {
    fail(problem.to_string(), " has more tiles of ", own.tile_m, "x", own.tile_n,
         " than 32 bits count: split the problem");
  }
  plan.tile_m = own.tile_m;
  plan.tile_n = own.tile_n;
  plan.cluster_m = own.cluster_m;
  const bool reduces = problem.traits().sums();
  plan.collective =
      traits(transport).maps_memory && reduces ? Collective::kRing : collective_of(problem.op);
  return plan;
}

// Tile rows of one part.
int32_t part_tile_rows(const Plan& plan) {
  return tiles_m(plan) / row_parts(plan);
}

Plan make_sequential(const Problem& problem, const Machine& machine) {
  const Transport transport = machine.arch == 0 ? Transport::kGloo : Transport::kNccl;
  Plan plan = base_plan(problem, Kernel::kLibrary, transport, {});
  const int32_t rows = tiles_m(plan);
  add_bands(plan, rows, 1);
  plan.chunks.push_back({.tiles = rows * tiles_n(plan), .transport = transport, .max_ctas = 0});
  validate(plan);
  return plan;
}

Plan make_row_panels(const Problem& problem, Kernel kernel,
                     const std::vector<int32_t>& chunk_rows_of_tiles, int32_t band_rows,
                     const Resources& resources, int32_t max_ctas, Transport transport,
                     const KernelShape& shape, std::optional<Collective> collective,
                     int32_t clique) {
  check_band_rows(band_rows);
  Plan plan = base_plan(problem, kernel, transport, shape);
  plan.schedule = Schedule::kOverlapped;
  plan.layout = Layout::kRowMajor;
  plan.collective = collective.value_or(plan.collective);
  plan.clique = clique;
  plan.resources = resources;
  const int32_t parts = row_parts(plan);
  for (const int32_t part_rows : chunk_rows_of_tiles) {
    if (part_rows <= 0 || part_rows > part_tile_rows(plan)) {
      fail("a chunk is ", part_rows, " tile rows high, allowed are 1 to ", part_tile_rows(plan),
           ", the height of ", parts == 1 ? "the tile grid" : "one rank's part of the tile grid",
           ": change chunk_rows_of_tiles");
    }
    const int32_t rows = parts * part_rows;
    cut_into_bands(plan, rows, band_rows);
    plan.chunks.push_back(
        {.tiles = rows * tiles_n(plan), .transport = transport, .max_ctas = max_ctas});
  }
  if (plan.bands.size() > static_cast<size_t>(kMaxBandRuns)) {
    std::vector<int32_t> chunk_rows;
    for (const int32_t part_rows : chunk_rows_of_tiles) chunk_rows.push_back(parts * part_rows);
    cut_into_equal_bands(plan, chunk_rows, band_rows);
  }
  validate(plan);
  return plan;
}

Plan make_packed(const Problem& problem, Kernel kernel, const std::vector<int32_t>& chunk_tiles,
                 int32_t band_rows, const Resources& resources, int32_t max_ctas,
                 Transport transport, const KernelShape& shape) {
  check_band_rows(band_rows);
  Plan plan = base_plan(problem, kernel, transport, shape);
  plan.schedule = Schedule::kOverlapped;
  plan.layout = Layout::kPacked;
  plan.resources = resources;
  cut_into_bands(plan, tiles_m(plan), band_rows);
  for (const int32_t tiles : chunk_tiles) {
    plan.chunks.push_back({.tiles = tiles, .transport = transport, .max_ctas = max_ctas});
  }
  validate(plan);
  return plan;
}

Plan make_at_once(const Problem& problem, Kernel kernel, std::optional<Schedule> schedule) {
  Plan plan = base_plan(problem, kernel, Transport::kPeer, {});
  plan.schedule =
      schedule.value_or(kernel == Kernel::kLibrary ? Schedule::kSequential : Schedule::kOverlapped);
  if (!problem.traits().gathers()) plan.collective = Collective::kDirect;
  const int32_t rows = tiles_m(plan);
  const int32_t most = std::max(kBandRows, plan.cluster_m);
  cut_into_bands(plan, rows, std::max(1, std::min(most, rows)));
  plan.chunks.push_back({.tiles = rows * tiles_n(plan), .transport = Transport::kPeer});
  validate(plan);
  return plan;
}

Plan make_all_to_all(const Problem& problem, Kernel kernel, const Resources& resources,
                     int32_t max_ctas, Transport transport) {
  Plan plan = base_plan(problem, kernel, transport, {});
  plan.schedule = Schedule::kOverlapped;
  plan.resources = resources;
  plan.chunks.push_back({.tiles = 0, .transport = transport, .max_ctas = max_ctas});
  validate(plan);
  return plan;
}

}  // namespace overlap::plan
