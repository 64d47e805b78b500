// The state of a walk over a list of steps that prices them, and the cost of each kind of step: price.cc walks.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <variant>
#include <vector>

#include "plan/plan.h"
#include "steps/list/list.h"
#include "steps/price/costs.h"
#include "steps/price/price.h"

namespace overlap::steps {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr StepId kNone = -1;

// A lane, and its NCCL call, if one is under way.
struct LaneState {
  StepId next = kNone;
  StepId last = kNone;
  double free_us = 0.0;
  bool calls = false;
  double flows_at_us = 0.0;  // the start is over, bytes flow
  double bytes = 0.0;
  double most = 0.0;     // bytes per us that its CTAs carry
  double sent_us = 0.0;  // what a program's last transfers to other ranks took
};

// The call that is priced, and how far its lanes have come.
struct Walk {
  const StepList& list;
  const plan::Plan& plan;
  const int32_t rank;
  const plan::Machine& machine;
  const double callers_us;  // what a caller's kernel takes by itself on all SMs

  const plan::Problem& problem = plan.problem;
  const plan::Profile& profile = *machine.profile;
  const int32_t ranks = problem.world_size;
  const int32_t sms = machine.sm_count;
  const bool cpu = on_cpu(machine);
  const double fast_share = fast_link_share(machine);
  const bool program = plan::has_program(plan);
  const bool peers = plan::over_peers(plan) && !program;
  const bool hierarchical = plan::hierarchical(plan);
  const bool gathers = problem.traits().gathers();
  const bool all_to_all = problem.traits().rows_by_rank;
  const double tile_us = steps::tile_us(plan, machine);
  const double wait_us = cpu ? profile.cpu.wait_us : profile.sync.wait_us;
  const double fork_join_us = cpu ? profile.cpu.fork_join_us : profile.sync.fork_join_us;
  const double element = static_cast<double>(plan::moved_bytes(problem));
  const double row_bytes = static_cast<double>(problem.n) * element;

  Price price = {};
  std::array<LaneState, static_cast<size_t>(Lane::kCopy) + 1> lanes = {};
  std::vector<StepId> next_of_lane = {};
  std::vector<double> arrived_us = {};  // chunk by chunk, over peers
  // When a caller's kernel is told of its rows, by counter.
  std::map<int32_t, double> brought_us = {};
  int32_t lanes_beside = 0;
  bool awaits = false;      // one launch awaits an all-gather's chunks
  double all_bytes = 0.0;   // those of all NCCL calls
  double counted_us = 0.0;  // the end of a GEMM that counts
  double callers_end_us = 0.0;
  double callers_tile_us = 0.0;  // one tile of a round
  // A chunk on its way: the framework's GEMMs of its parts, which count as one, or the copies of its rows to peers.
  int64_t chunk_tiles = 0;
  double chunk_begin_us = 0.0;
  double chunk_us = 0.0;
  double chunk_bytes = 0.0;
  std::map<int32_t, double> counters_us = {};  // a program's, beside the GEMM's
  double now_us = 0.0;                         // NCCL's calls are known until then

  // Chunks travel one by one on CPU, except in programs.
  size_t lane_of(const Step& step) const {
    const bool side = step.lane != Lane::kCaller && step.lane != Lane::kCopy;
    return static_cast<size_t>(cpu && side && !program ? Lane::kSide0 : step.lane);
  }
  // The end of the steps of other lanes that this one comes after.
  double after_us(size_t id) const {
    double us = 0.0;
    for (const StepId other : list.steps[id].after) {
      us = std::max(us, price.steps[at(other)].end_us);
    }
    return us;
  }
  // When a counter has reached its target.
  double counter_us(int32_t counter) const {
    if (at(counter) < price.computed_us.size()) return price.computed_us[at(counter)];
    const auto found = counters_us.find(counter);
    return found == counters_us.end() ? kNever : found->second;
  }
  bool is_remote(const Where& where) const {
    return where.buffer == Buffer::kSlot && where.index != rank;
  }
  // The bytes of all ranks' parts.
  double bytes_of(const Collective& call) const {
    return static_cast<double>(call.count) * plan::op_row_parts(problem) * element;
  }
  double bytes_of(const std::vector<Message>& messages) const {
    double bytes = 0.0;
    for (const Message& one : messages)
      bytes += one.peer == rank ? 0.0 : static_cast<double>(one.bytes);
    return bytes;
  }
  // The bytes that a chunk's communication leaves for a step that puts them in place.
  double chunk_bytes_after(size_t id) const {
    const Step& call = list.steps[at(list.steps[id].after[0])];
    return static_cast<double>(std::get<Collective>(call.what).count) * element;
  }
  // A step that puts a chunk in place hides beside the next chunk's communication; one that copies an all-gather's rows
  // hides beside their GEMM.
  bool hides(size_t id) const {
    return list.steps[id].lane == Lane::kCopy && (gathers || next_of_lane[id] != kNone);
  }
  double communicated(double us) {
    price.expected.communication_us += us;
    return us;
  }
  double computed(double us) {
    price.expected.gemm_us += us;
    return us;
  }
  int64_t ctas_of(int32_t max_ctas) const {
    if (max_ctas != 0) return max_ctas;
    return std::llround(between_links(static_cast<double>(profile.link.slow_default_ctas),
                                      static_cast<double>(profile.link.default_ctas), fast_share));
  }
  double finish_us(double bytes) const {
    return cpu ? bytes / (1e3 * profile.cpu.copy_gbps)
               : profile.local.finish_start_us + bytes / (1e3 * profile.local.finish_gbps);
  }
  double local_us(double bytes) const { return bytes / (1e3 * profile.local.read_write_gbps); }
  double slots_us(double bytes) const { return bytes / (1e3 * profile.local.slot_gbps); }
  double sent_us(double bytes) const {
    const bool within = plan.clique > 0 && machine.clique_gbps > 0.0;
    return bytes / (1e3 * (within ? machine.clique_gbps : machine.peer_gbps));
  }
  double flag_us() const { return profile.peer.sequential_us / 2.0; }
};

// The rate of the collective's bytes, relative to that of an all-reduce's.
double one_way_rate(const Walk& w);

// The cost of the plan's NCCL calls on this machine's link.
plan::Profile::Call call_model(const Walk& w);

// The cost of each kind of step: when it ends, or kNever if that is not known yet. It could begin at begin_us, which the
// cost may put off.
#define OVERLAP_END_OF(Kind) double end_of(const Kind& step, Walk& w, size_t id, double& begin_us);
OVERLAP_STEP_KINDS(OVERLAP_END_OF, OVERLAP_END_OF)
#undef OVERLAP_END_OF

}  // namespace overlap::steps
