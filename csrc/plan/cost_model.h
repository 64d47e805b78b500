// What planner and cost model both know of a link.
#pragma once

#include "plan/plan.h"

namespace overlap::plan {

// GB/s: below it, as over PCIe or host memory, a few CTAs fill the link.
inline constexpr double kSlowLinkGbps = 60.0;

inline bool slow_link(const Machine& machine) {
  return machine.arch == 0 || machine.link_gbps < kSlowLinkGbps;
}

}  // namespace overlap::plan
