// Proofs over the lists of all ranks, several calls in a row: that they come to an end whatever SMs are held meanwhile,
// that nothing is read or written too early, and that the results are what the op says.
//
// Each step is taken apart into what begins and ends in it, with an edge wherever one has to wait for the other: the
// order of a lane, `after`, forks and joins, counters of tiles, flags of peers, slots that are free again, NCCL's
// calls, which begin on all ranks before they end on any. Two accesses to the same bytes, of which one writes, need a
// path between them. Along these edges the memory's contents are followed from inputs to results, as rows and ranks
// in place of numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "steps/list/step.h"

namespace overlap::steps {

// One call of the ranks before a simulation.
struct Turn {
  const plan::Plan* plan = nullptr;
  const std::vector<Variant>* variants = nullptr;  // of each rank
  const std::vector<StepList>* lists = nullptr;    // of each rank
  int32_t stream = 0;                              // of the caller
  int32_t slot = 0;                                // over peers
  bool slots_may_be_busy = false;
  // An example of what each rank's kIndices hold, where lists have some. Races are looked for whatever they hold.
  const std::vector<std::vector<int64_t>>* indices = nullptr;
};

struct Fault {
  enum class Kind : int32_t { kDeadlock, kRace, kProgress, kResult, kDisagreement } kind;
  // Rank and step, what is wrong, what to do.
  std::string what;
};

// The first one that the calls, one after the other on each rank, have; or none. The lists need not be lower's.
std::optional<Fault> find_fault(const std::vector<Turn>& turns, const plan::Machine& machine);

// The slots that calls take in turns, as runtime/peers has it.
class SlotTurns {
 public:
  // `graph`: the number of the CUDA graph that captures the call, or kEager.
  static constexpr int32_t kEager = -1;
  void next(Turn& turn, int32_t graph = kEager);

 private:
  int32_t calls_ = 0;
  bool last_hears_all_ = false;
  int32_t last_graph_ = kEager;
  bool captured_ = false;
};

// The ranks of a call can differ in these, which are all that decides their lists.
struct Ranks {
  plan::Plan plan;
  plan::Machine machine;
  std::vector<Variant> variants;  // of each rank; `captured` is not looked at
};

std::vector<StepList> lower_all(const Ranks& ranks, bool captured);

// A fault of the plan on these ranks, in plain calls in a row or in replays of a CUDA graph. Problems without elements
// have none. `lists` in place of lower's: of plain and of captured calls.
std::optional<Fault> find_fault(const Ranks& ranks);
std::optional<Fault> find_fault(const Ranks& ranks, const std::vector<StepList>& plain,
                                const std::vector<StepList>& captured);

// The fault of plain calls only.
std::optional<Fault> find_fault_in_a_row(const Ranks& ranks, const std::vector<StepList>& lists);

// The same of calls that follow each other, of the same number of ranks.
std::optional<Fault> find_fault(const std::vector<Ranks>& calls);

// The same for a plan by itself: with the kernel on all ranks, on some and on none. `machine`: a Hopper of 132 SMs
// where none is given. Plans for more than kMaxProvedRanks are not looked at.
std::optional<Fault> find_fault(const plan::Plan& plan, const plan::Machine& machine);
plan::Machine usual_machine(const plan::Plan& plan);

// A text of all that the ranks must do alike, whatever their operands: the same on all of them.
std::string communication(const StepList& list);

}  // namespace overlap::steps
