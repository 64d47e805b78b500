// Plans for kernels of the caller's: how many chunks, and how they travel.
#include <algorithm>
#include <string>
#include <utility>

#include "plan/message.h"
#include "plan/templates.h"
#include "planner/candidates.h"
#include "planner/planner.h"
#include "steps/list/step.h"
#include "steps/price/costs.h"

namespace overlap::planner {

using namespace plan;  // whose types and templates these are

namespace {

// CTAs of a communicator, lanes.
struct Way {
  int32_t ctas = 0;
  int32_t lanes = 1;
  bool window = false;

  bool operator==(const Way&) const = default;
};

class KernelCandidates {
 public:
  KernelCandidates(const Problem& problem, const Machine& machine, const KernelRequest& request)
      : problem_(problem),
        machine_(machine),
        request_(request),
        cpu_(steps::on_cpu(machine)),
        transport_(cpu_ ? Transport::kGloo : Transport::kNccl),
        shape_{request.tile_m, request.tile_n, 1},
        rows_(part_tile_rows(base_plan(problem, Kernel::kLibrary, transport_, shape_))) {}

  std::vector<Plan> make() {
    const std::vector<Way> found = ways();
    if (request_.chunks > 0) {
      const std::vector<int32_t> equal(static_cast<size_t>(std::min(request_.chunks, rows_)), 1);
      for (const Way& way : found) add(equal, way);
      return std::move(plans_);
    }
    // NCCL's own number of CTAs, or as many of them as have room beside the kernel.
    const auto most = static_cast<int32_t>(machine_.profile->link.default_ctas);
    add({1}, {.ctas = cpu_ ? 0 : std::min(most, request_.comm_sms)});
    if (cpu_ || machine_.serial) return std::move(plans_);  // nothing goes on beside the kernel
    add_stripes();
    for (const std::vector<int32_t>& weights : schedules_of(problem_, *machine_.profile)) {
      for (const Way& way : found) add(weights, way);
    }
    return std::move(plans_);
  }

 private:
  // The profile's plain ones, of slow links, fast ones, or between the two both, that fit what the kernel leaves. An
  // all-reduce's windows, in which the kernel stores, ask for fewer CTAs.
  std::vector<Way> ways() const {
    if (cpu_) return {{}};
    const Profile::Ways& all = machine_.profile->ways;
    const double share = steps::fast_link_share(machine_);
    std::vector<Way> found;
    const auto take = [&](const Profile::Lists& lists, bool window = false) {
      for (const std::vector<int32_t>& pair : lists) {
        const Way way = {pair[0], pair[1], window};
        const int32_t ctas = way.ctas * way.lanes;
        const bool fits =
            request_.comm_sms > 0 ? ctas <= request_.comm_sms : 2 * ctas <= machine_.sm_count;
        if (fits && std::find(found.begin(), found.end(), way) == found.end()) found.push_back(way);
      }
    };
    if (share < 1.0) take(all.slow_link);
    if (share > 0.0) take(all.plain);
    if (share > 0.0 && machine_.windows && problem_.traits().all_reduces()) {
      take(all.all_reduce_window, true);
    }
    // Fewer than any way asks for.
    if (found.empty()) found.push_back({.ctas = std::max(1, request_.comm_sms)});
    return found;
  }

  // The kernel's own stores travel, whatever it signals.
  void add_stripes() {
    if (!request_.stripes || !problem_.traits().sums() || machine_.peer_gbps <= 0.0 ||
        problem_.world_size > kMaxPeers || problem_.dtype == DType::kFloat64) {
      return;
    }
    Plan base = base_plan(problem_, Kernel::kLibrary, Transport::kPeer, shape_);
    base.collective = Collective::kStripes;
    if (part_rows(base) * problem_.n * moved_bytes(problem_) < kStripePage) return;
    plans_.push_back(make_row_panels(problem_, Kernel::kLibrary, {part_tile_rows(base)}, kBandRows,
                                     {.comm_sms = request_.comm_sms}, 0, Transport::kPeer, shape_,
                                     Collective::kStripes));
  }

  void add(const std::vector<int32_t>& weights, const Way& way) {
    const std::vector<int32_t> heights = apportion(rows_, 1, weights);
    if (heights.empty()) return;
    const int32_t least = *std::min_element(heights.begin(), heights.end());
    const Resources resources = {
        .comm_sms = request_.comm_sms, .window = way.window, .lanes = way.lanes};
    plans_.push_back(make_row_panels(problem_, Kernel::kLibrary, heights,
                                     std::min(kBandRows, op_row_parts(problem_) * least), resources,
                                     way.ctas, transport_, shape_));
  }

  const Problem& problem_;
  const Machine& machine_;
  const KernelRequest& request_;
  const bool cpu_;
  const Transport transport_;
  const KernelShape shape_;
  const int32_t rows_;  // of tiles, of one part
  std::vector<Plan> plans_;
};

void check(const Problem& problem, const Machine& machine, const KernelRequest& request) {
  if (problem.m == 0 || request.tile_m < 1 || request.tile_n < 1 || !(request.kernel_us > 0.0) ||
      request.comm_sms < 0 || request.chunks < 0) {
    fail("a kernel of your own of ", std::to_string(request.kernel_us), " us in tiles of ",
         request.tile_m, " x ", request.tile_n,
         ": allowed are times above 0, tiles of 1 or more, and m of 1 or more, which gemm_alltoall "
         "never has");
  }
  if (machine.sm_count <= 0 || machine.link_gbps <= 0.0) {
    fail("nothing is known of the machine's link: measure it");
  }
}

}  // namespace

std::vector<Plan> kernel_candidates(const Problem& problem, const Machine& machine,
                                    const KernelRequest& request) {
  check(problem, machine, request);
  return KernelCandidates(problem, machine, request).make();
}

steps::Price price_kernel(const Plan& plan, const Machine& machine, double kernel_us) {
  // An all-gather's kernel begins at once where it leaves SMs to what it waits for.
  const bool awaits = plan.problem.traits().gathers() && plan.resources.comm_sms > 0;
  const steps::Variant variant = {.compute = steps::Compute::kCallers, .awaits = awaits};
  return steps::price(steps::lower(plan, 0, machine, variant), plan, 0, machine, kernel_us);
}

Plan make_kernel_plan(const Problem& problem, const Machine& machine,
                      const KernelRequest& request) {
  std::vector<Plan> plans = kernel_candidates(problem, machine, request);
  const auto expected_us = [&](const Plan& plan) {
    return price_kernel(plan, machine, request.kernel_us).expected.total_us;
  };
  // The first one is the sequence, unless the caller has said how many chunks.
  const Profile::NeededGain& gains = machine.profile->needed_gain;
  const Profile::Gain& beside = request.comm_sms > 0 ? gains.usual : gains.no_sms_left;
  const double first_us = expected_us(plans[0]);
  size_t best = 0;
  double best_us = first_us;
  for (size_t i = 1; i < plans.size(); ++i) {
    const double us = expected_us(plans[i]);
    const Profile::Gain& needed = over_peers(plans[i]) ? gains.peer : beside;
    const bool gains_enough = request.chunks > 0 || us + needed.us < needed.share * first_us;
    if (gains_enough && us < best_us) {
      best = i;
      best_us = us;
    }
  }
  return std::move(plans[best]);
}

}  // namespace overlap::planner
