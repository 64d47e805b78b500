// The plans that the planner weighs, each with its family; and the kernels and chunks that they have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "planner/planner.h"
#include "steps/price/price.h"

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

// The kernel of this package that takes the problem on the machine, or kLibrary. In a row ping-pong is the faster one: see
// one_way_kernels.
plan::Kernel best_kernel(const plan::Problem& problem, const plan::Machine& machine);

// The first kernel of the same architecture with wider tiles that stores to peers, or not; else itself.
plan::Kernel larger_kernel(plan::Kernel kernel, bool to_peers);

// The kernels of what moves each byte once, the preferred one first. Larger tiles need less of shared memory's rate, but
// the cooperative kernel's stores come between products, which weighs at small K. Where an all-gather's GEMM is long the
// chip reaches its power limit, and ping-pong needs less power. In fp8 tiles of 128 x 128 were the slower ones wherever wide
// ones fill the SMs. benchmarks/notes.md has the times ("Tile shapes on Hopper", "All-gathers in fp8").
std::vector<plan::Kernel> one_way_kernels(const plan::Problem& problem,
                                          const plan::Machine& machine,
                                          const steps::Prediction& sequence, plan::Kernel kernel,
                                          plan::Transport transport);

// The kernels that store into peers' memory and add what peers stored: ping-pong. Wide tiles take more of a round that
// is not full, which the model counts.
std::vector<plan::Kernel> peer_kernels(const plan::Problem& problem, const plan::Machine& machine,
                                       const steps::Prediction& sequence, plan::Kernel kernel);

// All tiles are computed in one launch, and a small last chunk is a short tail; but a chunk costs the host. An
// all-gather's launches end with whole rounds of tiles, and each call has a start: few chunks.
inline const plan::Profile::Lists& schedules_of(const plan::Problem& problem,
                                                const plan::Profile& profile) {
  if (problem.traits().scatters()) return profile.schedules.reduce_scatter;
  return problem.traits().gathers() ? profile.schedules.all_gather : profile.schedules.all_reduce;
}

// `total` in parts as the weights say, each but the last a multiple of `grain`. Empty if a part
// would be.
inline std::vector<int32_t> apportion(int32_t total, int32_t grain,
                                      const std::vector<int32_t>& weights) {
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
inline int32_t band_height(int32_t rows, int32_t grain, const std::vector<int32_t>& weights) {
  const int64_t sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  const int64_t least = *std::min_element(weights.begin(), weights.end());
  for (int32_t height = plan::kBandRows; height >= grain; height /= 2) {
    if (height % grain == 0 && least * rows >= height * sum) return height;
  }
  return 0;
}

// All candidates, or those of some families, the sequence first.
Candidates make_candidates(const plan::Problem& problem, const plan::Machine& machine, bool all,
                           const std::vector<Family>* only);

}  // namespace overlap::planner
