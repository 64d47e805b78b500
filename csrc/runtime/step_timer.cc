#include "runtime/step_timer.h"

#include <algorithm>
#include <utility>

namespace overlap::runtime {
namespace {

template <typename What>
bool is(const steps::Step& step) {
  return std::holds_alternative<What>(step.what);
}

}  // namespace

StepTimer::StepTimer(const steps::StepList& list, std::shared_ptr<CallTrace> trace,
                     cudaStream_t caller)
    : list_(list),
      trace_(std::move(trace)),
      caller_(caller),
      first_(trace_->ready.size(), -1),
      last_(first_),
      ready_(first_.size(), Ready::kWithBegin),
      ready_at_(first_.size(), -1) {
  bool awaits = false;
  for (size_t i = 0; i < list_.steps.size(); ++i) {
    const steps::Step& step = list_.steps[i];
    const auto id = static_cast<steps::StepId>(i);
    if (is<steps::Gemm>(step) || is<steps::CallersKernel>(step) || is<steps::LibraryGemm>(step) ||
        is<steps::Pack>(step)) {
      last_gemm_ = id;
    }
    if (const auto* gemm = std::get_if<steps::Gemm>(&step.what)) {
      awaits = awaits || gemm->awaits_chunks;
    }
    if (const auto* wait = std::get_if<steps::WaitForTiles>(&step.what)) {
      const auto counter = static_cast<size_t>(wait->chunk);
      if (counter < ready_.size()) ready_[counter] = Ready::kTiles;
    }
    if (step.communicates < 0) continue;
    const auto chunk = static_cast<size_t>(step.communicates);
    if (first_[chunk] < 0) first_[chunk] = id;
    last_[chunk] = id;
    if (first_[chunk] == id && is<steps::Gemm>(step)) ready_[chunk] = Ready::kBehindGemm;
    if (awaits) ready_[chunk] = Ready::kArrival;
  }
  for (size_t i = 0; i < list_.steps.size(); ++i) {
    const steps::Step& step = list_.steps[i];
    if (step.lane != steps::Lane::kCaller) continue;
    for (size_t chunk = 0; chunk < last_.size(); ++chunk) {
      if (std::find(step.after.begin(), step.after.end(), last_[chunk]) == step.after.end()) {
        continue;
      }
      ready_[chunk] = Ready::kAtStep;
      ready_at_[chunk] = static_cast<steps::StepId>(i);
    }
  }
  for (size_t chunk = 0; chunk < first_.size(); ++chunk) {
    trace_->communicated[chunk] = first_[chunk] >= 0;
  }
  trace_->start.record(caller_);
  if (last_gemm_ < 0) trace_->gemm_end.record(caller_);  // a rank of an all-to-all may have no rows
}

void StepTimer::before(steps::StepId id, cudaStream_t on) {
  for (size_t chunk = 0; chunk < first_.size(); ++chunk) {
    if (ready_at_[chunk] == id) trace_->ready[chunk]->record(caller_);
    if (first_[chunk] != id) continue;
    if (ready_[chunk] == Ready::kWithBegin) trace_->ready[chunk]->record(caller_);
    trace_->begin[chunk]->record(on);
  }
}

void StepTimer::after(steps::StepId id, cudaStream_t on) {
  if (id == last_gemm_) trace_->gemm_end.record(caller_);
  for (size_t chunk = 0; chunk < first_.size(); ++chunk) {
    if (last_[chunk] != id || ready_[chunk] == Ready::kArrival) continue;
    if (ready_[chunk] == Ready::kBehindGemm) trace_->ready[chunk]->record(caller_);
    trace_->finish[chunk]->record(on);
  }
}

void StepTimer::observed(int32_t chunk, cudaStream_t observer) {
  const auto index = static_cast<size_t>(chunk);
  if (ready_[index] == Ready::kArrival) trace_->finish[index]->record(observer);
  trace_->ready[index]->record(observer);
  last_observed_ = chunk;
}

bool StepTimer::arrives(steps::StepId id, int32_t& chunk) const {
  chunk = list_.steps[static_cast<size_t>(id)].communicates;
  return chunk >= 0 && last_[static_cast<size_t>(chunk)] == id &&
         ready_of(chunk) == Ready::kArrival;
}

void StepTimer::end() {
  // The observers read counters and flags, which the next call uses.
  if (last_observed_ >= 0) trace_->ready[static_cast<size_t>(last_observed_)]->block(caller_);
  trace_->end.record(caller_);
  trace_->ended = true;
}

}  // namespace overlap::runtime
