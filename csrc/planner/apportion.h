// Chunks of plans, for kernels of this package and of the caller.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "plan/plan.h"

namespace overlap::planner {

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

}  // namespace overlap::planner
