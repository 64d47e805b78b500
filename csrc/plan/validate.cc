// The conditions of a valid plan. Every message quotes what was given, says what is allowed, and
// what to do.
#include <limits>

#include "plan/message.h"
#include "plan/plan.h"
#include "plan/templates.h"

namespace overlap::plan {
namespace {

constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max();
constexpr int32_t kMaxCommSms = 1024;             // more SMs than any GPU has
constexpr int32_t kMaxCtas = 64;                  // NCCL has no more channels
constexpr int32_t kMaxFinishCtas = 4096;          // several on each of a GPU's SMs
constexpr int32_t kMaxSmemPadBytes = 227 * 1024;  // what a block can have on Hopper

template <typename Enum>
void check_enum(const char* field, Enum value, Enum last) {
  const auto number = static_cast<int32_t>(value);
  if (number < 0 || number > static_cast<int32_t>(last)) {
    fail("plan has ", field, " = ", number, ", allowed are 0 to ", static_cast<int32_t>(last),
         ": take one of the names that the enumeration has");
  }
}

void check_range(const char* field, int64_t value, int64_t low, int64_t high, const char* remedy) {
  if (value < low || value > high) {
    fail("plan has ", field, " = ", value, ", allowed are ", low, " to ", high, ": ", remedy);
  }
}

void check_kernel(const Plan& plan) {
  check_enum("kernel", plan.kernel, static_cast<Kernel>(kKernels.size() - 1));
  check_range("tile_m", plan.tile_m, 1, kMaxTiles, "take the kernel's own tile shape");
  check_range("tile_n", plan.tile_n, 1, kMaxTiles, "take the kernel's own tile shape");
  check_range("cluster_m", plan.cluster_m, 1, kMaxTiles, "take the kernel's own cluster, or 1");
  if (plan.kernel == Kernel::kLibrary) return;

  const KernelShape shape = kernel_shape(plan.kernel, /*on_cpu=*/false);
  if (KernelShape{plan.tile_m, plan.tile_n, plan.cluster_m} != shape) {
    fail("kernel ", name(plan.kernel), " was given tiles of ", plan.tile_m, "x", plan.tile_n,
         " in clusters of ", plan.cluster_m, ", but it computes ", shape.tile_m, "x", shape.tile_n,
         " in clusters of ", shape.cluster_m,
         ": set these, or take the kernel 'library', which takes every tile shape");
  }
  const Problem& problem = plan.problem;
  if (is_fp8(problem.dtype) &&
      (!can(plan.kernel, kTakesFp8) || output_dtype(problem) != DType::kBFloat16 ||
       problem.recipe == Recipe::kBlock)) {
    fail("kernel ", name(plan.kernel), " was given ", name(problem.dtype), " ",
         name(problem.recipe), " to ", name(output_dtype(problem)), ", but of fp8 ",
         kernel_names(kTakesFp8),
         " compute tensor_wise and row_wise to bfloat16 only: take the kernel 'library'");
  }
  if (is_fp8(problem.dtype) && !problem.fast_accum) {
    fail("kernel ", name(plan.kernel), " was given ", name(problem.dtype),
         " without fast_accum, but its sums are the tensor cores' own: take a problem with "
         "fast_accum, which calls with use_fast_accum=True have, or the kernel 'library'");
  }
  if (!is_fp8(problem.dtype) && element_bytes(problem.dtype) != 2) {
    fail("kernel ", name(plan.kernel), " was given ", name(problem.dtype),
         ", but it computes bfloat16, float16 and fp8: take the kernel 'library'");
  }
}

// Ranks of a host follow each other, and each host has as many.
void check_cliques(const Plan& plan) {
  const Problem& problem = plan.problem;
  if (!hierarchical(plan) && !(has_program(plan) && over_peers(plan))) {
    fail("plan has clique = ", plan.clique, " with the collective ", name(plan.collective),
         ", allowed is 0: take the collective hierarchical, or a program over peer, for hosts of "
         "that number of ranks");
  }
  if (plan.clique < 1 || problem.world_size % plan.clique != 0 ||
      plan.clique == problem.world_size) {
    fail("plan has clique = ", plan.clique, " on ", problem.world_size,
         " ranks, allowed are divisors of the number of ranks except that number itself, as each "
         "of several hosts has as many: take the ranks of a host, or the collective ",
         name(collective_of(problem.op)), " for ranks of one host");
  }
  if (over_peers(plan) && (plan.clique < 2 || plan.clique > kMaxPeers)) {
    fail("plan travels by peer within cliques of ", plan.clique, " ranks, allowed are 2 to ",
         kMaxPeers, ": take the transport nccl");
  }
}

void check_hierarchy(const Plan& plan) {
  constexpr int32_t kMostLanes = 2;  // beside the lanes within cliques
  const Problem& problem = plan.problem;
  if (problem.traits().rows_by_rank) {
    fail("collective of ", name(problem.op),
         " is hierarchical, allowed is all_to_all, as only sender and receiver know how many rows "
         "they exchange: take that");
  }
  if (plan.schedule != Schedule::kOverlapped || plan.layout != Layout::kRowMajor ||
      plan.resources.window || plan.resources.lanes > kMostLanes || has_program(plan)) {
    fail("collective is hierarchical with the schedule ", name(plan.schedule), ", the layout ",
         name(plan.layout), ", window = ", plan.resources.window, " and ", plan.resources.lanes,
         " lanes, allowed are overlapped, row_major, no window, no program and 1 or ", kMostLanes,
         " lanes: take those, or the collective ", name(collective_of(problem.op)));
  }
}

// A collective that the op has. The tile grid follows from it, so this comes first.
void check_collective_of_op(const Plan& plan) {
  check_enum("collective", plan.collective, Collective::kHierarchical);
  if (plan.clique != 0 || hierarchical(plan)) check_cliques(plan);
  if (hierarchical(plan)) return check_hierarchy(plan);
  const CollectiveTraits& given = traits(plan.collective);
  const OpTraits op = plan.problem.traits();
  const Collective own = collective_of(plan.problem.op);
  const uint32_t others = (op.all_reduces() ? kForAllReduces : 0) | (op.sums() ? kForSums : 0);
  if (plan.collective != own && !given.has(others)) {
    fail("collective of ", name(plan.problem.op), " is ", given.name, ", allowed is ", name(own),
         others == 0 ? "" : " or " + collective_names(others), ": take that");
  }
  const bool by_messages = given.has(kOrMessages) && plan.transport().on_cpu;
  if (given.has(kPeersOnly) && !plan.chunks.empty() && !over_peers(plan) && !by_messages) {
    fail("collective is ", given.name, " with the transport ", plan.transport().name,
         ", allowed is peer", given.has(kOrMessages) ? ", or gloo on CPU" : "",
         ": take that, or the collective ", name(own));
  }
}

// Sizes that the tables' 32-bit tile indices and 64-bit offsets can count.
void check_grid(const Plan& plan) {
  const auto count = [](int64_t size, int64_t by) { return size / by + (size % by != 0 ? 1 : 0); };
  const int64_t columns = count(plan.problem.n, plan.tile_n);
  const int64_t padded_rows = count(plan.problem.m, plan.tile_m) > kMaxTiles
                                  ? count(plan.problem.m, plan.tile_m)
                                  : grid_rows(plan);
  if (padded_rows > kMaxTiles || columns > kMaxTiles || padded_rows * columns > kMaxTiles) {
    fail("plan cuts the ", plan.problem.m, " x ", plan.problem.n, " output into ", padded_rows,
         " x ", columns, " tiles, allowed are ", kMaxTiles, " in all: take larger tiles");
  }
  const int64_t tiles = padded_rows * columns;
  const int64_t tile_elements = static_cast<int64_t>(plan.tile_m) * plan.tile_n;
  if (tiles > 0 && tile_elements > std::numeric_limits<int64_t>::max() / 8 / tiles) {
    fail("plan has ", tiles, " tiles of ", plan.tile_m, "x", plan.tile_n,
         ", more bytes than 64 bits count: take smaller tiles");
  }
}

void check_bands(const Plan& plan) {
  if (plan.bands.size() > static_cast<size_t>(kMaxBandRuns)) {
    fail("plan has ", plan.bands.size(), " band runs, allowed are ", kMaxBandRuns,
         ": join equal neighbours, or take fewer different band heights");
  }
  int64_t height = 0;
  for (size_t r = 0; r < plan.bands.size(); ++r) {
    const BandRun& run = plan.bands[r];
    if (run.tile_rows <= 0 || run.tile_rows % plan.cluster_m != 0) {
      fail("band run ", r, " has bands of ", run.tile_rows,
           " tile rows, allowed are positive multiples of cluster_m = ", plan.cluster_m,
           ": round the height");
    }
    if (run.count <= 0) {
      fail("band run ", r, " has ", run.count,
           " bands, allowed is 1 or more: leave the run out, or count its bands");
    }
    height += static_cast<int64_t>(run.tile_rows) * run.count;
    if (height > tiles_m(plan)) {
      fail("bands up to run ", r, " are ", height, " tile rows high, but the tile grid has ",
           tiles_m(plan), " x ", tiles_n(plan),
           " tiles: the plan would reach beyond the grid and cover a tile twice; make the bands' "
           "heights sum up to ",
           tiles_m(plan));
    }
  }
  if (height < tiles_m(plan)) {
    fail("bands are ", height, " tile rows high, but the tile grid has ", tiles_m(plan), " x ",
         tiles_n(plan), " tiles: the plan leaves tiles out; make the bands' heights sum up to ",
         tiles_m(plan));
  }
}

void check_chunks(const Plan& plan) {
  const int64_t tiles = static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan);
  if (plan.chunks.empty() || plan.chunks.size() > static_cast<size_t>(kMaxChunks)) {
    fail("plan has ", plan.chunks.size(), " chunks, allowed are 1 to ", kMaxChunks,
         plan.chunks.empty() ? ": give it one chunk of all tiles" : ": join neighbouring chunks");
  }
  const int64_t grain = static_cast<int64_t>(row_parts(plan)) * row_grain(plan) * tiles_n(plan);
  int64_t sum = 0;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const Chunk& chunk = plan.chunks[c];
    if (row_parts(plan) > 1 && grain > 0 && chunk.tiles % grain != 0) {
      fail("chunk ", c, " has ", chunk.tiles, " tiles, allowed are multiples of ", row_parts(plan),
           " x ", row_grain(plan), " x ", tiles_n(plan), " = ", grain, ": a chunk of ",
           name(plan.problem.op),
           " holds as many whole tile rows of every rank, and whole clusters");
    }
    check_enum("chunk transport", chunk.transport, static_cast<Transport>(kTransports.size() - 1));
    if (chunk.transport != plan.chunks[0].transport) {
      fail("chunk ", c, " travels by ", name(chunk.transport), ", chunk 0 by ",
           plan.transport().name, ": take one transport for all chunks");
    }
    if (chunk.max_ctas < 0 || chunk.max_ctas > kMaxCtas) {
      fail("chunk ", c, " has max_ctas = ", chunk.max_ctas, ", allowed are 0 to ", kMaxCtas,
           ": 0 leaves the choice to NCCL");
    }
    if (chunk.tiles <= 0 && tiles > 0) {
      fail("chunk ", c, " has ", chunk.tiles,
           " tiles, allowed is 1 or more: leave the chunk out, or give it tiles");
    }
    sum += chunk.tiles;
  }
  if (sum != tiles) {
    fail("chunks have ", sum, " tiles in all, but the tile grid has ", tiles_m(plan), " x ",
         tiles_n(plan), " = ", tiles, ": the plan ",
         sum > tiles ? "covers a tile twice" : "leaves tiles out",
         "; make the chunks' tiles sum up to ", tiles);
  }
  if (plan.kernel != Kernel::kLibrary && plan.transport().on_cpu) {
    fail("kernel ", name(plan.kernel),
         " runs on a GPU, but the chunks travel by gloo, which moves host memory: take nccl, or "
         "the kernel 'library' for a CPU plan");
  }
}

// Row-major chunks are contiguous only if they are whole bands.
void check_row_panels(const Plan& plan) {
  const int64_t columns = tiles_n(plan);
  size_t run = 0;
  int64_t run_row = 0;  // first tile row of bands[run]
  int64_t tile = 0;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    tile += plan.chunks[c].tiles;
    while (run < plan.bands.size()) {
      const int64_t run_rows =
          static_cast<int64_t>(plan.bands[run].tile_rows) * plan.bands[run].count;
      if (tile < (run_row + run_rows) * columns) break;
      run_row += run_rows;
      ++run;
    }
    if (run == plan.bands.size()) continue;  // the end of the grid
    const int64_t band_tiles = plan.bands[run].tile_rows * columns;
    const int64_t beyond = (tile - run_row * columns) % band_tiles;
    if (beyond != 0) {
      fail("chunk ", c, " ends ", beyond, " tiles into a band of ", plan.bands[run].tile_rows,
           " x ", columns, " = ", band_tiles,
           " tiles; with the layout row_major chunks begin and end where bands do: move the "
           "chunk's end by ",
           beyond, " tiles back or ", band_tiles - beyond, " on, or take the layout packed");
    }
  }
}

void check_resources(const Plan& plan) {
  check_range("comm_sms", plan.resources.comm_sms, 0, kMaxCommSms,
              "leave the communication as many SMs as its chunks' max_ctas");
  check_range("finish_ctas", plan.resources.finish_ctas, 0, kMaxFinishCtas,
              "0 leaves the number to the library");
  check_range("lanes", plan.resources.lanes, 1, kMaxLanes,
              "each lane is a stream and a set of communicators");
  check_range("smem_pad_bytes", plan.resources.smem_pad_bytes, 0, kMaxSmemPadBytes,
              "a block has no more shared memory");
  if (plan.resources.window && !plan.transport().has_windows) {
    fail("plan has window = true with the transport ", plan.transport().name,
         ", but symmetric windows are NCCL's: take nccl, or window = false");
  }
}

// Checks of plans that travel through the peers' memory.
void check_peers(const Plan& plan) {
  if (!over_peers(plan) || has_program(plan) || hierarchical(plan)) {
    if (plan.resources.one_launch) {
      fail(
          "plan has one_launch, but no GEMM's messages travel by peer: clear it, or take that "
          "transport");
    }
    return;
  }
  const Problem& problem = plan.problem;
  const CollectiveTraits& given = traits(plan.collective);
  const bool overlapped = plan.schedule == Schedule::kOverlapped;
  const bool gathers = plan.collective == Collective::kAllGather;
  const bool exchanges = plan.collective == Collective::kAllToAll;
  if (!(given.has(kPeersOnly) || gathers || exchanges) ||
      ((given.has(kOverlaps) || exchanges) && !overlapped) || plan.layout != Layout::kRowMajor ||
      plan.resources.window || plan.resources.lanes != 1) {
    fail("plan of ", name(problem.op), " travels by peer with the collective ",
         name(plan.collective), ", the schedule ", name(plan.schedule), ", the layout ",
         name(plan.layout), ", window = ", plan.resources.window,
         ", lanes = ", plan.resources.lanes,
         ", allowed are ring, owners or stripes (overlapped) or direct (of a reduction) or "
         "all_gather or all_to_all (overlapped), row_major, no window and one lane: take those, or "
         "the transport nccl");
  }
  if (problem.world_size < 2 || problem.world_size > kMaxPeers) {
    fail("plan travels by peer between ", problem.world_size, " ranks, allowed are 2 to ",
         kMaxPeers, ": take the transport nccl");
  }
  if (row_parts(plan) > 1 && !given.has(kOwnsParts) && problem.m % problem.world_size != 0) {
    fail("plan travels by peer with m = ", problem.m, " on ", problem.world_size,
         " ranks, allowed are multiples of the number of ranks, as each owns an equal part: take "
         "the transport nccl");
  }
  if (given.has(kFlagsTiles) && problem.m > 0 && !every_part_has_rows(problem)) {
    fail("plan with the collective ", name(plan.collective), " cuts m = ", problem.m, " into ",
         problem.world_size, " parts of ", part_rows(plan),
         " rows, allowed are numbers of rows of which the last part has some: take the collective "
         "direct, or the transport nccl");
  }
  if (given.has(kFlagsTiles) && ring_tiles(plan) > kMaxRingTiles) {
    fail("plan with the collective ", name(plan.collective), " passes on ", ring_tiles(plan),
         " tiles, allowed are ", kMaxRingTiles, ", as each has a flag: take the transport nccl");
  }
  if (given.has(kFlagsTiles) && given.has(kSumsInOrder) && !adds_terms(plan.kernel, problem)) {
    fail("plan with the collective owners has the kernel ", name(plan.kernel), " on ",
         problem.world_size, " ranks, allowed are ", kernel_names(kAddsTerms),
         ", which has registers for the ranks' terms, and between two ranks ",
         kernel_names(kStoresToPeers, kAddsTerms), ": take one of those, or the collective ring");
  }
  if (plan.resources.one_launch && !(exchanges && can(plan.kernel, kStoresToPeers))) {
    fail(
        "plan with the collective ", name(plan.collective), " and the kernel ", name(plan.kernel),
        " has one_launch, allowed is that of all_to_all by peer with a ping-pong kernel: clear it");
  }
  if (given.has(kOneChunk) && plan.chunks.size() != 1) {
    fail("plan with the collective ", name(plan.collective), " has ", plan.chunks.size(),
         " chunks, allowed is one of all tiles, as nothing of it waits for a chunk: join them");
  }
  // One kernel moves whole accesses.
  constexpr int64_t kAccess = 16;
  const int64_t row_bytes = moved_columns(problem) * moved_bytes(problem);
  if ((given.has(kMovesAccesses) || (gathers && !overlapped)) && row_bytes % kAccess != 0) {
    fail("plan travels by peer with the collective ", name(plan.collective), " and rows of ",
         row_bytes, " bytes, allowed are multiples of ", kAccess,
         ", which is what one access moves: take the transport nccl");
  }
}

void check_collective(const Plan& plan) {
  check_peers(plan);
  if (plan.collective == Collective::kStripes &&
      (plan.kernel != Kernel::kLibrary || plan.schedule != Schedule::kOverlapped ||
       plan.layout != Layout::kRowMajor)) {
    fail("collective is stripes with the kernel ", name(plan.kernel), ", the schedule ",
         name(plan.schedule), " and the layout ", name(plan.layout),
         ", allowed are library, whose launches store each rank's rows into its memory, overlapped "
         "and row_major: take those, or the collective ",
         name(collective_of(plan.problem.op)));
  }
  if (plan.collective != Collective::kExchange) return;
  if (plan.problem.world_size != 2) {
    fail("collective is exchange with world_size = ", plan.problem.world_size,
         ", allowed is 2: between more ranks it would move more bytes than all_reduce, take that");
  }
  if (plan.layout != Layout::kPacked || plan.schedule != Schedule::kOverlapped ||
      !plan.transport().has_windows) {
    fail("collective is exchange with the schedule ", name(plan.schedule), ", the layout ",
         name(plan.layout), " and the transport ", plan.transport().name,
         ", allowed are overlapped, packed and nccl: take those, or the collective all_reduce");
  }
}

void check_schedule(const Plan& plan) {
  const Problem& problem = plan.problem;
  const bool is_sequence = plan.schedule == Schedule::kSequential && !over_peers(plan) &&
                           plan.kernel == Kernel::kLibrary && !has_program(plan);
  if (problem.invariance != Invariance::kNone && !is_invariant(plan) && !is_sequence) {
    fail("plan for a problem with the invariance ", name(problem.invariance), " has the kernel ",
         name(plan.kernel), " and the collective ", name(plan.collective), " over ",
         plan.transport().name,
         ", allowed are this package's kernels (world: ", kernel_names(kAddsGroups),
         ") with direct or owners over peer, which add in order, and make_sequential's plan: take "
         "one of those");
  }
  if (problem.recipe != Recipe::kNone && plan.schedule != Schedule::kSequential &&
      plan.transport().on_cpu) {
    fail("plan for scaled operands (", problem.to_string(), ") has the schedule ",
         name(plan.schedule),
         " and the transport gloo, allowed is sequential: take make_sequential's plan");
  }
  if (plan.schedule == Schedule::kSequential) {
    if (plan.chunks.size() != 1) {
      fail("sequential plan has ", plan.chunks.size(),
           " chunks, allowed is one of all tiles: join them, or take the schedule overlapped");
    }
    const bool nothing = problem.k == 0 && !problem.given();
    if (over_peers(plan) && (problem.m == 0 || problem.n == 0 || nothing)) {
      fail("plan travels by peer for an empty problem (", problem.to_string(),
           "): there is nothing to send, take the transport nccl");
    }
    if (plan.layout != Layout::kRowMajor) {
      fail("sequential plan has the layout ", name(plan.layout),
           ", allowed is row_major, as its one collective needs no other: take row_major");
    }
  } else if (plan.layout != Layout::kRowMajor && !problem.traits().all_reduces()) {
    fail("plan of ", name(problem.op), " has the layout ", name(plan.layout),
         ", allowed is row_major: take that");
  } else if (problem.traits().rows_by_rank) {
    if (problem.n == 0 || problem.k == 0 || plan.chunks.size() != 1) {
      fail("overlapped plan of ", name(problem.op), " for n = ", problem.n, ", k = ", problem.k,
           " with ", plan.chunks.size(),
           " chunks, allowed are n and k of 1 or more and one chunk of 0 tiles: each pair of ranks "
           "cuts its rows by their number");
    }
  } else if (problem.m == 0 || problem.n == 0 || problem.k == 0) {
    fail("overlapped plan for an empty problem (", problem.to_string(),
         "): there is nothing to overlap, take the schedule sequential");
  }
}

}  // namespace

void check_groups(const Problem& problem) {
  const int32_t ranks = problem.world_size;
  const auto refuse = [](const auto&... what) {
    fail("problem with the invariance world ", what...,
         ": take \"batch\", by invariance= or OVERLAP_INVARIANCE");
  };
  if (ranks > kWorldGroups || kWorldGroups % ranks != 0) {
    refuse("is of ", ranks, " ranks, allowed are 1, 2, 4 and 8");
  }
  if (problem.k % k_groups(problem) != 0) {
    refuse("has k = ", problem.k, " on each of ", ranks, " ranks, allowed are multiples of ",
           k_groups(problem), ", as K of all ranks is cut into ", kWorldGroups, " groups");
  }
  if (problem.recipe != Recipe::kNone) refuse("has scaled operands, allowed are none with scales");
}

void check_problem(const Problem& problem) {
  constexpr int64_t kMaxSize = std::numeric_limits<int64_t>::max();
  check_enum("op", problem.op, static_cast<Op>(kOps.size() - 1));
  check_enum("dtype", problem.dtype, DType::kFloat8E5M2);
  check_enum("recipe", problem.recipe, Recipe::kBlock);
  check_enum("output_dtype", problem.output_dtype, DType::kFloat8E5M2);
  if (is_fp8(problem.dtype) != (problem.recipe != Recipe::kNone)) {
    fail("problem with operands of ", name(problem.dtype), " has the recipe ", name(problem.recipe),
         ", allowed are tensor_wise, row_wise and block_wise for float8_e4m3fn and float8_e5m2, "
         "and none for other types: name the dtype of the operands and how they are scaled");
  }
  const DType to = output_dtype(problem);
  const bool rounds_to = to == DType::kBFloat16 || to == DType::kFloat16 || to == DType::kFloat32;
  if (problem.recipe != Recipe::kNone && !rounds_to) {
    fail("problem with scaled operands has the output_dtype ", name(problem.output_dtype),
         ", allowed are bfloat16, float16 and float32");
  }
  if (problem.recipe == Recipe::kNone && problem.fast_accum) {
    fail("problem of ", name(problem.dtype), " has fast_accum, only scaled ones have it: clear it");
  }
  const char* const remedy = "take the sizes of the op's arguments";
  check_range("m", problem.m, 0, kMaxSize, remedy);
  check_range("n", problem.n, 0, kMaxSize, remedy);
  check_range("k", problem.k, 0, kMaxSize, remedy);
  check_enum("invariance", problem.invariance, Invariance::kWorld);
  if (problem.invariance != Invariance::kNone && !problem.traits().sums()) {
    fail("problem of ", name(problem.op), " has the invariance ", name(problem.invariance),
         ", allowed is none, as the op adds nothing between ranks");
  }
  check_range("world_size", problem.world_size, 1, std::numeric_limits<int32_t>::max(),
              "take the process group's size");
  if (problem.invariance == Invariance::kWorld) check_groups(problem);
  if (problem.m % op_row_parts(problem) != 0) {
    fail("problem of ", name(problem.op), " has m = ", problem.m, " rows on ", problem.world_size,
         " ranks, allowed are multiples of the number of ranks, as each has an equal part");
  }
  if (problem.traits().rows_by_rank && problem.m != 0) {
    fail("problem of ", name(problem.op), " has m = ", problem.m,
         ", allowed is 0: its rows differ by rank and are no part of what ranks share");
  }
}

void validate(const Plan& plan) {
  check_problem(plan.problem);
  check_enum("schedule", plan.schedule, Schedule::kOverlapped);
  check_enum("layout", plan.layout, Layout::kPacked);
  check_collective_of_op(plan);
  check_kernel(plan);
  check_grid(plan);
  check_bands(plan);
  check_chunks(plan);
  check_resources(plan);
  check_collective(plan);
  check_schedule(plan);
  if (plan.layout == Layout::kRowMajor) check_row_panels(plan);
  if (has_program(plan)) check_program(plan);
}

}  // namespace overlap::plan
