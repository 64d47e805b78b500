#include "runtime/copy_call.h"

#include <array>
#include <bit>
#include <exception>
#include <mutex>

#include "runtime/error.h"

namespace overlap::runtime {

CopyCall::CopyCall(Group& group, cudaStream_t caller, int64_t slot_bytes, int32_t steps,
                   uint64_t hash)
    : group_(group), device_(group.device()), caller_(caller), capture_(capture_id(caller)) {
  const std::lock_guard<std::mutex> lock(device_.mutex);
  device_.check_closed();
  group_.check();
  peers_ = &group_.peers(slot_bytes, capture_.has_value());
  call_ = peers_->next_call(true, capture_, hash);
  try {
    device_.chain(caller_, capture_);
    if (call_.slot_may_be_busy) {
      wait(peers_->wait_for_slots(call_, peers_->everyone_else()), 0, caller_);
    }
    if (steps > 0) peers_->write_numbers(call_, steps, caller_);
  } catch (const std::exception&) {
    peers_->abandon(call_, false, caller_);
    throw;
  }
  device_.open = open_ = true;  // last: a constructor that throws leaves nothing open
}

CopyCall::~CopyCall() {
  abandon();
}

void CopyCall::copy(const std::vector<kernels::CopyRectangle>& rectangles, cudaStream_t on) {
  check_cuda(kernels::copy_rectangles(rectangles, on), "copying rectangles");
}

void CopyCall::fork(cudaStream_t from) {
  device_.fork.record(from);
  for (int number = 0; number < plan::kMaxLanes; ++number) device_.fork.block(lane(number));
  forked_ = (1u << plan::kMaxLanes) - 1;
}

void CopyCall::push(const std::vector<Push>& pushes, int32_t step) {
  told_ = true;
  std::array<uint32_t, kernels::kMaxPeers> used{};  // lanes of each peer's rows
  for (const Push& one : pushes) {
    if (one.rows == 0 || one.row_bytes == 0) continue;
    used[static_cast<size_t>(one.peer)] |= 1u << one.lane % plan::kMaxLanes;
    check_cuda(cudaMemcpy2DAsync(peers_->slot(call_, one.peer) + one.offset,
                                 static_cast<size_t>(one.stride), one.source,
                                 static_cast<size_t>(one.source_stride),
                                 static_cast<size_t>(one.row_bytes), static_cast<size_t>(one.rows),
                                 cudaMemcpyDeviceToDevice, lane(one.lane)),
               "copying a rectangle to a peer");
  }
  const int world_size = group_.world_size();
  for (int distance = 1; distance < world_size; ++distance) {
    const int peer = (group_.rank() + distance) % world_size;
    // One stream announces all steps to a peer, so that its flag only grows.
    const int own = (distance - 1) % plan::kMaxLanes;
    uint32_t others = used[static_cast<size_t>(peer)] & ~(1u << own);
    for (; others != 0; others &= others - 1) {
      const auto other = static_cast<size_t>(std::countr_zero(others));
      device_.join[other].record(lane(static_cast<int32_t>(other)));
      device_.join[other].block(lane(own));
    }
    peers_->signal_by_copy(call_, peer, step, lane(own));
  }
}

void CopyCall::announce(int32_t step) {
  told_ = true;
  peers_->signal(call_, Peers::Flag::kArrived, peers_->everyone_else(), step, caller_);
}

void CopyCall::await(int32_t step, cudaStream_t on) {
  wait(peers_->wait_for(call_, Peers::Flag::kArrived, peers_->everyone_else(), step), step, on);
}

void CopyCall::wait(kernels::PeerWaitParams params, int32_t step, cudaStream_t on) const {
  params.chunk = step;
  check_cuda(kernels::wait_peers_acquire_sys(group_.with_deadline(params), on), "launching a wait");
}

void CopyCall::join() {
  const uint32_t forked = forked_;
  forked_ = 0;
  for (size_t number = 0; number < plan::kMaxLanes; ++number) {
    if ((forked >> number & 1) == 0) continue;
    device_.join[number].record(device_.side[number].get());
    device_.join[number].block(caller_);
  }
}

void CopyCall::end() {
  const std::lock_guard<std::mutex> lock(device_.mutex);
  join();
  peers_->end(call_, caller_);
  device_.chained(caller_, capture_);
  device_.open = open_ = false;
  if (capture_) {
    group_.mark_captured();
  } else {
    group_.track(caller_, 1);
  }
}

void CopyCall::abandon() noexcept {
  const std::lock_guard<std::mutex> lock(device_.mutex);
  if (!open_) return;
  device_.open = open_ = false;
  try {
    join();
    peers_->abandon(call_, told_, caller_);
    device_.chained(caller_, capture_);
  } catch (const std::exception&) {
    // The failure that led here is on its way to the caller.
  }
}

}  // namespace overlap::runtime
