#include "runtime/trace.h"

#include "runtime/error.h"

namespace overlap::runtime {

CallTrace::CallTrace(int chunks) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ready.push_back(std::make_unique<Event>(cudaEventDefault));
    begin.push_back(std::make_unique<Event>(cudaEventDefault));
    finish.push_back(std::make_unique<Event>(cudaEventDefault));
  }
}

CallTrace& Trace::add(int chunks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.push_back(std::make_unique<CallTrace>(chunks));
  return *calls_.back();
}

std::vector<double> Trace::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<double> rows;
  for (size_t index = 0; index < calls_.size(); ++index) {
    const CallTrace& call = *calls_[index];
    check_cuda(cudaEventSynchronize(call.end.get()), "cudaEventSynchronize");
    const auto since_start = [&](const Event& event) {
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, call.start.get(), event.get()),
                 "cudaEventElapsedTime");
      return milliseconds * 1e3;
    };
    for (size_t chunk = 0; chunk < call.ready.size(); ++chunk) {
      rows.insert(rows.end(), {static_cast<double>(index), static_cast<double>(chunk),
                               since_start(*call.ready[chunk]), since_start(*call.begin[chunk]),
                               since_start(*call.finish[chunk])});
    }
    rows.insert(rows.end(), {static_cast<double>(index), -1.0, since_start(call.gemm_end), 0.0,
                             since_start(call.end)});
  }
  calls_.clear();
  return rows;
}

}  // namespace overlap::runtime
