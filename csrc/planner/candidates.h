// The plans that the planner weighs, each with its family.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "planner/planner.h"

namespace overlap::planner {

// Plans as they are made; with `only`, no others than of those families.
struct Candidates {
  std::vector<plan::Plan> plans = {};
  std::vector<Family> families = {};  // one for each plan
  const std::vector<Family>* only = nullptr;

  bool wants(const Family& family) const {
    return only == nullptr || std::find(only->begin(), only->end(), family) != only->end();
  }
  // Two schedules of a small problem may give the same plan: the first one stays.
  void add(plan::Plan plan, Family family) {
    if (std::find(plans.begin(), plans.end(), plan) != plans.end()) return;
    plans.push_back(std::move(plan));
    families.push_back(std::move(family));
  }
};

// All candidates, or those of some families, the sequence first.
Candidates make_candidates(const plan::Problem& problem, const plan::Machine& machine, bool all,
                           const std::vector<Family>* only);

}  // namespace overlap::planner
