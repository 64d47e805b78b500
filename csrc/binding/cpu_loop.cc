#include "binding/cpu_loop.h"

#include <ATen/ThreadLocalState.h>

#include <exception>
#include <thread>

#include "binding/environment.h"

namespace overlap::binding {

std::shared_ptr<const PlanEntry> cpu_plan(const OpCall& call) {
  auto entry = call.group->plan(call.problem, at::kCPU, cpu_machine());
  if (debug_enabled()) call.group->compare("plan", entry->plan.to_string(), at::kCPU);
  call.group->announce(call.description(), entry->communication_hash);
  entry->tally->count();
  return entry;
}

CpuLoop::CpuLoop(const OpCall& call, size_t chunks)
    : call_(call), ready_us_(chunks), begin_us_(chunks), end_us_(chunks), counters_(chunks) {}

double CpuLoop::now_us() const {
  const auto passed = std::chrono::steady_clock::now() - start_;
  return std::chrono::duration<double, std::micro>(passed).count();
}

void CpuLoop::run(const std::function<void()>& compute, const std::function<void()>& communicate) {
  const at::ThreadLocalState state;
  const auto guarded = [this](const std::function<void()>& work) -> std::exception_ptr {
    try {
      work();
    } catch (...) {
      stop_ = true;
      wake();
      return std::current_exception();
    }
    return nullptr;
  };
  std::exception_ptr communication_error;
  std::thread communication([&] {
    const at::ThreadLocalStateGuard guard(state);
    communication_error = guarded(communicate);
  });
  const std::exception_ptr compute_error = guarded(compute);
  const double gemm_us = now_us();
  communication.join();
  if (compute_error) std::rethrow_exception(compute_error);
  if (communication_error) std::rethrow_exception(communication_error);
  if (TraceSwitch::on()) trace(gemm_us);
}

int32_t CpuLoop::signal(int chunk) {
  const int32_t count = counters_[chunk].fetch_add(1, std::memory_order_release) + 1;
  wake();
  return count;
}

void CpuLoop::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }
  changed_.notify_all();
}

bool CpuLoop::wait(int chunk, int32_t expected, const char* what,
                   std::chrono::milliseconds deadline) {
  const auto reached = [&] { return counters_[chunk].load(std::memory_order_acquire) >= expected; };
  std::unique_lock<std::mutex> lock(mutex_);
  const bool ended = changed_.wait_for(lock, deadline, [&] { return reached() || stop_; });
  if (!ended) {
    communication_failed(c10::str("overlap_torch: group '", call_.group->name(), "', rank ",
                                  call_.group->rank(), ": the wait for chunk ", chunk, " of ", what,
                                  " passed its deadline of ", deadline.count() / 1000.0,
                                  " s: expected a count of ", expected, ", saw ",
                                  counters_[chunk].load()));
  }
  return reached();
}

void CpuLoop::hold() const {
  if (side_delay_us() > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(side_delay_us()));
  }
}

void CpuLoop::trace(double gemm_us) const {
  std::vector<double> rows;
  for (size_t chunk = 0; chunk < ready_us_.size(); ++chunk) {
    rows.insert(rows.end(), {0.0, static_cast<double>(chunk), ready_us_[chunk], begin_us_[chunk],
                             end_us_[chunk]});
  }
  rows.insert(rows.end(), {0.0, -1.0, gemm_us, 0.0, now_us()});
  TraceSwitch::add_call(call_.problem, call_.group->name(), start_, std::move(rows));
}

}  // namespace overlap::binding
