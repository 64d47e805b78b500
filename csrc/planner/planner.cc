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

// Ways to communicate that are tried: CTAs of a communicator, lanes, SMs left free. One
// communicator exists for each lane and CTA limit. Those that measured well on H200s; on slow links
// a few CTAs are enough.
struct Way {
  int32_t ctas;
  int32_t lanes;
};
constexpr Way kPlainWays[] = {{8, 2}, {16, 2}};
constexpr Way kWindowWays[] = {{4, 2}, {6, 2}, {8, 2}, {6, 3}, {8, 3}};
// Of exchanges on fast links, single calls of 12 shapes: 1.27x, where one lane of 8 to 16 reached 1.18x.
constexpr Way kExchange = {8, 2};
constexpr Way kSlowLinkWays[] = {{4, 1}, {4, 2}};
constexpr Way kSlowLinkExchanges[] = {{2, 2}, {2, 4}};
// Of reduce-scatters between two ranks: where the link outlasts the GEMM, four lanes in 16 chunks gained 7 to 14 %
// over one or two of 4 CTAs in 8.
constexpr Way kSlowLinkScatters[] = {{4, 1}, {2, 4}};
constexpr Way kOneWayWindowWays[] = {{8, 1}, {8, 2}};  // reduce-scatter, all-gather: most SMs last

// The peer transport: stores of the GEMM into a slow link would hold up the GEMM.
constexpr double kFastPeerGbps = 100.0;
// SMs left to kernels of one warp: an all-gather's signals keep the GEMM out of their SM and, as CTAs come
// in clusters of two, out of that SM's neighbour. What a ring's GEMM waits for takes no SM.
int32_t peer_sms(const Plan& plan) {
  return plan.problem.op == Op::kAllGatherGemm ? 2 : 0;
}

// What the host's time weighs in.
constexpr int64_t kFewRows = 2048;
constexpr double kShortCallUs = 700.0;

// A GEMM of up to this is over before the chip is at its power limit, if it comes alone.
constexpr double kCoolGemmUs = 1400.0;
// Of up to this K the cooperative kernel's stores, beside which nothing is multiplied, weigh.
constexpr int64_t kShortK = 2560;

// Direct plans hold all partial sums in slots, and add them up when the GEMM has ended: for few rows.
constexpr int64_t kMaxDirectBytes = int64_t{1} << 27;
constexpr int64_t kDirectAccess = 16;  // bytes
// Smaller ones NCCL gathers and scatters in as little time; an all-reduce has the low-latency kernel.
constexpr int64_t kMinPeerBytes = int64_t{1} << 17;

constexpr int64_t kAlignment = 8;  // elements: 16 bytes, what bulk copies of 16-bit types take
constexpr double kMinCpuChunkFlops = 1e6;  // less work than this hides no communication call

// The chunks' shares of the output, first to last.
const std::vector<std::vector<int32_t>>& gpu_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(2, 1),
      std::vector<int32_t>(4, 1),
      std::vector<int32_t>(8, 1),
      std::vector<int32_t>(16, 1),
      // Communication is the longer part: start it early, then make few calls.
      {1, 3},
      {1, 3, 4},
      {1, 3, 6, 6},
      {1, 2, 4, 8},
      // The GEMM is the longer part: little may be left to communicate when it ends.
      {3, 1},
      {4, 3, 1},
      {4, 4, 4, 2, 1, 1},
      {3, 3, 3, 3, 2, 1, 1},
      {4, 4, 4, 4, 4, 4, 3, 2, 1, 1},
      // Neither hides the other.
      {2, 4, 4, 3, 2, 1},
      {1, 2, 3, 4, 4, 4, 3, 1},
      {1, 2, 1},
      {1, 3, 3, 1},
      {1, 3, 4, 4, 3, 1},
      {1, 2, 3, 3, 3, 2, 1, 1},
  };
  return schedules;
}

// Those that measured well. All tiles are computed in one launch, and a small last chunk is a short tail; but a
// chunk costs the host 30 us.
const std::vector<std::vector<int32_t>>& scatter_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(8, 1), {4, 3, 1},          {2, 4, 4, 3, 2, 1},
      {3, 4, 4, 4, 3, 2, 1},      {4, 4, 4, 2, 1, 1}, {4, 4, 4, 4, 4, 4, 3, 2, 1, 1},
  };
  return schedules;
}

// Launches end with whole rounds of tiles, but each call has a start: few chunks, of which the first
// is small, as the others arrive beside the own rows' tiles and its own; or one, where the own rows'
// tiles hide it.
const std::vector<std::vector<int32_t>>& gather_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {{1}, {1, 3}, {1, 3, 4}, {1, 2, 4, 8}};
  return schedules;
}

const std::vector<std::vector<int32_t>>& schedules_of(Op op) {
  if (op == Op::kGemmReduceScatter) return scatter_schedules();
  return op == Op::kAllGatherGemm ? gather_schedules() : gpu_schedules();
}

// Few first, as the link is idle until then, and few last, which nothing hides. In 8 chunks within 2 % of the
// best of 4 to 16, equal or not, on each of 12 shapes.
const std::vector<std::vector<int32_t>>& exchange_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(4, 1), {1, 2, 1}, {2, 3, 2, 1}, {2, 4, 4, 3, 2, 1},
      {1, 2, 3, 4, 4, 4, 3, 1},
  };
  return schedules;
}

// Of short calls of few rows. Each chunk costs the host 17 us, and four shapes gained no more in six or eight
// (1.27x in calls and 1.21x in a row, 1.26x and 1.20x).
const std::vector<std::vector<int32_t>>& short_exchange_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(4, 1), {1, 2, 1}, {2, 3, 2, 1}};
  return schedules;
}

// Over slow links. In two lanes, for long GEMMs, what a chunk costs is hidden: 1.52x to 1.59x in 16 equal ones,
// 1.37x to 1.48x in 8, 10, 12, 20 or 24, 1.43x to 1.53x with small ones at the ends. In four, for GEMMs that the
// link outlasts, small ones at the ends gain 3 % over 16 equal ones (geometric mean of 7 shapes); short GEMMs want
// few.
const std::vector<std::vector<int32_t>>& slow_exchange_schedules(int32_t lanes) {
  static const std::vector<std::vector<int32_t>> equal = {
      std::vector<int32_t>(4, 1),
      std::vector<int32_t>(8, 1),
      std::vector<int32_t>(16, 1),
  };
  static const std::vector<std::vector<int32_t>> many_lanes = {
      std::vector<int32_t>(8, 1),
      {1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1},
  };
  return lanes > 2 ? many_lanes : equal;
}

// Reduce-scatters over slow links, between two ranks.
const std::vector<std::vector<int32_t>>& slow_scatter_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(8, 1),
      std::vector<int32_t>(16, 1),
      {4, 3, 1},
  };
  return schedules;
}

// A ring passes on single tiles, and chunks of what an all-reduce has finished cost its GEMM more than they
// save; an all-gather computes what has arrived.
const std::vector<std::vector<int32_t>>& peer_schedules(Op op) {
  static const std::vector<std::vector<int32_t>> one = {{1}};
  static const std::vector<std::vector<int32_t>> some = {
      std::vector<int32_t>(1, 1),
      std::vector<int32_t>(2, 1),
      {1, 3},
      std::vector<int32_t>(4, 1),
  };
  return op == Op::kAllGatherGemm ? some : one;
}

const std::vector<std::vector<int32_t>>& library_schedules() {
  static const std::vector<std::vector<int32_t>> schedules = {
      std::vector<int32_t>(2, 1),
      std::vector<int32_t>(3, 1),
      std::vector<int32_t>(4, 1),
  };
  return schedules;
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
                    const std::vector<std::vector<int32_t>>& schedules, const Resources& resources,
                    int32_t max_ctas, Transport transport) {
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
                   const std::vector<std::vector<int32_t>>& schedules, const Resources& resources,
                   int32_t max_ctas) {
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
  return problem.m * columns * element_bytes(problem.dtype);
}

bool too_small_for_peers(const Problem& problem) {
  return problem.op != Op::kGemmAllReduce && peer_bytes(problem) < kMinPeerBytes;
}

// Whether there is a flag for each tile that a ring would pass on. Other ops' plans pass on none.
bool has_ring_flags(const Problem& problem, Kernel kernel) {
  Plan base = base_plan(problem, kernel, Transport::kPeer, {});
  base.chunks.resize(1);  // as peer_schedules has it
  return base.collective != Collective::kRing || ring_tiles(base) <= kMaxRingTiles;
}

// Whether a kernel's larger tiles, in two rounds or more, fill about as many SMs as ping-pong's of 128 x 128.
bool fills_tiles(const Problem& problem, int32_t sms, Transport transport, Kernel kernel) {
  const Plan large = base_plan(problem, kernel, transport, {});
  const Plan small = base_plan(problem, Kernel::kSm90Pingpong, transport, {});
  const auto rounds = [&](const Plan& plan) {
    return rounds_of(int64_t{tiles_m(plan)} * tiles_n(plan), sms);
  };
  const double larger = static_cast<double>(large.tile_n) / small.tile_n;
  return rounds(large) >= 2.0 && larger * rounds(large) <= 1.05 * rounds(small);
}

// The kernels of what moves each byte once, the preferred one first. Two H200s, m_train, the same plans with
// ping-pong, the cooperative kernel and wide ping-pong, calls and then rows: reduce-scatters over NCCL 1.15x,
// 1.20x, 1.19x and 1.19x, 1.17x, 1.18x of the sequence; all-gathers over peers 1.18x, 1.23x, 1.21x and 1.23x, 1.22x,
// 1.20x. With K = 2048 wide ping-pong was the fastest of the three in 15 of 18. Where an all-gather's GEMM is long
// the chip reaches its power limit, and ping-pong needs less: of three of 1.5 to 2.8 ms wide gained 4 to 6 % over
// 128 x 128 in calls, and in a row 1 %, 1 % and -2 %. Exchanges lose by both, wide 5 % in a row.
std::vector<Kernel> one_way_kernels(const Problem& problem, const Machine& machine,
                                    const Prediction& sequence, Kernel kernel,
                                    Transport transport) {
  if (kernel != Kernel::kSm90Pingpong) return {kernel};
  const bool gathers = problem.op == Op::kAllGatherGemm;
  // An all-gather's last launch has all SMs. A reduce-scatter's GEMM leaves some to NCCL.
  const Way& most = std::end(kOneWayWindowWays)[-1];
  const int32_t sms = std::max(1, machine.sm_count - (gathers ? 0 : most.ctas * most.lanes));
  const auto fills = [&](Kernel own) { return fills_tiles(problem, sms, transport, own); };
  const bool wide = fills(Kernel::kSm90PingpongWide);
  const bool large = fills(Kernel::kSm90Cooperative);
  const Kernel shorter = problem.k <= kShortK && wide ? Kernel::kSm90PingpongWide
                         : large                      ? Kernel::kSm90Cooperative
                                                      : kernel;
  if (!gathers) return {shorter};
  if (sequence.gemm_us > kCoolGemmUs) return {wide ? Kernel::kSm90PingpongWide : kernel};
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
  const auto resources_of = [&](const Way& way, bool window) {
    return Resources{.comm_sms = way.ctas * way.lanes, .window = window, .lanes = way.lanes};
  };
  const auto fits = [&](const Way& way) {  // the GEMM keeps at least half of a small GPU
    return 2 * way.ctas * way.lanes <= machine.sm_count;
  };
  const auto add_panels = [&](Kernel own, const Way& way, bool window) {
    if (!fits(way)) return;
    add_row_panels(plans, problem, own, schedules_of(problem.op), resources_of(way, window),
                   way.ctas, Transport::kNccl);
  };
  const auto add_exchanges_in = [&](const Way& way, bool window, const auto& schedules) {
    if (!fits(way)) return;
    add_exchanges(plans, problem, kernel, schedules, resources_of(way, window), way.ctas);
  };
  if (slow_link(machine)) {
    if (problem.op == Op::kGemmAllReduce && problem.world_size == 2) {
      for (const Way& way : kSlowLinkExchanges) {
        add_exchanges_in(way, false, slow_exchange_schedules(way.lanes));
      }
    } else if (problem.op == Op::kGemmReduceScatter && problem.world_size == 2) {
      for (const Way& way : kSlowLinkScatters) {
        if (!fits(way)) continue;
        add_row_panels(plans, problem, kernel, slow_scatter_schedules(), resources_of(way, false),
                       way.ctas, Transport::kNccl);
      }
    } else {
      for (const Way& way : kSlowLinkWays) add_panels(kernel, way, false);
    }
    return;
  }
  if (machine.peer_gbps >= kFastPeerGbps && problem.m % problem.world_size == 0 &&
      problem.world_size <= kMaxPeerRanks && kernel == Kernel::kSm90Pingpong &&
      !too_small_for_peers(problem) && has_ring_flags(problem, kernel)) {
    const size_t first = plans.size();
    for (const Kernel own : peer_kernels(problem, machine, sequence, kernel)) {
      add_row_panels(plans, problem, own, peer_schedules(problem.op), {}, 0, Transport::kPeer);
    }
    for (size_t i = first; i < plans.size(); ++i) plans[i].resources.comm_sms = peer_sms(plans[i]);
    return;  // measured better than anything through NCCL
  }
  // Where windows work they carry more with fewer SMs, and between two ranks an exchange more yet:
  // measured on the same shapes 1.28x, 1.26x and 1.22x. The model is not good enough to choose
  // among the three.
  if (problem.op != Op::kGemmAllReduce) {
    // The best of each on the same shapes: in windows 1.14x (reduce-scatter) and 1.12x (all-gather),
    // plain 1.11x and 1.07x; windows of all-gathers that stage their rows first: 1.2x.
    if (machine.windows) {
      for (const Kernel own :
           one_way_kernels(problem, machine, sequence, kernel, Transport::kNccl)) {
        for (const Way& way : kOneWayWindowWays) add_panels(own, way, true);
      }
    } else {
      for (const Way& way : kPlainWays) add_panels(kernel, way, false);
    }
  } else if (machine.windows && problem.world_size == 2) {
    const bool brief = problem.m <= kFewRows && sequence.total_us < kShortCallUs;
    add_exchanges_in(kExchange, true, brief ? short_exchange_schedules() : exchange_schedules());
  } else if (machine.windows) {
    for (const Way& way : kWindowWays) add_panels(kernel, way, true);
    // Windows suit a reduction that is the shorter part; the other way about plain calls carry
    // more.
    for (const Way& way : kPlainWays) add_panels(kernel, way, false);
  } else {
    for (const Way& way : kPlainWays) add_panels(kernel, way, false);
  }
}

bool kernels_take(const Problem& problem) {
  return element_bytes(problem.dtype) == 2 && problem.n % kAlignment == 0 &&
         problem.k % kAlignment == 0;
}

// In a row on H200s ping-pong takes 0.98 of cuBLAS's time, the cooperative kernel 1.02: see one_way_kernels.
Kernel best_kernel(const Problem& problem, const Machine& machine) {
  if (!kernels_take(problem)) return Kernel::kLibrary;
  if (machine.has_sm90_kernels) return Kernel::kSm90Pingpong;
  return machine.has_sm80_kernels ? Kernel::kSm80 : Kernel::kLibrary;
}

// Everything in one step, where there is little to overlap.
void add_direct(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const bool gathers = problem.op == Op::kAllGatherGemm;
  const int64_t row_bytes = (gathers ? problem.k : problem.n) * element_bytes(problem.dtype);
  if (machine.peer_gbps < kFastPeerGbps || problem.world_size > kMaxPeerRanks ||
      row_bytes % kDirectAccess != 0 || peer_bytes(problem) > kMaxDirectBytes ||
      too_small_for_peers(problem) || problem.dtype == DType::kFloat64) {
    return;
  }
  plans.push_back(make_direct(problem, Kernel::kLibrary));
  const bool owned = problem.op != Op::kGemmAllReduce || problem.world_size > 2;
  if (!gathers && best_kernel(problem, machine) == Kernel::kSm90Pingpong &&
      (!owned || problem.m % problem.world_size == 0)) {
    plans.push_back(make_direct(problem, Kernel::kSm90Pingpong));
  }
}

// Library GEMMs, a call per chunk: what the kernels cannot take.
void add_gpu_library(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const int32_t ctas = slow_link(machine) ? 4 : 16;
  if (2 * ctas > machine.sm_count) return;
  const Resources resources = {.comm_sms = ctas};
  add_row_panels(plans, problem, Kernel::kLibrary, library_schedules(), resources, ctas,
                 Transport::kNccl);
}

void add_cpu(std::vector<Plan>& plans, const Problem& problem) {
  const double flops = 2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                       static_cast<double>(problem.k);
  for (const std::vector<int32_t>& weights : library_schedules()) {
    if (flops < kMinCpuChunkFlops * static_cast<double>(weights.size())) continue;
    add_row_panels(plans, problem, Kernel::kLibrary, {weights}, Resources{}, 0, Transport::kGloo);
  }
}

// Row counts differ by rank, so the plan says only how pieces are computed and how they travel.
void add_all_to_all(std::vector<Plan>& plans, const Problem& problem, const Machine& machine) {
  const bool cpu = machine.arch == 0;
  const int32_t fast = problem.world_size == 2 ? 24 : 16;
  const int32_t ctas = cpu ? 0 : slow_link(machine) ? 4 : fast;
  if (2 * ctas > machine.sm_count) return;
  const bool peers = machine.peer_gbps >= kFastPeerGbps && problem.world_size <= kMaxPeerRanks &&
                     problem.n * element_bytes(problem.dtype) % kDirectAccess == 0 &&
                     problem.dtype != DType::kFloat64;
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
  constexpr NeededGain kUsual = {0.95, 12.0};
  if (plan.schedule != Schedule::kOverlapped) return {1.0, 0.0};
  if (machine.arch == 0) return {0.95, 2000.0};  // other machines' cores and links are only guessed
  // A GEMM call per chunk, beside NCCL: least sure.
  if (plan.kernel == Kernel::kLibrary) return {0.90, 12.0};
  // No collective of a library's that may not fit beside.
  if (over_peers(plan)) return {0.97, 8.0};
  if (!plan.resources.window) return kUsual;
  // Of four chunks, expected to need 0.96 of the time: they needed 0.84 and 0.87.
  if (plan.collective == Collective::kExchange) return {0.97, 12.0};
  // Expected to need 0.95, they gained 1.01x to 1.05x.
  if (plan.collective == Collective::kReduceScatter) return {0.98, 8.0};
  return kUsual;
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
  if (nothing_to_overlap || unmeasured) return plans;
  if (all_to_all) {
    add_all_to_all(plans, problem, machine);
    return plans;
  }
  if (machine.arch == 0) {
    add_cpu(plans, problem);
    return plans;
  }
  add_direct(plans, problem, machine);
  if (const Kernel kernel = best_kernel(problem, machine); kernel == Kernel::kLibrary) {
    add_gpu_library(plans, problem, machine);
  } else {
    add_gpu_kernel(plans, problem, machine, predict(plans.front(), machine), kernel);
  }
  return plans;
}

Plan make_plan(const Problem& problem, const Machine& machine) {
  std::vector<Plan> plans = candidates(problem, machine);
  // Few rows leave in one call after the GEMM, as in the sequence, whatever the plan.
  if (problem.op == Op::kGemmAllToAll) return std::move(plans.back());
  const double sequential_us = predict(plans[0], machine).total_us;
  size_t best = 0;
  double best_us = sequential_us;
  for (size_t i = 1; i < plans.size(); ++i) {
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
