// The state that the op library keeps per process group: its plans, and its CUDA side.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/ops/call_board.h"
#include "binding/ops/recent_map.h"
#include "cpu/collectives.h"
#include "plan/plan.h"
#include "planner/planner.h"
#include "steps/list/step.h"

namespace overlap::runtime {
class Group;
}

namespace overlap::binding {

// How often a problem was called in one way: by a plan, or without one, and why.
struct Tally {
  plan::Problem problem;
  at::DeviceType device = at::kCPU;
  std::optional<plan::Plan> plan;
  plan::Machine machine;      // that the plan is for
  bool by_planner = true;     // not set by the user
  bool captured = false;      // what CUDA graphs run in place of a plan with windows
  std::string why_unplanned;  // where there is no plan
  std::atomic<int64_t> calls{0};
  bool dropped = false;  // from its group's table

  void count() { calls.fetch_add(1, std::memory_order_relaxed); }
};

// A plan's lists of steps on this rank, by what is this rank's own of a call: made once, except for the last few of
// all-to-alls, whose rows change.
class StepLists {
 public:
  std::shared_ptr<const steps::StepList> of(const plan::Plan& plan, int rank,
                                            const plan::Machine& machine,
                                            const steps::Variant& variant);

 private:
  struct Made {
    steps::Variant variant;
    std::shared_ptr<const steps::StepList> list;
  };
  std::mutex mutex_;
  std::vector<Made> made_;
  size_t next_ = 0;  // to be replaced, once there are kMost
};

// A valid plan with its tables, shared by all calls of one problem.
struct PlanEntry {
  PlanEntry(plan::Plan made, bool by_planner);
  plan::Plan plan;
  mutable StepLists lists;
  uint64_t communication_hash = 0;
  bool by_planner = true;                     // not set by the user
  mutable std::atomic<bool> prepared{false};  // capture plans: their communicators exist
  std::shared_ptr<Tally> tally;               // of the calls by this plan

  // For an all-gather of fp8: how its scales travel, which `make` says once.
  const PlanEntry& of_scales(const std::function<plan::Plan()>& make) const;

 private:
  mutable std::once_flag scales_made_;
  mutable std::unique_ptr<const PlanEntry> scales_;
};

// Kept by weak pointer to the ProcessGroup: names come back after a new init_process_group.
class GroupEntry final : public cpu::Group {
 public:
  GroupEntry(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string name);

  c10::intrusive_ptr<c10d::ProcessGroup> lock() const override;
  bool expired() const { return group_.expired(); }
  bool is_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    return group_.lock() == group;
  }
  // True if its name still stands for it: not after destroy_process_group, even if somebody holds
  // it.
  bool registered() const;
  const std::string& name() const override { return name_; }
  int rank() const override { return rank_; }
  int world_size() const { return world_size_; }

  // The group's backend for this kind of device: "gloo", "nccl", "fake" or another's. A group that is a Python class has
  // no backends, and is named as a whole.
  std::string backend(at::DeviceType device) const;
  // Plans run on gloo for the CPU and on nccl for CUDA. All other backends take the compositions, and so does
  // OVERLAP_PLANS=0. Returns the reason, or "".
  std::string why_no_plans(at::DeviceType device);
  bool runs_plans(at::DeviceType device) { return why_no_plans(device).empty(); }

  // The group's timeout on this kind of device, or OVERLAP_TIMEOUT_S.
  std::chrono::milliseconds timeout(at::DeviceType device) const override;

  // The plan table: what set_plan put there, else what the planner makes, once as long as the problem is among those
  // called last. Serving calls with every M, and a plan with its lists takes 1 to 20 kB. A plan made again is equal.
  std::shared_ptr<const PlanEntry> plan(const plan::Problem& problem, at::DeviceType device,
                                        const plan::Machine& machine);

  // A CUDA graph runs this in place of a planner's plan with windows: a graph may be replayed
  // beside eager calls and other graphs, so it cannot share their registered memory. It has
  // ordinary memory, and is planned for it.
  std::shared_ptr<const PlanEntry> capture_plan(const plan::Problem& problem,
                                                plan::Machine machine);
  void set_plan(const plan::Plan& plan, at::DeviceType device, bool by_planner,
                const plan::Machine& machine);
  // The planner's plan for it, whatever was set.
  plan::Plan planned(const plan::Problem& problem, at::DeviceType device,
                     const plan::Machine& machine);
  void clear_plans();
  // Problems that it holds a plan for.
  int64_t plan_count();

  // A call that runs without a plan, and why.
  void count_unplanned(const plan::Problem& problem, at::DeviceType device, const std::string& why);

  // In the order in which they were first called or planned; they outlive the plans, and are bounded, too: of those whose
  // plan is gone the oldest go.
  std::vector<std::shared_ptr<const Tally>> tallies();

  // Held while a call on CPU compares and communicates: gloo pairs messages by their order, and so threads that call
  // on one group take turns. Other ranks may see another order, which the comparison finds.
  std::unique_lock<std::recursive_mutex> turn_on_cpu() {
    return std::unique_lock<std::recursive_mutex>(cpu_mutex_);
  }

  // A call on CPU begins, and its comparison with what the other ranks call, which comes before the first
  // thing that is communicated. See CallBoard.
  [[gnu::visibility("default")]] void announce(const std::string& problem, uint64_t plan,
                                               const RowCounts& rows = {});
  void agree() const override;
  [[noreturn]] void fail(const std::string& message) const override;

  // Compares `text` between the ranks over the store; throws on every rank if it differs
  // (OVERLAP_DEBUG=1).
  void compare(const std::string& what, const std::string& text, at::DeviceType device);

  // Checks that each rank sends as many rows as the other expects of it; throws on every rank if not
  // (OVERLAP_DEBUG=1).
  void compare_counts(at::IntArrayRef send_rows, at::IntArrayRef recv_rows, at::DeviceType device);

  // The CUDA side on each device (binding/cuda/cuda_call_cuda.cc makes it); weak, the watchdog owns it.
  std::map<int, std::weak_ptr<runtime::Group>> cuda;
  std::mutex cuda_mutex;

 private:
  // device, op, m, n, k, dtype, recipe, output dtype, fast accumulation
  using Key = std::tuple<int, int, int64_t, int64_t, int64_t, int, int, int, bool, int>;
  // Ranks can be compared over the store. The ranks of PyTorch's fake group are not there.
  bool has_peers(at::DeviceType device) const;
  // Each rank's text, over the store. All ranks call it.
  std::vector<std::string> texts_of_ranks(const std::string& own, at::DeviceType device);
  static Key key(const plan::Problem& problem, at::DeviceType device);

  // Both with plans_mutex_ held.
  std::shared_ptr<const PlanEntry> make_entry(plan::Plan plan, at::DeviceType device,
                                              bool by_planner, const plan::Machine& machine,
                                              bool captured);
  std::shared_ptr<Tally> tally(const plan::Problem& problem, at::DeviceType device,
                               const std::string& way, const std::function<void(Tally&)>& describe);
  void drop_old_tallies();
  plan::Plan make_plan(const plan::Problem& problem, at::DeviceType device,
                       const plan::Machine& machine);

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  int rank_ = 0;
  int world_size_ = 1;
  std::array<std::atomic<int>, 2> runs_plans_{-1, -1};  // on CPU, on CUDA; -1: not asked yet
  std::mutex plans_mutex_;
  static constexpr size_t kPlans = 2048;
  static constexpr size_t kTallies = 8192;
  std::map<Key, std::shared_ptr<const PlanEntry>> set_plans_;
  RecentMap<Key, std::shared_ptr<const PlanEntry>, kPlans> plans_;  // the planner's
  RecentMap<Key, std::shared_ptr<const PlanEntry>, kPlans> capture_plans_;
  // The families that were best at the M that are planned whole, with windows and without.
  using Families = std::shared_ptr<const std::vector<planner::Family>>;
  RecentMap<std::pair<Key, bool>, Families, kPlans> families_;
  using Way = std::pair<Key, std::string>;
  std::map<Way, std::shared_ptr<Tally>> tally_by_way_;
  std::vector<std::shared_ptr<Tally>> tallies_;
  std::recursive_mutex cpu_mutex_;
  std::unique_ptr<CallBoard> board_;  // with cpu_mutex_ held
  std::atomic<int64_t> compared_{0};
};

// The entry of the process group that has this name now. Throws if there is none.
[[gnu::visibility("default")]] std::shared_ptr<GroupEntry> find_group(const std::string& name);

// All groups that have entries and still exist.
std::vector<std::shared_ptr<GroupEntry>> all_groups();

// A machine model for the CPU: one library kernel, gloo.
const plan::Machine& cpu_machine();

plan::DType to_plan_dtype(at::ScalarType dtype);
bool has_plan_dtype(at::ScalarType dtype);  // of operands without scales
bool is_fp8(at::ScalarType dtype);          // of operands with scales

// One row for each group, problem and way in which it ran, in the order of their first calls; by column:
// group, op, m, n, k, dtype (for people), input_dtype, recipe, output_dtype and fast_accum (0 or 1) as a
// problem has them, world_size, device, calls, plan (encoded; "" without one), captured and overlapped (0
// or 1), predicted_us and sequence_us ("" where nothing is expected), why.
std::vector<c10::Dict<std::string, std::string>> plan_table();

// OVERLAP_LOG=plans: one line on stderr.
void log_plan(const GroupEntry& group, const Tally& tally);

// OVERLAP_DEBUG=1
bool debug_enabled();

}  // namespace overlap::binding
