#include "planner/planner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/candidates.h"
#include "steps/price/price.h"

namespace overlap::planner {

using namespace plan;  // whose types these are
using steps::predict;

// The model is not better than that, and a lost sequence costs more than a missed overlap.
NeededGain needed_gain(const Plan& plan, const Machine& machine) {
  const Profile::NeededGain& needed = machine.profile->needed_gain;
  const auto gain = [](const Profile::Gain& of) { return NeededGain{of.share, of.us}; };
  if (plan.schedule != Schedule::kOverlapped) {
    // With many rows NCCL's all-reduce was the faster one, by as much as the model has it slower.
    const bool reduces =
        plan.collective == Collective::kDirect && plan.problem.traits().all_reduces();
    return {reduces && is_fp8(plan.problem.dtype) ? needed.library.share : 1.0, 0.0};
  }
  if (machine.arch == 0) return gain(needed.cpu);
  const bool chunked = plan.collective != Collective::kStripes || plan.chunks.size() > 1;
  if (plan.kernel == Kernel::kLibrary && chunked) return gain(needed.library);
  if (over_peers(plan)) return gain(needed.peer);
  if (!plan.resources.window) return gain(needed.usual);
  if (plan.collective == Collective::kExchange) return gain(needed.exchange_window);
  if (plan.collective == Collective::kReduceScatter) return gain(needed.reduce_scatter_window);
  return gain(needed.usual);
}

namespace {

// The time that each plan is expected to take.
std::vector<double> expected_us(const std::vector<Plan>& plans, const Machine& machine) {
  std::vector<double> us;
  us.reserve(plans.size());
  for (const Plan& plan : plans) us.push_back(predict(plan, machine).total_us);
  return us;
}

// Infinite for one that is not expected to gain enough over the first.
std::vector<double> gaining_us(const std::vector<Plan>& plans, const Machine& machine,
                               std::vector<double> us) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // The sequence stands for the composition, whose GEMM has other bits: it is for problems without other plans.
  if (plans.size() > 1 && plans.front().problem.invariance != Invariance::kNone) {
    us.front() = kNever;
    return us;
  }
  for (size_t i = 1; i < plans.size(); ++i) {
    const NeededGain needed = needed_gain(plans[i], machine);
    const bool gains = us[i] + needed.us < needed.share * us.front();
    if (!gains) us[i] = kNever;
  }
  return us;
}
std::vector<double> times_us(const std::vector<Plan>& plans, const Machine& machine) {
  return gaining_us(plans, machine, expected_us(plans, machine));
}

// The first of equals stays: every rank goes through the same list in the same order.
size_t fastest(const std::vector<double>& us) {
  return static_cast<size_t>(std::min_element(us.begin(), us.end()) - us.begin());
}

}  // namespace

std::vector<Plan> candidates(const Problem& problem, const Machine& machine, bool all) {
  return make_candidates(problem, machine, all, nullptr).plans;
}

Plan make_plan(const Problem& problem, const Machine& machine) {
  std::vector<Plan> plans = candidates(problem, machine, false);
  // Few rows leave in one call after the GEMM, as in the sequence, whatever the plan.
  if (problem.traits().rows_by_rank) return std::move(plans.back());
  return std::move(plans[fastest(times_us(plans, machine))]);
}

std::optional<std::array<Problem, 2>> neighbours(const Problem& problem, const Machine& machine) {
  constexpr int64_t kLeast = 256;
  constexpr int64_t kSteps = 4;  // from one power of two to the next
  if (machine.arch == 0 || problem.traits().rows_by_rank || problem.m < kLeast) {
    return std::nullopt;
  }
  int64_t step = kLeast / kSteps;
  while (2 * kSteps * step <= problem.m) step *= 2;
  const int64_t below = problem.m / step * step;
  // Parts of equal rows have other candidates: where the problem has none, its neighbours have none.
  const int64_t ranks = problem.world_size;
  const bool parted = problem.m % ranks == 0;
  const auto alike = [&](int64_t m) {
    Problem other = problem;
    other.m = parted ? (m + ranks - 1) / ranks * ranks : m % ranks == 0 ? m + 1 : m;
    return other;
  };
  const std::array<Problem, 2> both = {alike(below), alike(below + step)};
  if (both[0].m >= problem.m || both[1].m <= problem.m) return std::nullopt;
  return both;
}

std::vector<Family> best_families(const Problem& problem, const Machine& machine) {
  constexpr size_t kMost = 2;
  const Candidates found = make_candidates(problem, machine, false, nullptr);
  const std::vector<double> expected = expected_us(found.plans, machine);
  const std::vector<double> us = gaining_us(found.plans, machine, expected);
  // After those that gain enough, those that come close: at an M between they may.
  std::vector<size_t> order(found.plans.size() - 1);
  std::iota(order.begin(), order.end(), 1);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(us[a], expected[a]) < std::pair(us[b], expected[b]);
  });
  order.resize(std::min(order.size(), kMost));
  std::vector<Family> families;
  for (const size_t i : order) families.push_back(found.families[i]);
  return families;
}

Plan make_plan_between(const Problem& problem, const Machine& machine,
                       const std::vector<Family>& below, const std::vector<Family>& above) {
  std::vector<Family> families = below;
  for (const Family& family : above) {
    if (std::find(below.begin(), below.end(), family) == below.end()) families.push_back(family);
  }
  std::vector<Plan> plans = make_candidates(problem, machine, false, &families).plans;
  return std::move(plans[fastest(times_us(plans, machine))]);
}

}  // namespace overlap::planner
