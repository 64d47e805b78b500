// What the CPU's loops share: a caller's thread that computes beside a thread that communicates,
// counters between the two, and timelines.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "binding/op_call.h"
#include "binding/profiled.h"

namespace overlap::binding {

// The plan of a call on CPU, which is announced to the other ranks.
std::shared_ptr<const PlanEntry> cpu_plan(const OpCall& call);

// One run of a loop over `chunks` chunks.
class CpuLoop {
 protected:
  CpuLoop(const OpCall& call, size_t chunks);
  ~CpuLoop() = default;

  // Runs `compute` on this thread and `communicate` on another one until both have ended, records
  // the timeline and rethrows what either threw.
  void run(const std::function<void()>& compute, const std::function<void()>& communicate);

  // [A] What has been stored for the chunk is seen by whoever waits for this count.
  int32_t signal(int chunk);

  // [A] Until the chunk's count is `expected`; `what` says of what it is a chunk. False if the other
  // thread has failed.
  bool wait(int chunk, int32_t expected, const char* what, std::chrono::milliseconds deadline);

  // Test hook, before a chunk's communication.
  void hold() const;

  bool stopped() const { return stop_; }
  double now_us() const;
  std::chrono::milliseconds timeout() const { return call_.group->timeout(at::kCPU); }

  const OpCall& call_;
  // The timeline: when the chunk was ready, when its communication began and ended.
  std::vector<double> ready_us_;
  std::vector<double> begin_us_;
  std::vector<double> end_us_;

 private:
  void wake();
  void trace(double gemm_us) const;

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<std::atomic<int32_t>> counters_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // between a look at counters or stop_ and the wait for changed_
  std::condition_variable changed_;
};

}  // namespace overlap::binding
