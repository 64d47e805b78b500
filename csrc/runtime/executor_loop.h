// What the executor's loops share: streams that fork from the caller's and join it again, waits,
// timelines, bookkeeping.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/peer_collective.h"
#include "kernels/signal.h"
#include "plan/planner.h"
#include "runtime/error.h"
#include "runtime/group.h"
#include "runtime/range.h"
#include "runtime/trace.h"

namespace overlap::runtime {

// One run of a loop. Made while the device's mutex is held.
class ExecutorLoop {
 protected:
  ExecutorLoop(Group& group, const plan::Plan& plan, cudaStream_t stream, int64_t delay_us)
      : range_(plan.problem),
        group_(group),
        device_(group.device()),
        plan_(plan),
        stream_(stream),
        delay_us_(delay_us),
        lanes_(plan.resources.lanes),
        element_bytes_(plan::element_bytes(plan.problem.dtype)),
        capture_(capture_id(stream)) {}
  // After an exception half-way: the caller's memory is not used again before what was forked ends.
  ~ExecutorLoop() {
    if (!forked_) return;
    try {
      join();
      device_.chained(stream_, capture_);
    } catch (const std::exception&) {
      // The first one is on its way to the caller.
    }
  }

  // The communicator of each chunk. Everything that can fail or has to be made comes before
  // anything is launched.
  void prepare_communicators() {
    group_.check();
    for (int chunk = 0; chunk < static_cast<int>(plan_.chunks.size()); ++chunk) {
      keys_.push_back(communicator_of(plan_, chunk));
      communicators_.push_back(&group_.communicator(keys_.back(), capture_.has_value()));
    }
  }

  // The group's registered memory for this plan.
  void* window() {
    return group_.staging(plan::buffer_elements(plan_) * element_bytes_, keys_,
                          capture_.has_value());
  }

  // The ranks' memory of each other, in place of communicators. `hears_all`: see Peers::next_call.
  void prepare_peers(int64_t slot_bytes, bool hears_all = true, bool takes_slot = true) {
    group_.check();
    peers_ = &group_.peers(slot_bytes, capture_.has_value());
    if (takes_slot)
      peer_call_ = peers_->next_call(hears_all, capture_, plan::communication_hash(plan_));
  }

  // From here on the op is enqueued.
  void begin(Trace* trace, int chunks) {
    chain();
    watch(trace, chunks);
  }

  // What follows comes after the device's last op.
  void chain() { device_.chain(stream_, capture_); }

  void watch(Trace* trace, int chunks) {
    if (trace != nullptr && !capture_) {
      trace_ = trace->add(plan_.problem, group_.name(), device_.device(), chunks);
    }
    if (trace_ != nullptr) trace_->start.record(stream_);
  }

  void fork(bool copies) {
    copies_ = copies;
    forked_ = true;
    device_.fork.record(stream_);
    for (int lane = 0; lane < lanes_; ++lane) device_.fork.block(device_.side[lane].get());
    if (copies_) device_.fork.block(device_.copy.get());
    if (trace_ != nullptr) device_.fork.block(device_.observer.get());
  }

  // The caller's stream continues after all that was forked from it.
  void join() {
    forked_ = false;
    for (int lane = 0; lane < lanes_; ++lane) {
      device_.join[lane].record(device_.side[lane].get());
      device_.join[lane].block(stream_);
    }
    if (copies_) {
      device_.copied.record(device_.copy.get());
      device_.copied.block(stream_);
    }
  }

  void end(int chunks) {
    if (trace_ != nullptr) {
      trace_->end.record(stream_);
      trace_->ended = true;
    }
    device_.chained(stream_, capture_);
    if (capture_) {
      group_.mark_captured();
    } else {
      group_.track(stream_, chunks);
    }
  }

  // One for each chunk; of a capture in memory that `captured` makes, and zeroed at each replay.
  int32_t* zeroed_counters(const std::function<int32_t*()>& captured, int32_t count) {
    if (!capture_) return device_.zeroed_counters(count, stream_);
    int32_t* const counters = captured();
    check_cuda(kernels::zero_counters(counters, count, stream_), "zeroing counters");
    return counters;
  }

  // Until *counter >= expected, with the group's deadline.
  void enqueue_wait(const int32_t* counter, int32_t expected, int chunk, cudaStream_t stream) {
    kernels::WaitParams wait;
    wait.counter = counter;
    wait.expected = expected;
    wait.deadline_ns = deadline_ns();
    wait.chunk = chunk;
    wait.report = group_.report();
    check_cuda(kernels::wait_counter(wait, stream), "launching a wait");
  }

  kernels::PeerWaitParams with_deadline(kernels::PeerWaitParams wait, int chunk) const {
    wait.deadline_ns = deadline_ns();
    wait.chunk = chunk;
    wait.report = group_.report();
    return wait;
  }

  void enqueue_peer_wait(const kernels::PeerWaitParams& wait, int chunk, cudaStream_t stream) {
    check_cuda(kernels::wait_peers_acquire_sys(with_deadline(wait, chunk), stream),
               "launching a wait");
  }

  // Until each of these peers has signalled this step, with the group's deadline. [B]
  void wait_peers(Peers::Flag flag, uint32_t ranks, int step, int chunk, cudaStream_t stream) {
    enqueue_peer_wait(peers_->wait_for(peer_call_, flag, ranks, step), chunk, stream);
  }

  void signal_peers(Peers::Flag flag, uint32_t ranks, int step, cudaStream_t stream) {
    peers_->signal(peer_call_, flag, ranks, step, stream);
  }

  // The peers have read what the call before left in the slot that this one writes to.
  void wait_for_slots(cudaStream_t stream) {
    if (!peer_call_.slot_may_be_busy) return;
    enqueue_peer_wait(peers_->wait_for_slots(peer_call_, peers_->everyone_else()), 0, stream);
  }

  // Nothing of this call is left to read in this rank's slot.
  void release_slot() { peers_->end(peer_call_, stream_); }

  int64_t deadline_ns() const { return std::chrono::nanoseconds(group_.timeout()).count(); }

  // A collective over peers in one kernel, which ends the call; the caller says what is moved.
  kernels::PeerCollectiveParams collective() const {
    kernels::PeerCollectiveParams params{meeting()};
    params.dtype = plan_.problem.dtype;
    return params;
  }

  kernels::PeerMeeting meeting() const {
    kernels::PeerMeeting params = peers_->meeting(peer_call_);
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    return params;
  }

  // Of a GEMM that stores into peers' memory.
  int32_t spread_ns() const {
    return static_cast<int32_t>(1e3 * plan::store_spread_us(plan_, group_.machine()));
  }

  void copy(void* destination, const void* source, int64_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes),
                               cudaMemcpyDeviceToDevice, stream),
               "copying rows");
  }

  // The delay that tests ask for.
  void hold(cudaStream_t stream) {
    if (delay_us_ > 0) check_cuda(kernels::delay(delay_us_, stream), "launching a delay");
  }
  void hold_side(int chunk) { hold(side(chunk)); }

  // Chunks in flight at the same time are on different streams and communicators.
  cudaStream_t side(int chunk) const { return device_.side[lane_of(plan_, chunk)].get(); }

  const Range range_;  // while the host enqueues the call
  Group& group_;
  DeviceState& device_;
  const plan::Plan& plan_;
  const cudaStream_t stream_;
  const int64_t delay_us_;
  int lanes_;  // side streams that are forked
  const int64_t element_bytes_;
  const std::optional<unsigned long long> capture_;
  std::vector<CommunicatorKey> keys_;
  std::vector<Communicator*> communicators_;
  Peers* peers_ = nullptr;
  Peers::Call peer_call_;
  bool forked_ = false;
  bool copies_ = false;
  std::shared_ptr<CallTrace> trace_;
};

}  // namespace overlap::runtime
