// The facts that the ranks of a group must have in common to plan alike, and the machine that all
// of them plan for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

// A hash of all sources in csrc; tools/source_hash.py makes it.
extern const uint64_t kSourceHash;

// The reasons why a rank's kernels run one at a time, as far as the process can see them.
enum class Serial : int32_t {
  kNone = 0,
  kLaunchBlocking,
  kSanitizer,
  kDebugger,
  kNsightCompute,
};

// By the value of CUDA_LAUNCH_BLOCKING or null, the text of /proc/self/maps, and the name of the process that traces this one,
// or "".
Serial serial_by(const char* launch_blocking, const std::string& maps, const std::string& tracer);

const char* name(Serial serial);

// The ways by which ranks may map each other's memory: CUDA IPC, and NCCL's symmetric windows where IPC is refused; or only
// one of the two.
enum class PeerSource : int32_t { kAny = 0, kIpc, kNccl };

// "ipc" or "nccl", as OVERLAP_PEER_MEMORY says it; "" for both.
const char* name(PeerSource source);

// Throws std::invalid_argument where a plan's kernels wait for peers', and some rank's run one at a time.
void check_serial(const Plan& plan, const Machine& machine);

// One rank's facts about its own device, as plain bytes that travel.
struct RankFacts {
  int32_t arch = 0;
  int32_t sm_count = 0;
  int32_t kernel_arch = 0;
  int32_t nccl_version = 0;
  int32_t serial = 0;  // a Serial
  double sm_gflops = 0.0;
  uint64_t profile = 0;  // hash of its numbers
  uint64_t build = 0;    // hash of the sources that plan and communicate
};

RankFacts facts_of(const Machine& machine, int32_t nccl_version, uint64_t build,
                   Serial serial = Serial::kNone);

// Ranks on each host, by the ranks' names of their hosts: 1 where hosts have unlike numbers, more than `most`, or ranks
// that do not follow each other.
int32_t ranks_of_each_host(const std::vector<std::string>& hosts, int32_t most);

// Ranks in a row that map each other's memory as NCCL's windows: all of the group where one team of NCCL's, which load and
// store each other's windows, holds all of it, and at most `most`; else those of a host, where a team holds these. 1 where
// neither is so.
int32_t ranks_of_windows(int32_t host_ranks, int32_t team, int32_t world_size, int32_t most);

// By each rank's source, or -1 where it lets nobody map its memory: why the ranks map none; "" if they may.
std::string why_no_peers(const std::vector<int32_t>& sources);

struct Agreement {
  Machine machine;
  std::string
      difference;  // which rank differs from rank 0 in what, and what follows; "" if none does
  std::string why_serial;  // which rank's kernels run one at a time, and why; "" if none's do
};

// The slowest rank's device, with the kernels that all have: where GPUs differ, all plan for that. Where ranks plan by other
// numbers or sources, or NCCLs differ, nothing may be planned: a machine that nobody measured, on which all ranks run the
// sequence. The link is `own`'s. `all`: by rank, one at least.
Agreement agree(const Machine& own, const std::vector<RankFacts>& all);

}  // namespace overlap::plan
