// A call whose data travel only by copy engines, beside kernels that the framework launches on the caller's stream, or by
// kernels on that stream, which push() and its lanes have no part in.
//
//   caller | slots free | rows that stay | wait 0 | kernel 0 | ... | wait | results | end
//   lanes               | push 0, flag | push 1, flag | ... ^ push result 0, flag | ...
//
// No kernel of this package runs beside the framework's, which may fill all SMs for milliseconds: flags, too, are copied.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/chunk/rectangles.h"
#include "runtime/group.h"

namespace overlap::runtime {

// Rows that go to a place in a peer's slot.
struct Push {
  const char* source = nullptr;
  int64_t source_stride = 0;
  int32_t peer = 0;
  int64_t offset = 0;  // in the peer's slot
  int64_t stride = 0;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int32_t lane = 0;  // the stream that carries it, from 0 on
};

class CopyCall {
 public:
  // Begins the call after the device's last op; until it ends, no other op may begin on the device. Every rank makes the
  // same calls with the same hash. At most `steps` steps are pushed, 0 if kernels announce all. Collective where the slots
  // grow.
  CopyCall(Group& group, cudaStream_t caller, int64_t slot_bytes, int32_t steps, uint64_t hash);
  ~CopyCall();  // as abandon(), where the call was not ended
  CopyCall(const CopyCall&) = delete;
  CopyCall& operator=(const CopyCall&) = delete;

  // This rank's slot, which peers write until the call has ended.
  char* slot() const { return slot(group_.rank()); }
  // A peer's, which this rank's kernels write before they announce a step.
  char* slot(int rank) const { return peers_->slot(call_, rank); }
  // The bytes that every rank's slot has, at least those that the call was made with.
  int64_t room() const { return peers_->slot_bytes(); }

  // Enqueues copies within this rank's memory.
  void copy(const std::vector<kernels::CopyRectangle>& rectangles, cudaStream_t on);

  // The work of this stream so far comes before what is pushed from here on.
  void fork(cudaStream_t from);

  // Enqueues the pushes of a step, and after them its announcement to all peers. Steps grow.
  void push(const std::vector<Push>& pushes, int32_t step);

  // Announces a step to all peers, after what the caller's stream did so far.
  void announce(int32_t step);

  // This stream waits for all peers' step, or until the deadline, with a report.
  void await(int32_t step, cudaStream_t on);
  void await(int32_t step) { await(step, caller_); }

  // The caller's stream continues after all pushes, and peers may use the slot again.
  void end();

  // Instead of end(), after a failure: joins what was forked, and gives the slot back.
  void abandon() noexcept;

 private:
  cudaStream_t lane(int32_t number) const {
    return device_.side[static_cast<size_t>(number % plan::kMaxLanes)].get();
  }
  void join();
  void wait(kernels::PeerWaitParams params, int32_t step, cudaStream_t on) const;

  Group& group_;
  DeviceState& device_;
  const cudaStream_t caller_;
  const std::optional<unsigned long long> capture_;
  Peers* peers_ = nullptr;
  Peers::Call call_;
  uint32_t forked_ = 0;  // lanes
  bool open_ = false;
  bool told_ = false;  // peers, of a step
};

}  // namespace overlap::runtime
