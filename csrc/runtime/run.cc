#include "runtime/run.h"

#include <exception>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/signal/signal.h"
#include "runtime/error.h"
#include "runtime/range.h"
#include "runtime/run_state.h"
#include "runtime/step_timer.h"

namespace overlap::runtime {
namespace {

// One call. Made while the device's mutex is held.
class Run {
 public:
  Run(Group& group, const Call& call) : range_(call.plan->problem), run_(group, call) {}

  // After an exception half-way: the caller's memory is not used again before what was forked ends, and the slot is given
  // back.
  ~Run() {
    if (!forked_ && run_.ended) return;
    try {
      if (forked_) join();
      if (!run_.ended) run_.peers->abandon(run_.peer_call, run_.told, run_.caller);
      run_.device.chained(run_.caller, run_.capture);
    } catch (const std::exception&) {
      // The first one is on its way to the caller.
    }
  }

  void operator()() {
    run_.device.check_closed();
    prepare();
    while (next_ < run_.list.steps.size()) enqueue_next();
    close();
  }

  // The same in two parts, with a kernel of the caller's in between.
  void begin() {
    run_.device.check_closed();
    prepare();
    while (!std::holds_alternative<steps::CallersKernel>(run_.list.steps[next_].what))
      enqueue_next();
    come_to_next();
    name_chunk(-1);
    run_.device.open = true;
    open_ = true;
  }
  void finish() {
    leave();
    go_on();
    while (next_ < run_.list.steps.size()) enqueue_next();
    close();
  }
  void leave() {
    run_.device.open = false;
    open_ = false;
  }
  bool open() const { return open_; }
  void* window() const {
    return run_.list.stripe_bytes > 0 ? run_.base({steps::Buffer::kStripes}) : run_.window;
  }

 private:
  // Everything that can fail or has to be made comes before the first step.
  void prepare() {
    run_.group.check();
    std::vector<CommunicatorKey> keys;
    for (const steps::Communicator& one : run_.list.communicators) {
      keys.push_back({one.max_ctas, one.lane});
      run_.communicators.push_back(&run_.group.communicator(keys.back(), run_.capture.has_value()));
    }
    for (const steps::Scratch& one : run_.list.scratch) {
      if (one.buffer != steps::Buffer::kWindow) continue;
      run_.window = static_cast<char*>(run_.group.staging(one.bytes, keys));
    }
    if (run_.list.over_peers) {
      run_.peers = &run_.group.peers(run_.plan, run_.list.slot_bytes, run_.capture.has_value(),
                                     run_.list.stripe_bytes);
      if (run_.list.takes_slot) {
        run_.peer_call =
            run_.peers->next_call(run_.list.hears_all, run_.capture, run_.list.communication);
        run_.ended = false;
      }
    }
    run_.device.reserve_events(static_cast<size_t>(run_.list.events));
  }

  void time_steps() {
    if (run_.call.trace == nullptr || run_.capture) return;
    timer_.emplace(run_.list,
                   run_.call.trace->add(run_.plan.problem, run_.group.name(), run_.device.device(),
                                        run_.list.chunks),
                   run_.caller);
  }

  // From here on the op comes after the device's last one.
  void chain() {
    run_.device.chain(run_.caller, run_.capture);
    if (run_.list.counters == 0) return;
    if (run_.call.counters != nullptr) {
      run_.counters = run_.call.counters;
      return;
    }
    if (!run_.capture) {
      run_.counters = run_.device.zeroed_counters(run_.list.counters, run_.caller);
      return;
    }
    // Replays would find the device's used.
    run_.counters = run_.call.operands->counters(run_.list.counters);
    check_cuda(kernels::zero_counters(run_.counters, run_.list.counters, run_.caller),
               "zeroing counters");
  }

  // Steps that wait for no peer need not take their turn among the device's ops: the first ones start while the host
  // does the rest.
  size_t first_chained() const {
    size_t first = 0;
    while (first < run_.list.steps.size() && run_.list.steps[first].unchained) ++first;
    return first;
  }
  size_t end_chained() const {
    size_t end = run_.list.steps.size();
    while (end > first_ && run_.list.steps[end - 1].unchained) --end;
    return end;
  }

  void enqueue_next() {
    const steps::Step& step = run_.list.steps[next_];
    try {
      come_to_next();
      std::visit([&](const auto& what) { begin_step(what, run_.stream(step.lane)); }, step.what);
    } catch (const Error&) {
      run_.group.check();  // where the group has failed meanwhile and aborted NCCL, it says why
      throw;
    }
    go_on();
  }

  // All that comes before the next step.
  void come_to_next() {
    if (next_ == first_) chain();
    if (next_ == 0) time_steps();
    const steps::Step& step = run_.list.steps[next_];
    const cudaStream_t on = run_.stream(step.lane);
    name_chunk(step.communicates);
    if (timer_) observe_tiles(step);
    if (step.held && !held_behind(step)) hold(on);
    for (const steps::StepId before : step.after) {
      run_.device.event(run_.list.steps[static_cast<size_t>(before)].event).block(on);
    }
    if (timer_) timer_->before(static_cast<steps::StepId>(next_), on);
  }

  // All that comes after it.
  void go_on() {
    const steps::Step& step = run_.list.steps[next_];
    const cudaStream_t on = run_.stream(step.lane);
    if (step.held && held_behind(step)) hold(on);
    if (timer_) timer_->after(static_cast<steps::StepId>(next_), on);
    if (timer_) observe_arrival(static_cast<steps::StepId>(next_));
    if (step.event >= 0) run_.device.event(step.event).record(on);
    ++next_;
    if (next_ == end_) run_.device.chained(run_.caller, run_.capture);
  }

  static bool held_behind(const steps::Step& step) {
    return std::holds_alternative<steps::Gemm>(step.what);
  }

  void close() {
    run_.ended = true;
    name_chunk(-1);
    if (timer_) timer_->end();
    if (run_.capture) {
      run_.group.mark_captured();
    } else {
      run_.group.track(run_.caller, run_.list.chunks);
    }
  }

  // Names a chunk that is communicated, for profilers and tools that read NVTX.
  void name_chunk(int32_t chunk) {
    if (chunk == named_chunk_) return;
    chunk_range_.reset();
    if (chunk >= 0) chunk_range_.emplace(chunk);
    run_.call.operands->name_chunk(chunk);
    named_chunk_ = chunk;
  }

  // The delay that tests ask for.
  void hold(cudaStream_t on) {
    if (run_.call.delay_us > 0)
      check_cuda(kernels::delay(run_.call.delay_us, on), "launching a delay");
  }

  // Timelines: waits of their own.
  void observe_tiles(const steps::Step& step) {
    const auto* wait = std::get_if<steps::WaitForTiles>(&step.what);
    if (wait == nullptr || wait->chunk >= run_.list.chunks) return;
    const cudaStream_t observer = run_.device.observer.get();
    wait_for_count(run_, wait->chunk, wait->tiles, observer);
    timer_->observed(wait->chunk, observer);
  }
  void observe_arrival(steps::StepId id) {
    int32_t chunk = -1;
    if (!timer_->arrives(id, chunk)) return;
    const cudaStream_t observer = run_.device.observer.get();
    wait_for_peers(run_, run_.arrivals(chunk), chunk, observer);
    timer_->observed(chunk, observer);
  }

  // --- steps: lanes ---

  template <typename Kind>
  void begin_step(const Kind& step, cudaStream_t on) {
    enqueue(run_, step, on);
  }
  void begin_step(const steps::CallersKernel&, cudaStream_t) {}  // between begin() and finish()
  void begin_step(const steps::Fork& step, cudaStream_t) {
    forked_ = true;
    lanes_ = step.side_lanes;
    copies_ = step.copies;
    run_.device.fork.record(run_.caller);
    for (int lane = 0; lane < lanes_; ++lane) run_.device.fork.block(run_.side(lane));
    if (copies_) run_.device.fork.block(run_.device.copy.get());
    if (timer_) run_.device.fork.block(run_.device.observer.get());
  }

  void begin_step(const steps::Join&, cudaStream_t) { join(); }
  void join() {
    forked_ = false;
    for (int lane = 0; lane < lanes_; ++lane) {
      run_.device.join[lane].record(run_.side(lane));
      run_.device.join[lane].block(run_.caller);
    }
    if (copies_) {
      run_.device.copied.record(run_.device.copy.get());
      run_.device.copied.block(run_.caller);
    }
  }

  const Range range_;  // while the host enqueues the call
  RunState run_;
  const size_t first_ = first_chained();
  const size_t end_ = end_chained();
  size_t next_ = 0;    // step
  bool open_ = false;  // between begin() and finish()
  bool forked_ = false;
  int lanes_ = 0;
  bool copies_ = false;
  std::optional<StepTimer> timer_;
  std::optional<Range> chunk_range_;
  int32_t named_chunk_ = -1;
};

}  // namespace

void run(Group& group, const Call& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  Run(group, call)();
}

class OpenCall::State {
 public:
  State(Group& group, const Call& call) : group_(group), call_(call) {}

  Group& group_;
  const Call call_;
  std::optional<Run> run_;
};

OpenCall::OpenCall(Group& group, const Call& call) : state_(std::make_unique<State>(group, call)) {}

OpenCall::~OpenCall() {
  abandon();
}

void OpenCall::begin() {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  try {
    state_->run_.emplace(state_->group_, state_->call_).begin();
  } catch (...) {
    state_->run_.reset();
    throw;
  }
}

void* OpenCall::window() const {
  return state_->run_->window();
}

void OpenCall::finish() {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  try {
    state_->run_->finish();
  } catch (...) {
    state_->run_.reset();
    throw;
  }
  state_->run_.reset();
}

void OpenCall::abandon() noexcept {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  if (!state_->run_) return;
  if (state_->run_->open()) state_->run_->leave();
  state_->run_.reset();  // joins what was forked
}

}  // namespace overlap::runtime
