#include "binding/ops/groups.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "binding/ops/environment.h"
#include "plan/templates.h"
#include "planner/planner.h"
#include "steps/price/price.h"

namespace overlap::binding {
namespace {

struct Expectation {
  bool overlaps = false;
  std::optional<double> predicted_us;
  std::optional<double> sequence_us;
  std::string why;  // nothing overlaps, or not as it might
};

std::string in_us(double us) {
  char text[32];
  std::snprintf(text, sizeof text, us < 100.0 ? "%.1f us" : "%.0f us", us);
  return text;
}

// The reason that keeps scaled operands from kernels that signal, as plan::validate and the planner
// have it.
std::string fp8_obstacle(const plan::Problem& problem, const plan::Machine& machine) {
  constexpr int64_t kColumns = 8;
  constexpr int64_t kInner = 16;
  if (!plan::can(plan::newest_kernel(machine), plan::kTakesFp8))
    return "; only Hopper has kernels that signal for scaled operands";
  if (problem.recipe == plan::Recipe::kBlock ||
      plan::output_dtype(problem) != plan::DType::kBFloat16) {
    return "; the kernels that signal take scales of tensors and rows, and make bfloat16";
  }
  if (!problem.fast_accum) return "; the kernels that signal are for use_fast_accum=True";
  if (problem.n % kColumns != 0 || problem.k % kInner != 0) {
    return "; the kernels that signal take multiples of 8 as N and of 16 as K";
  }
  return "";
}

// The reasons that keep this problem, or this machine, from better plans.
std::string obstacles(const plan::Problem& problem, const plan::Machine& machine) {
  constexpr int64_t kKernelMultiple = 8;
  if (machine.arch == 0) return "; gloo moves bytes with the cores that compute";
  std::string text;
  if (plan::is_fp8(problem.dtype)) {
    text += fp8_obstacle(problem, machine);
  } else if (plan::element_bytes(problem.dtype) != 2) {
    text += c10::str("; no kernel that signals takes ", plan::name(problem.dtype));
  } else if (problem.n % kKernelMultiple != 0 || problem.k % kKernelMultiple != 0) {
    text += "; the kernels that signal take multiples of 8 as N and K";
  } else if (machine.kernel_arch == 0) {
    text += "; this build has no kernel that signals for this device";
  }
  if (machine.peer_gbps <= 0.0 && problem.world_size <= plan::kMaxPeers) {
    const std::string& setting = environment().why_no_peers;
    text += "; the ranks do not map each other's memory";
    if (!setting.empty()) text += " (" + setting + ")";
  }
  return text;
}

// Why the planner took the sequence.
std::string why_sequence(const Tally& tally, double sequence_us) {
  if (tally.machine.serial) return "some rank's kernels run one at a time: nothing can overlap";
  std::optional<double> best_us;
  for (const plan::Plan& candidate : planner::candidates(tally.problem, tally.machine)) {
    if (candidate.schedule != plan::Schedule::kOverlapped) continue;
    const double us = steps::predict(candidate, tally.machine).total_us;
    best_us = std::min(us, best_us.value_or(us));
  }
  std::string why;
  if (best_us) {
    why = c10::str("the planner expects too little gain: the sequence ", in_us(sequence_us),
                   ", the best overlapped plan ", in_us(*best_us));
  } else if (plan::is_fp8(tally.problem.dtype)) {
    why = "scaled operands are computed at once, before or after their collective";
    if (tally.machine.arch == 0) return why;
  } else if (tally.machine.arch == 0) {
    return "too little work to cut into chunks";
  } else {
    why = "there is no overlapped plan for this problem";
  }
  return why + obstacles(tally.problem, tally.machine);
}

Expectation expect(const Tally& tally) {
  Expectation expected;
  if (!tally.plan) {
    expected.why = tally.why_unplanned;
    return expected;
  }
  expected.overlaps = tally.plan->schedule == plan::Schedule::kOverlapped;
  const double sequence_us =
      steps::predict(plan::make_sequential(tally.problem, tally.machine), tally.machine).total_us;
  // An all-to-all's rows are not in its problem, and a group without kernels has no machine.
  if (tally.problem.m > 0 && tally.machine.link_gbps > 0.0) {
    expected.predicted_us = steps::predict(*tally.plan, tally.machine).total_us;
    expected.sequence_us = sequence_us;
  }
  if (expected.overlaps) return expected;
  if (tally.problem.invariance != plan::Invariance::kNone && !plan::is_invariant(*tally.plan)) {
    expected.why = "no plan is invariant here: the composition adds gathered terms" +
                   obstacles(tally.problem, tally.machine);
  } else if (!tally.by_planner) {
    expected.why = "set_plan chose it";
  } else if (tally.device != at::kCPU && tally.machine.arch == 0) {
    expected.why = "this build has no kernels for the device, or the group's backend is not nccl";
  } else if (plan::over_peers(*tally.plan)) {
    expected.why =
        "few rows: the collective is one kernel over peers, before or after the GEMM; nothing runs "
        "beside it, but it takes less time than the sequence";
  } else {
    expected.why = why_sequence(tally, sequence_us);
  }
  return expected;
}

std::string number(const std::optional<double>& value) {
  return value ? c10::str(*value) : std::string();
}

}  // namespace

std::vector<c10::Dict<std::string, std::string>> plan_table() {
  std::vector<c10::Dict<std::string, std::string>> rows;
  for (const std::shared_ptr<GroupEntry>& group : all_groups()) {
    // A mesh may keep a group that was destroyed, and another may have its name by now.
    if (!group->registered()) continue;
    for (const std::shared_ptr<const Tally>& tally : group->tallies()) {
      const int64_t calls = tally->calls.load(std::memory_order_relaxed);
      if (calls == 0) continue;  // planned for, and never run
      const plan::Problem& problem = tally->problem;
      const Expectation expected = expect(*tally);
      std::string code;
      if (tally->plan) {
        for (const int64_t item : plan::encode(*tally->plan)) code += c10::str(item, " ");
      }
      c10::Dict<std::string, std::string> row;
      row.insert("group", group->name());
      row.insert("op", plan::name(problem.op));
      row.insert("m", c10::str(problem.m));
      row.insert("n", c10::str(problem.n));
      row.insert("k", c10::str(problem.k));
      row.insert("dtype", plan::types_text(problem));
      row.insert("input_dtype", plan::name(problem.dtype));
      row.insert("recipe", plan::name(problem.recipe));
      row.insert("output_dtype", plan::name(plan::output_dtype(problem)));
      row.insert("invariance", plan::name(problem.invariance));
      row.insert("fast_accum", problem.fast_accum ? "1" : "0");
      row.insert("world_size", c10::str(problem.world_size));
      row.insert("device", c10::DeviceTypeName(tally->device, true));
      row.insert("calls", c10::str(calls));
      row.insert("plan", code);
      row.insert("captured", tally->captured ? "1" : "0");
      row.insert("overlapped", expected.overlaps ? "1" : "0");
      row.insert("predicted_us", number(expected.predicted_us));
      row.insert("sequence_us", number(expected.sequence_us));
      row.insert("why", expected.why);
      rows.push_back(row);
    }
  }
  return rows;
}

void log_plan(const GroupEntry& group, const Tally& tally) {
  const Expectation expected = expect(tally);
  std::string line = c10::str("overlap_torch: group '", group.name(), "', ",
                              c10::DeviceTypeName(tally.device, true), ": ");
  line += tally.plan ? tally.plan->to_string() : tally.problem.to_string() + ": no plan";
  if (tally.captured) line += "; in CUDA graphs";
  if (expected.overlaps && expected.predicted_us && *expected.predicted_us > 0.0) {
    char gain[32];
    std::snprintf(gain, sizeof gain, "%.2fx", *expected.sequence_us / *expected.predicted_us);
    line += c10::str("; predicted ", in_us(*expected.predicted_us), ", the sequence ",
                     in_us(*expected.sequence_us), ": ", gain);
  }
  if (!expected.why.empty()) line += "; not overlapped: " + expected.why;
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace overlap::binding
