#include "planner/planner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/templates.h"
#include "steps/costs.h"
#include "steps/price.h"

namespace overlap::planner {

using namespace plan;  // whose types and templates these are
using steps::predict;
using steps::Prediction;
using steps::rounds_of;
using steps::slow_link;

namespace {

// One of the profile's ways: CTAs of a communicator, lanes.
struct Way {
  int32_t ctas;
  int32_t lanes;
};
Way way_of(const std::vector<int32_t>& pair) {
  return {pair[0], pair[1]};
}

using Schedules = Profile::Lists;

// SMs left to kernels of one warp: an all-gather's signals keep the GEMM out of their SM and, as CTAs come
// in clusters of two, out of that SM's neighbour. What a ring's GEMM waits for takes no SM.
int32_t peer_sms(const Plan& plan) {
  return plan.problem.op == Op::kAllGatherGemm ? 2 : 0;
}

// Direct plans hold all partial sums in slots, and add them up when the GEMM has ended: for few rows.
constexpr int64_t kMaxDirectBytes = int64_t{1} << 27;
constexpr int64_t kDirectAccess = 16;  // bytes

constexpr int64_t kAlignment = 8;  // elements: 16 bytes, what bulk copies of 16-bit types take

// All tiles are computed in one launch, and a small last chunk is a short tail; but a chunk costs the host. An
// all-gather's launches end with whole rounds of tiles, and each call has a start: few chunks.
const Schedules& schedules_of(Op op, const Profile& profile) {
  if (op == Op::kGemmReduceScatter) return profile.schedules.reduce_scatter;
  return op == Op::kAllGatherGemm ? profile.schedules.all_gather : profile.schedules.all_reduce;
}

// A ring passes on single tiles, and chunks of what an all-reduce has finished cost its GEMM more than they
// save; an all-gather computes what has arrived.
const Schedules& peer_schedules(Op op, const Profile& profile) {
  static const Schedules one = {{1}};
  return op == Op::kAllGatherGemm ? profile.schedules.peer_all_gather : one;
}

// `total` in parts as the weights say, each but the last a multiple of `grain`. Empty if a part
// would be.
std::vector<int32_t> apportion(int32_t total, int32_t grain, const std::vector<int32_t>& weights) {
  const int64_t grains = (total + grain - 1) / grain;
  const int64_t sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  std::vector<int32_t> parts;
  int64_t weight = 0;
  int32_t begin = 0;
  for (const int32_t w : weights) {
    weight += w;
    const int64_t end_grain = (2 * weight * grains + sum) / (2 * sum);  // rounded to the nearest
    const int32_t end = static_cast<int32_t>(std::min<int64_t>(end_grain * grain, total));
    if (end <= begin) return {};
    parts.push_back(end - begin);
    begin = end;
  }
  return parts;
}

// The highest band of which the smallest chunk holds a whole one; 0 if there is none.
int32_t band_height(int32_t rows, int32_t grain, const std::vector<int32_t>& weights) {
  const int64_t sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  const int64_t least = *std::min_element(weights.begin(), weights.end());
  for (int32_t height = kBandRows; height >= grain; height /= 2) {
    if (height % grain == 0 && least * rows >= height * sum) return height;
  }
  return 0;
}

void add_row_panels(std::vector<Plan>& plans, const Problem& problem, Kernel kernel,
                    const Schedules& schedules, const Resources& resources, int32_t max_ctas,
                    Transport transport) {
  const Plan base = base_plan(problem, kernel, transport, {});
  const int32_t parts = row_parts(base);
  const int32_t rows = part_tile_rows(base);
  for (const std::vector<int32_t>& weights : schedules) {
    // Of each part as many tile rows as make a whole band of all parts together.
    const int32_t height = band_height(rows, row_grain(base), weights);
    if (height == 0) continue;
    const std::vector<int32_t> heights =
        apportion(rows, parts == 1 ? height : row_grain(base), weights);
    if (heights.empty()) continue;
    const int32_t band_rows = parts == 1 ? height : std::max(kBandRows, base.cluster_m);
    plans.push_back(
        make_row_panels(problem, kernel, heights, band_rows, resources, max_ctas, transport));
  }
}

// Chunks of tiles that are exchanged between two ranks.
void add_exchanges(std::vector<Plan>& plans, const Problem& problem, Kernel kernel,
                   const Schedules& schedules, const Resources& resources, int32_t max_ctas) {
  const Plan base = base_plan(problem, kernel, Transport::kNccl, {});
  const int32_t rows = tiles_m(base);
  for (const std::vector<int32_t>& weights : schedules) {
    const std::vector<int32_t> chunks = apportion(rows * tiles_n(base), base.cluster_m, weights);
    if (chunks.empty()) continue;
    plans.push_back(
        make_packed(problem, kernel, chunks, std::min(kBandRows, rows), resources, max_ctas));
    plans.back().collective = Collective::kExchange;
  }
}

// Of the product, or of an all-gather's input.
int64_t peer_bytes(const Problem& problem) {
  const int64_t columns = problem.op == Op::kAllGatherGemm ? problem.k : problem.n;
  return problem.m * columns * moved_bytes(problem);
}

bool too_small_for_peers(const Problem& problem, const Machine& machine) {
  return problem.op != Op::kGemmAllReduce &&
         peer_bytes(problem) < machine.profile->peer.least_bytes;
}

// Whether there is a flag for each tile that a ring would pass on. Other ops' plans pass on none.
bool has_ring_flags(const Problem& problem, Kernel kernel) {
  Plan base = base_plan(problem, kernel, Transport::kPeer, {});
  base.chunks.resize(1);  // as peer_schedules has it
  return base.collective != Collective::kRing || ring_tiles(base) <= kMaxRingTiles;
}

// Whether a kernel's larger tiles, in two rounds or more, fill about as many SMs as ping-pong's of 128 x 128.
bool fills_tiles(const Problem& problem, const Profile::Gemm& gemm, int32_t sms,
                 Transport transport, Kernel kernel) {
  const Plan large = base_plan(problem, kernel, transport, {});
  const Plan small = base_plan(problem, Kernel::kSm90Pingpong, transport, {});
  const auto rounds = [&](const Plan& plan) {
    return rounds_of(int64_t{tiles_m(plan)} * tiles_n(plan), sms);
  };
  const double larger = static_cast<double>(large.tile_n) / small.tile_n;
  return rounds(large) >= gemm.large_tile_rounds &&
         larger * rounds(large) <= gemm.large_tile_factor * rounds(small);
}

// The kernels of what moves each byte once, the preferred one first. Larger tiles need less of shared memory's rate, but
// the cooperative kernel's stores come between products, which weighs at small K. Where an all-gather's GEMM is long the
// chip reaches its power limit, and ping-pong needs less power. docs/notes.md has the times ("Tile shapes on Hopper").
std::vector<Kernel> one_way_kernels(const Problem& problem, const Machine& machine,
                                    const Prediction& sequence, Kernel kernel,
                                    Transport transport) {
  if (kernel != Kernel::kSm90Pingpong) return {kernel};
  const Profile& profile = *machine.profile;
  const bool gathers = problem.op == Op::kAllGatherGemm;
  // An all-gather's last launch has all SMs. A reduce-scatter's GEMM leaves some to NCCL.
  const Way most = way_of(profile.ways.one_way_window.back());
  const int32_t sms = std::max(1, machine.sm_count - (gathers ? 0 : most.ctas * most.lanes));
  const auto fills = [&](Kernel own) {
    return fills_tiles(problem, profile.gemm, sms, transport, own);
  };
  const bool wide = fills(Kernel::kSm90PingpongWide);
  const bool large = !is_fp8(problem.dtype) && fills(Kernel::kSm90Cooperative);
  const Kernel shorter = problem.k <= profile.gemm.short_k && wide ? Kernel::kSm90PingpongWide
                         : large                                   ? Kernel::kSm90Cooperative
                                                                   : kernel;
  if (!gathers) return {shorter};
  if (sequence.gemm_us > profile.gemm.cool_us) return {wide ? Kernel::kSm90PingpongWide : kernel};
  if (shorter == kernel) return {kernel};
  return {shorter, kernel};  // which takes fewer rounds for what arrives
}

// What stores into peers' memory and adds what they stored: ping-pong. Its wide tiles take more of a round that
// is not full, which the model counts.
std::vector<Kernel> peer_kernels(const Problem& problem, const Machine& machine,
                                 const Prediction& sequence, Kernel kernel) {
  if (problem.op == Op::kAllGatherGemm) {
    return one_way_kernels(problem, machine, sequence, kernel, Transport::kPeer);
  }
  return {kernel, Kernel::kSm90PingpongWide};
}

void add_gpu_kernel(std::vector<Plan>& plans, const Problem& problem, const Machine& machine,
                    const Prediction& sequence, Kernel kernel) {
  const Profile& profile = *machine.profile;
  const auto resources_of = [&](const Way& way, bool window) {
    return Resources{.comm_sms = way.ctas * way.lanes, .window = window, .lanes = way.lanes};
  };
  const auto fits = [&](const Way& way) {  // the GEMM keeps at least half of a small GPU
    return 2 * way.ctas * way.lanes <= machine.sm_count;
  };
  const auto add_panels = [&](Kernel own, const Profile::Lists& ways, const Schedules& schedules,
                              bool window) {
    for (const std::vector<int32_t>& pair : ways) {
      const Way way = way_of(pair);
      if (!fits(way)) continue;
      add_row_panels(plans, problem, own, schedules, resources_of(way, window), way.ctas,
                     Transport::kNccl);
    }
  };
  const auto add_exchanges_in = [&](const Way& way, bool window, const Schedules& schedules) {
    if (!fits(way)) return;
    add_exchanges(plans, problem, kernel, schedules, resources_of(way, window), way.ctas);
  };
  const Profile::Ways& ways = profile.ways;
  const Schedules& usual = schedules_of(problem.op, profile);
  if (slow_link(machine)) {
    if (problem.op == Op::kGemmAllReduce && problem.world_size == 2) {
      // In two lanes, for long GEMMs, what a chunk costs is hidden. In four, for GEMMs that the link outlasts, small
      // chunks at the ends gain; short GEMMs want few.
      for (const std::vector<int32_t>& pair : ways.slow_link_exchange) {
        const Way way = way_of(pair);
        add_exchanges_in(way, false,
                         way.lanes > 2 ? profile.schedules.slow_link_exchange_in_many_lanes
                                       : profile.schedules.slow_link_exchange);
      }
    } else if (problem.op == Op::kGemmReduceScatter && problem.world_size == 2) {
      add_panels(kernel, ways.slow_link_scatter, profile.schedules.slow_link_scatter, false);
    } else {
      add_panels(kernel, ways.slow_link, usual, false);
    }
    return;
  }
  if (machine.peer_gbps >= profile.peer.fast_gbps && problem.m % problem.world_size == 0 &&
      problem.world_size <= kMaxPeerRanks && kernel == Kernel::kSm90Pingpong &&
      !too_small_for_peers(problem, machine) && has_ring_flags(problem, kernel)) {
    const size_t first = plans.size();
    for (const Kernel own : peer_kernels(problem, machine, sequence, kernel)) {
      add_row_panels(plans, problem, own, peer_schedules(problem.op, profile), {}, 0,
                     Transport::kPeer);
    }
    for (size_t i = first; i < plans.size(); ++i) plans[i].resources.comm_sms = peer_sms(plans[i]);
    return;  // better than anything through NCCL, wherever both were measured
  }
  // Where windows work they carry more with fewer SMs, and between two ranks an exchange more yet. The model's error is
  // larger than what lies between the three, so it does not choose among them.
  if (problem.op != Op::kGemmAllReduce) {
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

// Of fp8: ping-pong, whose scales are of rows, to bfloat16.
bool kernels_take(const Problem& problem, const Machine& machine) {
  const bool fp8 = is_fp8(problem.dtype);
  const int64_t k_alignment = fp8 ? 2 * kAlignment : kAlignment;
  if (problem.n % kAlignment != 0 || problem.k % k_alignment != 0) return false;
  if (!fp8) return element_bytes(problem.dtype) == 2;
  return machine.has_sm90_kernels && problem.recipe != Recipe::kBlock &&
         output_dtype(problem) == DType::kBFloat16;
}

// In a row ping-pong is the faster kernel: see one_way_kernels.
Kernel best_kernel(const Problem& problem, const Machine& machine) {
  if (!kernels_take(problem, machine)) return Kernel::kLibrary;
  if (machine.has_sm90_kernels) return Kernel::kSm90Pingpong;
  return machine.has_sm80_kernels ? Kernel::kSm80 : Kernel::kLibrary;
}

// Everything in one step, where there is little to overlap.
void add_direct(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const bool gathers = problem.op == Op::kAllGatherGemm;
  const int64_t row_bytes = (gathers ? problem.k : problem.n) * moved_bytes(problem);
  if (machine.peer_gbps < machine.profile->peer.fast_gbps || problem.world_size > kMaxPeerRanks ||
      row_bytes % kDirectAccess != 0 || peer_bytes(problem) > kMaxDirectBytes ||
      too_small_for_peers(problem, machine) || problem.dtype == DType::kFloat64) {
    return;
  }
  plans.push_back(make_at_once(problem, Kernel::kLibrary));
  const bool owned = problem.op != Op::kGemmAllReduce || problem.world_size > 2;
  if (!gathers && best_kernel(problem, machine) == Kernel::kSm90Pingpong &&
      (!owned || problem.m % problem.world_size == 0)) {
    plans.push_back(make_at_once(problem, Kernel::kSm90Pingpong));
  }
}

// Library GEMMs, a call per chunk: what the kernels cannot take.
void add_gpu_library(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const Profile& profile = *machine.profile;
  for (const std::vector<int32_t>& pair :
       slow_link(machine) ? profile.ways.slow_link_library : profile.ways.library) {
    const Way way = way_of(pair);
    if (2 * way.ctas * way.lanes > machine.sm_count) continue;
    const Resources resources = {.comm_sms = way.ctas * way.lanes, .lanes = way.lanes};
    add_row_panels(plans, problem, Kernel::kLibrary, profile.schedules.library, resources, way.ctas,
                   Transport::kNccl);
  }
}

void add_cpu(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const Profile& profile = *machine.profile;
  const double flops = 2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                       static_cast<double>(problem.k);
  for (const std::vector<int32_t>& weights : profile.schedules.library) {
    if (flops < profile.cpu.chunk_flops * static_cast<double>(weights.size())) continue;
    add_row_panels(plans, problem, Kernel::kLibrary, {weights}, Resources{}, 0, Transport::kGloo);
  }
}

// Row counts differ by rank, so the plan says only how pieces are computed and how they travel.
void add_all_to_all(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const bool cpu = machine.arch == 0;
  const Profile::AllToAll& sizes = machine.profile->all_to_all;
  const int64_t fast = problem.world_size == 2 ? sizes.pair_ctas : sizes.many_ctas;
  const auto ctas = static_cast<int32_t>(cpu                  ? 0
                                         : slow_link(machine) ? sizes.slow_link_ctas
                                                              : fast);
  if (2 * ctas > machine.sm_count) return;
  const bool peers =
      machine.peer_gbps >= machine.profile->peer.fast_gbps && problem.world_size <= kMaxPeerRanks &&
      problem.n * moved_bytes(problem) % kDirectAccess == 0 && problem.dtype != DType::kFloat64;
  // Over peers, between more than two ranks, long messages travel by NCCL.
  const int32_t comm_sms = peers && problem.world_size == 2 ? 0 : ctas;
  plans.push_back(make_all_to_all(problem, best_kernel(problem, machine), {.comm_sms = comm_sms},
                                  ctas,
                                  cpu     ? Transport::kGloo
                                  : peers ? Transport::kPeer
                                          : Transport::kNccl));
}

}  // namespace

// The model is not better than that, and a lost sequence costs more than a missed overlap.
NeededGain needed_gain(const Plan& plan, const Machine& machine) {
  const Profile::NeededGain& needed = machine.profile->needed_gain;
  const auto gain = [](const Profile::Gain& of) { return NeededGain{of.share, of.us}; };
  if (plan.schedule != Schedule::kOverlapped) return {1.0, 0.0};
  if (machine.arch == 0) return gain(needed.cpu);
  if (plan.kernel == Kernel::kLibrary) return gain(needed.library);
  if (over_peers(plan)) return gain(needed.peer);
  if (!plan.resources.window) return gain(needed.usual);
  if (plan.collective == Collective::kExchange) return gain(needed.exchange_window);
  if (plan.collective == Collective::kReduceScatter) return gain(needed.reduce_scatter_window);
  return gain(needed.usual);
}

std::vector<Plan> candidates(const Problem& problem, const Machine& machine) {
  std::vector<Plan> plans;
  plans.reserve(128);  // as many as there are, mostly
  plans.push_back(make_sequential(problem, machine));
  const bool all_to_all = problem.op == Op::kGemmAllToAll;
  const bool nothing_to_overlap = problem.world_size == 1 || (problem.m == 0 && !all_to_all) ||
                                  problem.n == 0 || problem.k == 0;
  const bool unmeasured =
      machine.sm_count <= 0 || machine.sm_gflops <= 0.0 || machine.link_gbps <= 0.0;
  // On CPU scaled operands have one GEMM and one collective: see check_schedule.
  const bool scaled_on_cpu = machine.arch == 0 && problem.recipe != Recipe::kNone;
  if (nothing_to_overlap || unmeasured || scaled_on_cpu) return plans;
  if (all_to_all) {
    add_all_to_all(plans, problem, machine);
    return plans;
  }
  if (machine.arch == 0) {
    add_cpu(plans, problem, machine);
    return plans;
  }
  add_direct(plans, problem, machine);
  if (const Kernel kernel = best_kernel(problem, machine); kernel == Kernel::kLibrary) {
    add_gpu_library(plans, problem, machine);
  } else {
    if (is_fp8(problem.dtype)) add_gpu_library(plans, problem, machine);
    add_gpu_kernel(plans, problem, machine, predict(plans.front(), machine), kernel);
  }
  return plans;
}

// Kernels of fp8 add up as the tensor cores do, which not every caller takes (use_fast_accum): the framework's GEMM would
// follow a plan made for them. So they are taken by hand, or by measuring.
static bool may_be_taken(const Plan& plan) {
  return !is_fp8(plan.problem.dtype) || plan.kernel == Kernel::kLibrary;
}

Plan make_plan(const Problem& problem, const Machine& machine) {
  std::vector<Plan> plans = candidates(problem, machine);
  // Few rows leave in one call after the GEMM, as in the sequence, whatever the plan.
  if (problem.op == Op::kGemmAllToAll) return std::move(plans.back());
  const double sequential_us = predict(plans[0], machine).total_us;
  size_t best = 0;
  double best_us = sequential_us;
  for (size_t i = 1; i < plans.size(); ++i) {
    if (!may_be_taken(plans[i])) continue;
    const NeededGain needed = needed_gain(plans[i], machine);
    const double us = predict(plans[i], machine).total_us;
    // The first of equals stays: every rank goes through the same list in the same order.
    if (us + needed.us < needed.share * sequential_us && us < best_us) {
      best = i;
      best_us = us;
    }
  }
  return std::move(plans[best]);
}

}  // namespace overlap::planner
