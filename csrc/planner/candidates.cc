#include "planner/candidates.h"

#include <algorithm>
#include <utility>

#include "plan/templates.h"
#include "steps/price/costs.h"
#include "steps/price/price.h"

namespace overlap::planner {

using namespace plan;  // whose types and templates these are
using steps::predict;
using steps::Prediction;
using steps::slow_link;

namespace {

// One of the profile's ways.
struct Way {
  int32_t ctas;  // of a communicator
  int32_t lanes;
};
Way way_of(const std::vector<int32_t>& pair) {
  return {pair[0], pair[1]};
}

using Schedules = Profile::Lists;
// SMs left to kernels of one warp: an all-gather's signals keep the GEMM out of their SM and, as CTAs come
// in clusters of two, out of that SM's neighbour. The wait of a ring's GEMM takes no SM.
int32_t peer_sms(const Plan& plan) {
  return plan.problem.traits().gathers() ? 2 : 0;
}

// Direct plans hold all partial sums in slots, and add them up when the GEMM has ended: for few rows.
constexpr int64_t kMaxDirectBytes = int64_t{1} << 27;
constexpr int64_t kDirectAccess = 16;  // bytes

// A ring passes on single tiles, and chunks of what an all-reduce has finished cost its GEMM more than they
// save; an all-gather computes what has arrived.
const Schedules& peer_schedules(const Problem& problem, const Profile& profile) {
  static const Schedules one = {{1}};
  return problem.traits().gathers() ? profile.schedules.peer_all_gather : one;
}

void add_row_panels(Candidates& plans, const Problem& problem, Kernel kernel,
                    const Schedules& schedules, const Resources& resources, int32_t max_ctas,
                    Transport transport, std::optional<Collective> collective = {},
                    int32_t clique = 0) {
  Plan base = base_plan(problem, kernel, transport, {});
  base.collective = collective.value_or(base.collective);
  base.clique = clique;
  const int32_t parts = row_parts(base);
  const int32_t rows = part_tile_rows(base);
  for (const std::vector<int32_t>& weights : schedules) {
    Family family = {.kernel = kernel,
                     .transport = transport,
                     .collective = base.collective,
                     .window = resources.window,
                     .lanes = resources.lanes,
                     .ctas = max_ctas,
                     .weights = weights};
    if (!plans.wants(family)) continue;
    // Each part gives as many tile rows as make a whole band of all parts together.
    const int32_t height = band_height(rows, row_grain(base), weights);
    if (height == 0) continue;
    const std::vector<int32_t> heights =
        apportion(rows, parts == 1 ? height : row_grain(base), weights);
    if (heights.empty()) continue;
    const int32_t band_rows = parts == 1 ? height : std::max(kBandRows, base.cluster_m);
    plans.add(make_row_panels(problem, kernel, heights, band_rows, resources, max_ctas, transport,
                              {}, collective, clique),
              std::move(family));
  }
}

// Chunks of tiles, which end after any: exchanged between two ranks, or all-reduced.
void add_packed(Candidates& plans, const Problem& problem, Kernel kernel,
                const Schedules& schedules, const Resources& resources, int32_t max_ctas,
                Collective collective) {
  const Plan base = base_plan(problem, kernel, Transport::kNccl, {});
  const int32_t rows = tiles_m(base);
  for (const std::vector<int32_t>& weights : schedules) {
    Family family = {.kernel = kernel,
                     .transport = Transport::kNccl,
                     .collective = collective,
                     .packed = true,
                     .window = resources.window,
                     .lanes = resources.lanes,
                     .ctas = max_ctas,
                     .weights = weights};
    if (!plans.wants(family)) continue;
    const std::vector<int32_t> chunks = apportion(rows * tiles_n(base), base.cluster_m, weights);
    if (chunks.empty()) continue;
    Plan plan =
        make_packed(problem, kernel, chunks, std::min(kBandRows, rows), resources, max_ctas);
    plan.collective = collective;
    plans.add(std::move(plan), std::move(family));
  }
}

// Bytes of the product, or of an all-gather's input.
int64_t peer_bytes(const Problem& problem) {
  return problem.m * moved_columns(problem) * moved_bytes(problem);
}

bool too_small_for_peers(const Problem& problem, const Machine& machine) {
  return !problem.traits().all_reduces() && peer_bytes(problem) < machine.profile->peer.least_bytes;
}

// Returns true if there is a flag for each tile that a ring would pass on. Other ops' plans pass on none.
bool has_ring_flags(const Problem& problem, Kernel kernel) {
  Plan base = base_plan(problem, kernel, Transport::kPeer, {});
  base.chunks.resize(1);  // as peer_schedules has it
  return !has(base.collective, kFlagsTiles) || ring_tiles(base) <= kMaxRingTiles;
}

void set_peer_sms(Candidates& plans, size_t first) {
  for (size_t i = first; i < plans.plans.size(); ++i) {
    plans.plans[i].resources.comm_sms = peer_sms(plans.plans[i]);
  }
}

// Adds in phases, if peers' memory carries them. Returns true if it does.
bool add_over_peers(Candidates& plans, const Problem& problem, const Machine& machine,
                    const Prediction& sequence, Kernel kernel, bool all) {
  const Profile& profile = *machine.profile;
  if (machine.peer_gbps < profile.peer.fast_gbps || problem.world_size > kMaxPeers ||
      !can(kernel, kStoresToPeers) || !every_part_has_rows(problem) ||
      too_small_for_peers(problem, machine) || !has_ring_flags(problem, kernel)) {
    return false;
  }
  const size_t first = plans.plans.size();
  for (const Kernel own : peer_kernels(problem, machine, sequence, kernel)) {
    add_row_panels(plans, problem, own, peer_schedules(problem, profile), {}, 0, Transport::kPeer);
  }
  if (all && problem.traits().sums()) {
    add_row_panels(plans, problem, kernel, {{1}}, {}, 0, Transport::kPeer, Collective::kOwners);
  }
  set_peer_sms(plans, first);
  return true;
}

Resources resources_of(const Way& way, bool window) {
  return {.comm_sms = way.ctas * way.lanes, .window = window, .lanes = way.lanes};
}

// The GEMM keeps at least half of a small GPU.
bool fits(const Way& way, const Machine& machine) {
  return 2 * way.ctas * way.lanes <= machine.sm_count;
}

// Returns true if the profile's numbers were measured on such GPUs, over such a link.
bool measured(const Machine& machine) {
  const Profile::Link& link = machine.profile->link;
  const double share = steps::fast_link_share(machine);
  return machine.arch == machine.profile->gemm.arch &&
         (share == 0.0 || (share == 1.0 && machine.link_gbps <= link.fast_most_gbps));
}

void add_gpu_kernel(Candidates& plans, const Problem& problem, const Machine& machine,
                    const Prediction& sequence, Kernel kernel, bool all) {
  const Profile& profile = *machine.profile;
  const auto add_panels = [&](Kernel own, const Profile::Lists& ways, const Schedules& schedules,
                              bool window) {
    for (const std::vector<int32_t>& pair : ways) {
      const Way way = way_of(pair);
      if (!fits(way, machine)) continue;
      add_row_panels(plans, problem, own, schedules, resources_of(way, window), way.ctas,
                     Transport::kNccl);
    }
  };
  const auto add_exchanges_in = [&](const Way& way, bool window, const Schedules& schedules) {
    if (!fits(way, machine)) return;
    add_packed(plans, problem, kernel, schedules, resources_of(way, window), way.ctas,
               Collective::kExchange);
  };
  const Profile::Ways& ways = profile.ways;
  const Schedules& usual = schedules_of(problem, profile);
  const double share = steps::fast_link_share(machine);
  if (share < 1.0 || all) {
    if (problem.traits().all_reduces() && problem.world_size == 2) {
      // In two lanes, for long GEMMs, what a chunk costs is hidden. In four, for GEMMs that the link outlasts, small
      // chunks at the ends gain; short GEMMs want few.
      for (const std::vector<int32_t>& pair : ways.slow_link_exchange) {
        const Way way = way_of(pair);
        add_exchanges_in(way, false,
                         way.lanes > 2 ? profile.schedules.slow_link_exchange_in_many_lanes
                                       : profile.schedules.slow_link_exchange);
      }
    } else if (problem.traits().scatters() && problem.world_size == 2) {
      add_panels(kernel, ways.slow_link_scatter, profile.schedules.slow_link_scatter, false);
    } else {
      add_panels(kernel, ways.slow_link, usual, false);
    }
    if (share == 0.0 && !all) return;
  }
  // Rings of equal parts were measured better than anything through NCCL. Others take more tiles that have few rows.
  const bool equal_parts = problem.m % problem.world_size == 0;
  if (add_over_peers(plans, problem, machine, sequence, kernel, all) && equal_parts && !all) return;
  // Where windows work they carry more with fewer SMs, and between two ranks an exchange more yet. The model's error is
  // larger than what lies between the three, so it does not choose among them.
  if (!problem.traits().all_reduces()) {
    // Windows carry more than plain calls, of all-gathers most where own rows are staged first.
    if (machine.windows) {
      for (const Kernel own :
           one_way_kernels(problem, machine, sequence, kernel, Transport::kNccl)) {
        add_panels(own, ways.one_way_window, usual, true);
      }
    } else {
      add_panels(kernel, ways.plain, usual, false);
    }
  } else if (machine.windows && problem.world_size == 2) {
    const bool brief =
        problem.m <= profile.host.few_rows && sequence.total_us < profile.host.short_call_us;
    for (const std::vector<int32_t>& pair : ways.exchange) {
      add_exchanges_in(way_of(pair), true,
                       brief ? profile.schedules.short_exchange : profile.schedules.exchange);
    }
  } else {
    // Windows suit a reduction that is the shorter part; the other way about plain calls carry
    // more.
    if (machine.windows) add_panels(kernel, ways.all_reduce_window, usual, true);
    add_panels(kernel, ways.plain, usual, false);
  }
}

// True if each rank adds up as many rows as the others in a direct plan, or all of them.
bool pieces_are_equal(const Problem& problem) {
  const bool owned = !problem.traits().all_reduces() || problem.world_size > 2;
  return !owned || problem.m % problem.world_size == 0;
}

void add_at_once(Candidates& plans, const Problem& problem, Kernel kernel, Schedule schedule) {
  Plan plan = make_at_once(problem, kernel, schedule);
  const Family family = {
      .kernel = kernel, .transport = Transport::kPeer, .collective = plan.collective};
  if (plans.wants(family)) plans.add(std::move(plan), family);
}

// Everything in one step, where there is little to overlap.
void add_direct(Candidates& plans, const Problem& problem, const Machine& machine) {
  const bool gathers = problem.traits().gathers();
  const int64_t row_bytes = moved_columns(problem) * moved_bytes(problem);
  if (machine.peer_gbps < machine.profile->peer.fast_gbps || problem.world_size > kMaxPeers ||
      row_bytes % kDirectAccess != 0 || peer_bytes(problem) > kMaxDirectBytes ||
      too_small_for_peers(problem, machine)) {
    return;
  }
  add_at_once(plans, problem, Kernel::kLibrary, Schedule::kSequential);
  const Kernel kernel = best_kernel(problem, machine);
  if (!gathers && !problem.given() && can(kernel, kStoresToPeers) && pieces_are_equal(problem)) {
    add_at_once(plans, problem, kernel, Schedule::kOverlapped);
  }
}

// Each plan has the same GEMM and the same order of additions, and one of them serves any number of rows: so M may choose
// among them. Without any the composition runs, whatever M.
void add_invariant(Candidates& plans, const Problem& problem, const Machine& machine) {
  const Kernel kernel = problem.given() ? Kernel::kLibrary : best_kernel(problem, machine);
  const bool in_groups = problem.invariance == Invariance::kWorld;
  const bool computes =
      problem.given() || (in_groups ? can(kernel, kAddsGroups) && kernel_takes_groups(problem)
                                    : kernel != Kernel::kLibrary);
  const int64_t row_bytes = problem.n * moved_bytes(problem);
  if (machine.peer_gbps <= 0.0 || problem.world_size > kMaxPeers || !computes ||
      row_bytes % kDirectAccess != 0) {
    return;
  }
  add_at_once(plans, problem, kernel, Schedule::kSequential);
  if (!can(kernel, kStoresToPeers)) return;
  if (pieces_are_equal(problem) && peer_bytes(problem) <= kMaxDirectBytes) {
    add_at_once(plans, problem, kernel, Schedule::kOverlapped);
  }
  if (!every_part_has_rows(problem)) return;
  for (const Kernel own : {kernel, larger_kernel(kernel, true)}) {
    if (in_groups && !can(own, kAddsGroups)) continue;
    if (!has_ring_flags(problem, own) || !adds_terms(own, problem)) continue;
    add_row_panels(plans, problem, own, {{1}}, {}, 0, Transport::kPeer, Collective::kOwners);
  }
}

// Ways of slow links or of fast ones; with `all`, of both.
template <typename Add>
void for_ways(const Profile::Lists& slow, const Profile::Lists& fast, const Machine& machine,
              bool all, const Add& add) {
  const auto each = [&](const Profile::Lists& ways) {
    for (const std::vector<int32_t>& pair : ways) {
      if (const Way way = way_of(pair); fits(way, machine)) add(way);
    }
  };
  if (all || slow_link(machine)) each(slow);
  if (all || !slow_link(machine)) each(fast);
}

// The framework's GEMM of blocks takes fours of rows: else operands are multiplied out first, which must not happen only
// to the ranks' parts.
bool library_takes_parts(const Problem& problem) {
  constexpr int64_t kRows = 4;
  return problem.recipe != Recipe::kBlock || problem.m % kRows != 0 ||
         problem.m / op_row_parts(problem) % kRows == 0;
}

// The framework's scaled GEMM has a CTA for each SM and takes longer where NCCL holds some: over fast links chunks of it lost more
// than they hid. benchmarks/notes.md has the times ("The framework's scaled GEMM by chunks").
bool library_bears_nccl(const Problem& problem, const Machine& machine) {
  return !is_fp8(problem.dtype) || slow_link(machine);
}

// Library GEMMs, a call per chunk: what the kernels cannot take, or take longer for.
void add_gpu_library(Candidates& plans, const Problem& problem, const Machine& machine, bool all) {
  if (!library_takes_parts(problem)) return;
  const Profile& profile = *machine.profile;
  for_ways(profile.ways.slow_link_library, profile.ways.library, machine, all, [&](const Way& way) {
    add_row_panels(plans, problem, Kernel::kLibrary, profile.schedules.library,
                   resources_of(way, false), way.ctas, Transport::kNccl);
  });
}

// Library GEMMs that store into the ranks' memory, a call for each rank's rows. Four chunks were never the fastest, and two
// of the scaled GEMM hardly ever.
void add_stripes(Candidates& plans, const Problem& problem, const Machine& machine, bool all) {
  Schedules schedules = {{1}, {1, 1}, {1, 1, 1, 1}};
  if (!all) schedules.resize(is_fp8(problem.dtype) ? 1 : 2);
  if (problem.traits().sums() && machine.peer_gbps > 0.0 && problem.world_size <= kMaxPeers &&
      library_takes_parts(problem)) {
    add_row_panels(plans, problem, Kernel::kLibrary, schedules, {}, 0, Transport::kPeer,
                   Collective::kStripes);
  }
}

// Copy engines take no SMs, whatever computes, and however slow the link: the GEMM stores nothing there.
void add_gathers_by_copies(Candidates& plans, const Problem& problem, const Machine& machine,
                           Kernel kernel) {
  if (!problem.traits().gathers() || machine.peer_gbps <= 0.0 || problem.world_size > kMaxPeers ||
      problem.m % problem.world_size != 0 ||
      problem.k * element_bytes(problem.dtype) % kDirectAccess != 0 ||
      too_small_for_peers(problem, machine) || !library_takes_parts(problem)) {
    return;
  }
  const size_t first = plans.plans.size();
  const auto add = [&](Kernel own) {
    add_row_panels(plans, problem, own, machine.profile->schedules.peer_all_gather, {}, 0,
                   Transport::kPeer);
  };
  add(Kernel::kLibrary);
  if (kernel != Kernel::kLibrary && !can(kernel, kStoresToPeers)) add(kernel);
  set_peer_sms(plans, first);
}

// Ranks on several hosts: each row crosses between hosts once. Nobody has measured these between hosts, so only the tuner
// takes them.
void add_hierarchical(Candidates& plans, const Problem& problem, const Machine& machine,
                      Kernel kernel) {
  constexpr int32_t kMostLanes = 2;
  if (machine.clique < 2 || machine.clique_gbps <= 0.0 || !library_takes_parts(problem)) return;
  Schedules schedules = kernel == Kernel::kLibrary ? machine.profile->schedules.library
                                                   : schedules_of(problem, *machine.profile);
  schedules.push_back({1});  // of few rows
  for (const std::vector<int32_t>& pair : machine.profile->ways.slow_link) {
    const Way way = {pair[0], std::min(pair[1], kMostLanes)};
    if (!fits(way, machine)) continue;
    add_row_panels(plans, problem, kernel, schedules, resources_of(way, false), way.ctas,
                   Transport::kPeer, Collective::kHierarchical, machine.clique);
  }
}

// Plans that nobody has measured: taken where the profile is of other machines, and offered to whoever measures.
void add_unmeasured(Candidates& plans, const Problem& problem, const Machine& machine,
                    Kernel kernel) {
  const Profile& profile = *machine.profile;
  const Schedules& few = profile.schedules.few_rows;
  if (kernel != Kernel::kLibrary) {
    // Fewer and lower chunks, or where there are hardly rows, chunks that end after any tile.
    const Plan base = base_plan(problem, kernel, Transport::kNccl, {});
    const bool hardly = tiles_m(base) < 2 * kBandRows;
    for_ways(profile.ways.slow_link, profile.ways.plain, machine, true, [&](const Way& way) {
      if (problem.traits().scatters()) {
        add_row_panels(plans, problem, kernel, few, resources_of(way, false), way.ctas,
                       Transport::kNccl);
      } else if (problem.traits().all_reduces() && hardly) {
        add_packed(plans, problem, kernel, few, resources_of(way, false), way.ctas,
                   Collective::kAllReduce);
      }
    });
  }
  // A kernel's old instructions are slower than the framework's GEMM where that has better: chunks of the latter.
  if (can(kernel, kAges) && machine.arch >= 90 && machine.arch < 120) {
    add_gpu_library(plans, problem, machine, true);
    add_stripes(plans, problem, machine, false);
  }
}

void add_cpu(Candidates& plans, const Problem& problem, const Machine& machine) {
  const Profile& profile = *machine.profile;
  const double flops = 2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                       static_cast<double>(problem.k);
  for (const std::vector<int32_t>& weights : profile.schedules.library) {
    if (flops < profile.cpu.chunk_flops * static_cast<double>(weights.size())) continue;
    add_row_panels(plans, problem, Kernel::kLibrary, {weights}, Resources{}, 0, Transport::kGloo);
  }
}

// Row counts differ by rank, so the plan says only how pieces are computed and how they travel.
void add_all_to_all(Candidates& plans, const Problem& problem, const Machine& machine) {
  const bool cpu = machine.arch == 0;
  const Profile::AllToAll& sizes = machine.profile->all_to_all;
  const int64_t fast = problem.world_size == 2 ? sizes.pair_ctas : sizes.many_ctas;
  const auto ctas = static_cast<int32_t>(cpu                  ? 0
                                         : slow_link(machine) ? sizes.slow_link_ctas
                                                              : fast);
  if (2 * ctas > machine.sm_count) return;
  const bool peers = machine.peer_gbps >= machine.profile->peer.fast_gbps &&
                     problem.world_size <= kMaxPeers &&
                     problem.n * moved_bytes(problem) % kDirectAccess == 0;
  // Over peers, between more than two ranks, long messages travel by NCCL.
  const bool pair = peers && problem.world_size == 2;
  // In one launch wide tiles were faster than those of 128 x 128, except for few rows.
  const Kernel best = best_kernel(problem, machine);
  const bool once = pair && can(best, kStoresToPeers);
  plans.add(make_all_to_all(problem, once ? larger_kernel(best, true) : best,
                            {.comm_sms = pair ? 0 : ctas, .one_launch = once}, ctas,
                            cpu     ? Transport::kGloo
                            : peers ? Transport::kPeer
                                    : Transport::kNccl),
            {});
}

}  // namespace

Candidates make_candidates(const Problem& problem, const Machine& machine, bool all,
                           const std::vector<Family>* only) {
  Candidates plans;
  plans.plans.reserve(only == nullptr ? 128 : 8);  // as many as there are, mostly
  plans.families.reserve(plans.plans.capacity());
  plans.add(make_sequential(problem, machine), {});
  plans.only = only;
  const bool all_to_all = problem.traits().rows_by_rank;
  const bool nothing_to_overlap = problem.world_size == 1 || (problem.m == 0 && !all_to_all) ||
                                  problem.n == 0 || (problem.k == 0 && !problem.given());
  const bool unmeasured =
      machine.sm_count <= 0 || machine.sm_gflops <= 0.0 || machine.link_gbps <= 0.0;
  // On CPU scaled operands have one GEMM and one collective: see check_schedule.
  const bool scaled_on_cpu = machine.arch == 0 && problem.recipe != Recipe::kNone;
  // On GPUs float64 runs the composition: see takes_composition.
  const bool float64_on_gpu = machine.arch != 0 && problem.dtype == DType::kFloat64;
  if (nothing_to_overlap || unmeasured || machine.serial || scaled_on_cpu || float64_on_gpu) {
    return plans;
  }
  if (all_to_all) {
    add_all_to_all(plans, problem, machine);
    return plans;
  }
  if (problem.invariance != Invariance::kNone) {
    if (machine.arch != 0) add_invariant(plans, problem, machine);
    return plans;
  }
  if (problem.given()) {  // nothing is computed that could be overlapped
    if (machine.arch != 0) add_direct(plans, problem, machine);
    return plans;
  }
  if (machine.arch == 0) {
    add_cpu(plans, problem, machine);
    return plans;
  }
  // No threshold decides between kinds of links where nobody has measured: both kinds' ways are weighed.
  const bool whole = all || !measured(machine);
  add_direct(plans, problem, machine);
  const Kernel kernel = best_kernel(problem, machine);
  const bool bears_nccl = all || library_bears_nccl(problem, machine);
  if (all) add_hierarchical(plans, problem, machine, kernel);
  if (kernel == Kernel::kLibrary) {
    if (bears_nccl) add_gpu_library(plans, problem, machine, whole);
    add_stripes(plans, problem, machine, all);
  } else {
    if (is_fp8(problem.dtype) && whole && bears_nccl) {
      add_gpu_library(plans, problem, machine, true);
    }
    add_gpu_kernel(plans, problem, machine, predict(plans.plans.front(), machine), kernel, whole);
  }
  if (!whole) return plans;
  add_unmeasured(plans, problem, machine, kernel);
  add_gathers_by_copies(plans, problem, machine, kernel);
  return plans;
}

}  // namespace overlap::planner
