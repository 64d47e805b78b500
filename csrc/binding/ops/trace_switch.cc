// The timeline's switch and the rows of CPU calls; CUDA calls keep theirs as events until the
// timeline is stopped.
#include "binding/ops/trace_switch.h"

#include <c10/util/StringUtil.h>

#include <atomic>
#include <mutex>

#if defined(OVERLAP_WITH_CUDA)
#include "binding/cuda/cuda_trace.h"
#endif

namespace overlap::binding {
namespace {

constexpr size_t kColumns = 5;

using Columns = c10::Dict<std::string, std::string>;
using Clock = std::chrono::steady_clock;

std::atomic<bool> tracing{false};
std::mutex mutex;  // of all that follows
Clock::time_point began;
std::vector<double> rows;
std::vector<Columns> calls;

Columns columns_of(const plan::Problem& problem, const std::string& group,
                   const std::string& device) {
  Columns columns;
  columns.insert("group", group);
  columns.insert("device", device);
  columns.insert("op", plan::name(problem.op));
  columns.insert("m", c10::str(problem.m));
  columns.insert("n", c10::str(problem.n));
  columns.insert("k", c10::str(problem.k));
  columns.insert("dtype", plan::types_text(problem));
  columns.insert("world_size", c10::str(problem.world_size));
  return columns;
}

// With mutex held.
void add(std::vector<double> added) {
  for (size_t row = 0; row < added.size(); row += kColumns) {
    added[row] = static_cast<double>(calls.size());
  }
  rows.insert(rows.end(), added.begin(), added.end());
}

}  // namespace

bool TraceSwitch::on() {
  return tracing;
}

void TraceSwitch::start() {
  const std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(!tracing,
              "overlap_torch.trace: a trace is being recorded already; there is one at a time in a "
              "process, so end it first");
  began = Clock::now();
  rows.clear();
  calls.clear();
#if defined(OVERLAP_WITH_CUDA)
  cuda_trace().clear();
#endif
  tracing = true;
}

void TraceSwitch::add_call(const plan::Problem& problem, const std::string& group,
                           Clock::time_point start, std::vector<double> added) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!tracing) return;  // it began before the trace was stopped
  for (size_t row = 0; row < added.size(); row += kColumns) {
    if (added[row + 1] < 0.0) {
      added[row + 3] = std::chrono::duration<double, std::micro>(start - began).count();
    }
  }
  add(std::move(added));
  calls.push_back(columns_of(problem, group, "cpu"));
}

std::tuple<at::Tensor, std::vector<Columns>> TraceSwitch::stop() {
  const std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(tracing, "overlap_torch.trace: no trace is being recorded");
  tracing = false;
#if defined(OVERLAP_WITH_CUDA)
  for (runtime::Trace::Recorded& call : cuda_trace().take()) {
    add(std::move(call.rows));
    calls.push_back(columns_of(call.problem, call.group, c10::str("cuda:", call.device)));
  }
#endif
  const int64_t count = static_cast<int64_t>(rows.size() / kColumns);
  const at::Tensor table =
      at::tensor(rows, at::kDouble).view({count, static_cast<int64_t>(kColumns)});
  return {table, calls};
}

}  // namespace overlap::binding
