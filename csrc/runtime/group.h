// The state of one process group on one device: communicators, the measured link, staging
// memory, and the watch over what is in flight.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/signal/signal.h"
#include "plan/agreement.h"
#include "plan/plan.h"
#include "runtime/call_history.h"
#include "runtime/communicator.h"
#include "runtime/device_state.h"
#include "runtime/peer_failures.h"
#include "runtime/peers.h"

namespace overlap::runtime {

// In place of a peer in the reports of waits: a kernel of the caller's waited for a chunk to arrive. It stands in
// overlap/signal.cuh and triton.py, too.
inline constexpr int32_t kCallersKernel = 254;
// The same: no wait failed, the host found something.
inline constexpr int32_t kFoundByHost = 253;

// The key of a group's communicators: `maxCTAs` belongs to the communicator, and chunks in flight at
// the same time need one each.
struct CommunicatorKey {
  int max_ctas = 0;
  int lane = 0;
  auto operator<=>(const CommunicatorKey&) const = default;
};

// Chunks take turns on the plan's lanes.
inline int lane_of(const plan::Plan& plan, int chunk) {
  return chunk % plan.resources.lanes;
}

// The communicator that carries a chunk.
inline CommunicatorKey communicator_of(const plan::Plan& plan, int chunk) {
  return {plan.chunks[static_cast<size_t>(chunk)].max_ctas, lane_of(plan, chunk)};
}

struct GroupOptions {
  std::string name;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
  Bootstrap bootstrap;
  std::function<bool()> alive;  // whether the process group still exists
  bool peers = true;            // whether this rank lets others map its memory
  plan::PeerSource peer_source = plan::PeerSource::kAny;
  bool abort_on_failure = false;              // a failure ends the process
  plan::Serial serial = plan::Serial::kNone;  // what makes this rank's kernels run one at a time
  // The profile of the ranks' machine, the same on all of them; null: the shipped one.
  plan::SharedProfile profile;
  // The measured rate of the framework's GEMM on one SM; 0: by the architecture and the profile.
  double sm_gflops = 0.0;
};

// The pinned host memory that a wait kernel and the watchdog share.
class HostReport {
 public:
  HostReport();
  ~HostReport();
  HostReport(const HostReport&) = delete;
  HostReport& operator=(const HostReport&) = delete;
  kernels::WaitReport* get() const { return report_; }
  // A graph's waits may report after the group is gone.
  void leak() { leaked_ = true; }

 private:
  kernels::WaitReport* report_ = nullptr;
  std::atomic<bool> leaked_{false};
};

// Memory from ncclMemAlloc, registered as a window with every communicator that uses it.
class Staging;

class Group {
 public:
  // Collective. Makes the default communicator and measures the link.
  explicit Group(GroupOptions options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  const std::string& name() const { return options_.name; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  bool alive() const { return options_.alive(); }
  DeviceState& device() { return device_; }
  const plan::Machine& machine() const { return machine_; }
  kernels::WaitReport* report() const { return report_.get(); }
  // A wait's parameters with the group's deadline, and where it reports.
  template <typename Params>
  Params with_deadline(Params params) const {
    params.deadline_ns = std::chrono::nanoseconds(options_.timeout).count();
    params.report = report();
    return params;
  }

  // The communicator of this lane with this CTA limit; made at first use, collectively, never
  // inside a capture.
  Communicator& communicator(CommunicatorKey key, bool capturing);

  // Makes the communicators, or maps the memory, that a plan needs, collectively.
  void prepare(const plan::Plan& plan);

  // `bytes` of registered memory for the chunks that these communicators carry. Grows collectively; captured calls use
  // none.
  void* staging(int64_t bytes, const std::vector<CommunicatorKey>& keys);

  // The ranks' memory of each other, with slots of this number of bytes. Grows collectively, never inside a
  // capture.
  Peers& peers(int64_t slot_bytes, bool capturing, int64_t stripe_bytes = 0);
  // The same for a plan, of whose clique's ranks they are.
  Peers& peers(const plan::Plan& plan, int64_t slot_bytes, bool capturing,
               int64_t stripe_bytes = 0);

  // The longest message of any rank's all-to-alls, in bytes, as far as the ranks have told each other: in the
  // first call, the second, the fourth, the eighth and so on. These calls are collective and block; none is inside
  // a capture, which learns and tells nothing.
  int64_t longest_message(int64_t own_bytes, bool capturing);

  // Throws what went wrong, afterwards every call throws it again: what the watchdog found, and what waits and
  // NCCL have reported by now.
  void check();

  // The same, and what peers have told by now, which the watchdog finds within moments. Whoever has synchronised the
  // device misses nothing.
  void check_peers();

  // This rank makes this call; before anything of it is launched.
  void add_call(const plan::Problem& problem) { history_->add(problem); }

  // This rank has begun a call that it will not finish, and says why: an error here, and soon on all ranks.
  void abandon(const std::string& why);

  // Remembers the op, of `chunks` chunks, just enqueued on `stream`, for the watchdog.
  void track(cudaStream_t stream, int chunks);

  // A graph now holds this group's communicators, or its peers' memory, and its report.
  void mark_captured();

  // Looks for passed deadlines, other ranks' failures and NCCL errors. Returns true if the group
  // has failed, here or in a call, and its communicators are still to be aborted. Called by the
  // watchdog. Calls nothing of CUDA's: a driver that waits for a kernel, as when another thread
  // loads code, keeps all who call it, and the way to end the kernel is found here.
  bool watch();

  // Finds out what `watch` is to know of the device: which calls have ended, and what peers tell. Called by a thread of
  // its own.
  void observe();

  // Aborts all communicators of a group that has failed. Frees memory, which waits for all that runs on the device.
  void abort_communicators();

  // Returns true if all tracked ops have ended, or the group has failed and its communicators are aborted.
  bool idle();

  std::vector<int64_t> memory();  // [communicators, bytes registered]; any thread's, beside calls

  // For people: the way by which the ranks map each other's memory, and why not by CUDA IPC; the same on all.
  const std::string& peer_memory() const { return peer_memory_; }

 private:
  struct Pending {
    Event done;
    int64_t call = 0;
    int chunks = 1;
    std::chrono::steady_clock::time_point deadline;
  };

  void measure_link();
  void agree_on_machine();
  bool windows_work();
  void measure_peers();
  void map_peers();
  std::string map_peers_by(const Clique& clique, bool windows);
  std::string map_windows();
  bool has_symmetric_window() const;  // of the staging memory
  float measure_copies();
  float least_of_all(float number);
  void measure_across();
  std::string name_of(int rank) const;
  std::vector<uint8_t> meet(const std::string& key, const std::vector<uint8_t>& brought);
  std::vector<uint8_t> await_key(const std::string& key, int peer);
  void forget(const std::string& key);
  // Until all that is enqueued has ended; throws if that takes longer than a call may, and a minute.
  void await(cudaStream_t stream);
  // Copies from the device, after all that the stream has; as await().
  void bring_back(void* to, const void* from, size_t bytes, cudaStream_t stream);
  // Until `ready()`; throws if the group fails meanwhile, or, after `patience`, that `what` within that time, and `why`.
  void poll(const std::function<bool()>& ready, std::chrono::milliseconds patience,
            std::chrono::microseconds pause, std::chrono::microseconds last_pause,
            const std::string& what, const std::string& why);
  std::unique_ptr<Staging> make_staging(int64_t bytes);
  ncclUniqueId unique_id(CommunicatorKey key);
  // Every rank's bytes, as many from each (rounded up to an even number), in rank order. Collective,
  // and blocks.
  std::vector<uint8_t> all_gather_bytes(const std::vector<uint8_t>& own);
  template <typename Value>
  std::vector<Value> all_gather(const Value& own) {
    return all_gather_values([this](const auto& bytes) { return all_gather_bytes(bytes); }, own);
  }
  std::string id_key(CommunicatorKey key) const;
  Communicator& make_communicator(CommunicatorKey key, const ncclUniqueId& id);
  std::optional<std::string> wait_failure();
  std::optional<std::string> nccl_failure();
  struct Told {
    std::string text;
    bool is_cause = false;  // and not the sign that there is one
  };
  std::optional<Told> told_failure() const;
  std::optional<std::string> sign_of_failure();
  void fail_by_sign(const std::string& sign);
  std::optional<std::string> late_call();
  void forget_ended_calls();
  int chunk_in_flight() const;
  void fail(const std::string& found);

  GroupOptions options_;
  DeviceState& device_;
  plan::Machine machine_;
  HostReport report_;

  std::mutex communicators_mutex_;
  std::map<CommunicatorKey, std::unique_ptr<Communicator>> communicators_;
  std::unique_ptr<Staging> staging_;
  std::vector<std::unique_ptr<Staging>> outgrown_;
  std::atomic<int64_t> staging_bytes_{0};  // of both
  Clique clique_;                          // the ranks on this rank's host
  std::unique_ptr<Peers> peers_;           // null: they do not map each other's memory
  std::string peer_memory_ = "none: one rank";
  std::unique_ptr<PeerFailures> peer_failures_;  // null: the same
  int byte_gathers_ = 0;

  uint64_t message_calls_ = 0;       // of longest_message, except for captures
  int64_t own_longest_message_ = 0;  // not all of it told yet
  int64_t longest_message_ = 0;      // the same on all ranks

  std::unique_ptr<CallHistory> history_;

  std::mutex watch_mutex_;  // guards what follows
  std::deque<std::unique_ptr<Pending>> pending_;
  std::vector<std::unique_ptr<Pending>> idle_;
  std::string error_;
  std::chrono::steady_clock::time_point observed_;  // what had ended by then is not pending
  std::optional<std::chrono::steady_clock::time_point> first_sign_;  // the watchdog's
  bool told_ = false;                                                // the observer's
  std::atomic<bool> failed_{false};
  std::atomic<bool> watched_{false};  // by the watchdog
  std::atomic<bool> aborted_{false};
};

// Keeps `group`, watched, until its process group is gone and its last op has ended. The watchdog's
// thread starts with the first group.
void watch_group(const std::shared_ptr<Group>& group);

}  // namespace overlap::runtime
