// The timeline's switch and the rows of CPU calls; CUDA calls keep theirs as events until the
// timeline is stopped.
#include <atomic>
#include <mutex>

#include "binding/trace_switch.h"

#if defined(OVERLAP_WITH_CUDA)
#include "binding/cuda_trace.h"
#endif

namespace overlap::binding {
namespace {

constexpr int64_t kColumns = 5;

std::atomic<bool> tracing{false};
std::mutex rows_mutex;
std::vector<double> rows;
double cpu_calls = 0;

}  // namespace

bool TraceSwitch::on() {
  return tracing;
}

void TraceSwitch::start() {
  tracing = true;
}

void TraceSwitch::add_rows(const std::vector<double>& added) {
  const std::lock_guard<std::mutex> lock(rows_mutex);
  for (size_t i = 0; i < added.size(); ++i)
    rows.push_back(i % kColumns == 0 ? cpu_calls : added[i]);
  cpu_calls += 1;
}

at::Tensor TraceSwitch::stop() {
  TORCH_CHECK(tracing, "trace_stop: no timeline is being recorded; call trace_start first");
  tracing = false;
  std::vector<double> all;
  {
    const std::lock_guard<std::mutex> lock(rows_mutex);
    all.swap(rows);
    cpu_calls = 0;
  }
#if defined(OVERLAP_WITH_CUDA)
  const std::vector<double> cuda_rows = cuda_trace().take();
  all.insert(all.end(), cuda_rows.begin(), cuda_rows.end());
#endif
  const int64_t count = static_cast<int64_t>(all.size()) / kColumns;
  return at::tensor(all, at::kDouble).view({count, kColumns});
}

}  // namespace overlap::binding
