// The planner: a pure function from problem and machine to plan. Candidates, what each is expected to cost, the
// smallest time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"
#include "steps/price/price.h"

namespace overlap::planner {

// The candidates that the planner weighs, the sequential plan first; with `all`, also those that nobody has measured on
// such a machine, which the planner weighs only on machines that nobody has measured anything on.
std::vector<plan::Plan> candidates(const plan::Problem& problem, const plan::Machine& machine,
                                   bool all = false);

// How much better than the sequence a plan has to be expected, to be taken: it needs less than this share of the
// sequence's time, and saves this much.
struct NeededGain {
  double share = 1.0;
  double us = 0.0;
};
NeededGain needed_gain(const plan::Plan& plan, const plan::Machine& machine);

// The candidate with the smallest predicted time; sequential unless overlap is predicted to win
// clearly.
plan::Plan make_plan(const plan::Problem& problem, const plan::Machine& machine);

// --- kernels of the caller's --------------------------------------------------------------------------------
// Their GEMM, or whatever else they compute, has a time that is measured or given; chunks are row panels of its tiles.

struct KernelRequest {
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  double kernel_us = 0.0;  // on all SMs, by itself
  int32_t comm_sms = 0;    // that it leaves to communication
  // The number of chunks, of about equal height; fewer where there are fewer rows of tiles; 0: any.
  int32_t chunks = 0;
  bool stripes = true;  // the ranks may have a product whose parts lie in each other's memory
};

// The candidates: the sequence first, all in one chunk. All-to-alls have none, as their rows differ by rank.
std::vector<plan::Plan> kernel_candidates(const plan::Problem& problem,
                                          const plan::Machine& machine,
                                          const KernelRequest& request);

// The time that the job's list of steps is expected to take with this plan.
steps::Price price_kernel(const plan::Plan& plan, const plan::Machine& machine, double kernel_us);

// The candidate with the smallest expected time; with chunks = 0 the sequence unless another gains clearly.
plan::Plan make_kernel_plan(const plan::Problem& problem, const plan::Machine& machine,
                            const KernelRequest& request);

// --- many M of one problem ---------------------------------------------------------------------------------
// Serving calls with every M, and all candidates are up to two hundred. So a problem is planned whole at some M, and
// between these only the best of the two neighbours is weighed. The choice depends only on the problem, not on what was
// called before: every rank comes to the same.

// The common part of one problem's plans for other M.
struct Family {
  plan::Kernel kernel = plan::Kernel::kLibrary;
  plan::Transport transport = plan::Transport::kNccl;
  plan::Collective collective = plan::Collective::kAllReduce;
  bool packed = false;
  bool window = false;
  int32_t lanes = 1;
  int32_t ctas = 0;
  std::vector<int32_t> weights = {};  // of the chunks

  bool operator==(const Family&) const = default;
};

// The problem with the M below and the M above at which it is planned whole; none where it is planned whole itself: at these M, with
// few rows, and on CPU.
std::optional<std::array<plan::Problem, 2>> neighbours(const plan::Problem& problem,
                                                       const plan::Machine& machine);

// The families of the best candidates, the best first: two, or fewer.
std::vector<Family> best_families(const plan::Problem& problem, const plan::Machine& machine);

// The best plan of these families, or the sequence.
plan::Plan make_plan_between(const plan::Problem& problem, const plan::Machine& machine,
                             const std::vector<Family>& below, const std::vector<Family>& above);

}  // namespace overlap::planner
