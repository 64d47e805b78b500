// What the ranks of a group must have in common to plan alike, and the machine that all of them plan for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

// Of the sources in csrc that plan, run and compute; tools/source_hash.py makes it.
extern const uint64_t kSourceHash;

// What one rank brings: its own device's, as plain bytes that travel.
struct RankFacts {
  int32_t arch = 0;
  int32_t sm_count = 0;
  int32_t has_sm80_kernels = 0;
  int32_t has_sm90_kernels = 0;
  int32_t nccl_version = 0;
  int32_t reserved = 0;
  double sm_gflops = 0.0;
  uint64_t profile = 0;  // hash of its numbers
  uint64_t build = 0;    // hash of the sources that plan and communicate
};

RankFacts facts_of(const Machine& machine, int32_t nccl_version, uint64_t build);

struct Agreement {
  Machine machine;
  std::string
      difference;  // which rank differs from rank 0 in what, and what follows; "" if none does
};

// The slowest rank's device, with the kernels that all have: where GPUs differ, all plan for that. Where ranks plan by other
// numbers or sources, or NCCLs differ, nothing may be planned: a machine that nobody measured, on which all ranks run the
// sequence. The link is `own`'s. `all`: by rank, one at least.
Agreement agree(const Machine& own, const std::vector<RankFacts>& all);

}  // namespace overlap::plan
