// Ranks over peers tell each other about waits that failed. A wait that has failed lets its kernel go on, which
// announces to the peers what is not right: their waits end as if nothing had happened, so they have to be told.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "runtime/device_state.h"

namespace overlap::runtime {

// Words in each rank's memory, one for each peer, which the peer's kernels write before they announce anything that is
// not right. They are read by copies, on a stream of their own that waits for no kernel.
class PeerFailures {
 public:
  struct Failure {
    int rank = 0;  // that told it
    kernels::WaitFailure wait;
  };

  // `own`: kMaxPeers words, by writer; `theirs`: this rank's word in the memory of each other rank, which kernels
  // find in `report`.
  PeerFailures(const uint64_t* own, const std::vector<uint64_t*>& theirs,
               kernels::WaitReport* report);
  ~PeerFailures();
  PeerFailures(const PeerFailures&) = delete;
  PeerFailures& operator=(const PeerFailures&) = delete;

  // The peers' reports, as of the last copy that has ended. Calls no CUDA function.
  std::optional<Failure> known() const;

  // Begins a copy, once the last one has ended, and waits for it, but no longer than this. Right in a capture, too.
  void look(std::chrono::microseconds patience);

  // Tells the peers what `report` says, for kernels that do not: a caller's.
  void tell();

 private:
  const uint64_t* own_;
  std::vector<uint64_t*> theirs_;
  kernels::WaitReport* report_;
  std::timed_mutex mutex_;  // of the stream and its event
  Stream stream_;
  Event copied_;
  uint64_t* words_ = nullptr;  // pinned
};

}  // namespace overlap::runtime
