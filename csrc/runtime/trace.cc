#include "runtime/trace.h"

#include <map>
#include <utility>

#include "runtime/error.h"

namespace overlap::runtime {
namespace {

std::vector<double> rows_of(const CallTrace& call, const CallTrace& first) {
  std::vector<double> rows;
  for (size_t chunk = 0; chunk < call.ready.size(); ++chunk) {
    if (!call.communicated[chunk]) continue;
    rows.insert(
        rows.end(),
        {0.0, static_cast<double>(chunk), elapsed_us(call.start, *call.ready[chunk]),
         elapsed_us(call.start, *call.begin[chunk]), elapsed_us(call.start, *call.finish[chunk])});
  }
  rows.insert(rows.end(), {0.0, -1.0, elapsed_us(call.start, call.gemm_end),
                           elapsed_us(first.start, call.start), elapsed_us(call.start, call.end)});
  return rows;
}

}  // namespace

CallTrace::CallTrace(const plan::Problem& called, const std::string& on_group, int on_device,
                     int chunks)
    : problem(called),
      group(on_group),
      device(on_device),
      communicated(static_cast<size_t>(chunks), false) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ready.push_back(std::make_unique<Event>(cudaEventDefault));
    begin.push_back(std::make_unique<Event>(cudaEventDefault));
    finish.push_back(std::make_unique<Event>(cudaEventDefault));
  }
}

std::shared_ptr<CallTrace> Trace::add(const plan::Problem& problem, const std::string& group,
                                      int device, int chunks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_.emplace_back(std::make_shared<CallTrace>(problem, group, device, chunks));
}

void Trace::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.clear();
}

std::vector<Trace::Recorded> Trace::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<std::shared_ptr<CallTrace>> calls = std::exchange(calls_, {});
  std::vector<Recorded> recorded;
  std::map<int, const CallTrace*> firsts;
  for (const std::shared_ptr<CallTrace>& call : calls) {
    if (!call->ended) continue;  // it failed half-way
    check_cuda(cudaEventSynchronize(call->end.get()), "cudaEventSynchronize");
    const CallTrace& first = *firsts.try_emplace(call->device, call.get()).first->second;
    recorded.push_back({call->problem, call->group, call->device, rows_of(*call, first)});
  }
  return recorded;
}

}  // namespace overlap::runtime
