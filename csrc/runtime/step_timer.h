// The events of a call's timeline, put around the steps of its list. The list is the same without them.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "runtime/trace.h"
#include "steps/list/step.h"

namespace overlap::runtime {

class StepTimer {
 public:
  StepTimer(const steps::StepList& list, std::shared_ptr<CallTrace> trace, cudaStream_t caller);

  // How it is found out when a chunk's tiles are finished, or its rows are there.
  enum class Ready {
    kTiles,       // a wait on the observer's stream for what the chunk's lane waits for, too
    kArrival,     // the same for the peers' rows, which a running GEMM waits for itself
    kWithBegin,   // it is communicated as soon as it is computed
    kAtStep,      // when the caller's stream comes to the GEMM of what has arrived
    kBehindGemm,  // it is communicated by the GEMM
  };
  Ready ready_of(int32_t chunk) const { return ready_[static_cast<size_t>(chunk)]; }

  void before(steps::StepId id, cudaStream_t on);
  void after(steps::StepId id, cudaStream_t on);
  // The chunk is ready now, on the observer's stream.
  void observed(int32_t chunk, cudaStream_t observer);
  // Returns true if this step is the last of a chunk whose rows' arrival is observed.
  bool arrives(steps::StepId id, int32_t& chunk) const;
  void end();

 private:
  const steps::StepList& list_;
  const std::shared_ptr<CallTrace> trace_;
  const cudaStream_t caller_;
  std::vector<steps::StepId> first_;  // of each chunk's communication
  std::vector<steps::StepId> last_;
  std::vector<Ready> ready_;
  std::vector<steps::StepId> ready_at_;  // of kAtStep
  steps::StepId last_gemm_ = -1;
  int32_t last_observed_ = -1;
};

}  // namespace overlap::runtime
