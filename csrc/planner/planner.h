// The planner: a pure function from problem and machine to plan. Candidates, what each is expected to cost, the
// smallest time.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace overlap::planner {

// All candidates that the planner weighs, the sequential plan first.
std::vector<plan::Plan> candidates(const plan::Problem& problem, const plan::Machine& machine);

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

}  // namespace overlap::planner
