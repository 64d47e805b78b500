// Programs on CPU: the same steps as on GPUs. Lanes are threads, a step that others come behind is a flag, tiles are counted
// as they are stored, and messages are gloo's, whose receives are posted before anything of the same step is sent.
//
//   caller | tile 0 | tile 1 | ... count [A] ...............................| join | result
//   side   | wait 0 [A] | send and receive | wait 1 [A] | add what was received | ...
#include "binding/program_cpu.h"

#include <ATen/ThreadLocalState.h>

#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "binding/collectives.h"
#include "binding/environment.h"
#include "binding/profiled.h"

namespace overlap::binding {
namespace {

using steps::Buffer;
using steps::Lane;
using steps::StepId;
using steps::Where;

class ProgramRun {
 public:
  ProgramRun(const OpCall& call, const PlanEntry& entry, std::vector<at::Tensor> outputs,
             const at::Tensor& gathered)
      : call_(call),
        plan_(entry.plan),
        list_(entry.lists.of(plan_, call.group->rank(), cpu_machine(), variant())),
        input_(call.input.contiguous()),
        outputs_(std::move(outputs)),
        gathered_(gathered),
        done_(list_->steps.size(), false),
        counters_(static_cast<size_t>(list_->counters), 0),
        ready_us_(static_cast<size_t>(list_->chunks)),
        begin_us_(static_cast<size_t>(list_->chunks)),
        end_us_(static_cast<size_t>(list_->chunks)) {
    for (const steps::Scratch& one : list_->scratch) {
      scratch_[one.buffer] = at::empty({one.bytes / element_bytes()}, input_.options());
    }
    for (const at::Tensor& weight : call.weights) transposed_.push_back(weight.t());
  }

  void operator()() {
    guarded([this] { walk(Lane::kCaller); });
    join();
    if (error_) std::rethrow_exception(error_);
    if (TraceSwitch::on()) trace();
  }

 private:
  steps::Variant variant() const {
    steps::Variant own;
    own.kernel_takes = steps::takes_by_default(plan_);
    own.bias = call_.problem.op != plan::Op::kAllGatherGemm &&
               call_.problem.op != plan::Op::kGemmAllToAll && call_.bias().has_value();
    if (call_.problem.op == plan::Op::kAllGatherGemm) {
      for (const at::Tensor& weight : call_.weights) own.weights.push_back({weight.size(0), false});
    }
    own.send_rows = call_.send_rows;
    own.receive_rows = call_.recv_rows;
    return own;
  }

  // --- lanes ---

  void walk(Lane lane) {
    for (size_t i = 0; i < list_->steps.size(); ++i) {
      const steps::Step& step = list_->steps[i];
      if (step.lane != lane) continue;
      for (const StepId before : step.after) {
        if (!wait([&] { return done_[static_cast<size_t>(before)]; }, "an earlier step")) return;
      }
      std::visit([&](const auto& what) { take(what, step); }, step.what);
      if (stopped()) return;
      change([&] { done_[i] = true; });
    }
  }

  // The first exception of any thread stops all.
  template <typename Work>
  void guarded(const Work& work) {
    try {
      work();
    } catch (...) {
      change([&] {
        if (!error_) error_ = std::current_exception();
      });
    }
  }

  template <typename Change>
  void change(const Change& how) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      how();
    }
    changed_.notify_all();
  }

  bool stopped() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_ != nullptr;
  }

  // [A] Until it is so; false if a thread has failed. What communicates has its own deadline, so that this one, which is
  // longer, only keeps a wait from lasting for ever.
  template <typename Reached>
  bool wait(const Reached& reached, const char* what) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto deadline = timeout() * static_cast<int64_t>(list_->steps.size() + 2);
    if (!changed_.wait_for(lock, deadline, [&] { return reached() || error_ != nullptr; })) {
      communication_failed(c10::str("overlap_torch: group '", call_.group->name(), "', rank ",
                                    call_.group->rank(), ": the wait for ", what,
                                    " of a program passed its deadline of ",
                                    deadline.count() / 1000.0, " s"));
    }
    return error_ == nullptr;
  }

  std::chrono::milliseconds timeout() const { return call_.group->timeout(at::kCPU); }
  double now_us() const {
    const auto passed = std::chrono::steady_clock::now() - start_;
    return std::chrono::duration<double, std::micro>(passed).count();
  }

  void take(const steps::Fork& step, const steps::Step&) {
    call_.group->agree();  // before the first message, also where this rank has none
    const at::ThreadLocalState state;
    for (int32_t lane = 0; lane < step.side_lanes; ++lane) {
      threads_.emplace_back([this, lane, state] {
        const at::ThreadLocalStateGuard guard(state);
        guarded([&] { walk(steps::side_lane(lane)); });
      });
    }
  }

  void take(const steps::Join&, const steps::Step&) {
    gemm_us_ = now_us();
    join();
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // --- where things are ---

  int64_t element_bytes() const { return plan::element_bytes(plan_.problem.dtype); }

  const at::Tensor& memory(const Where& where) const {
    switch (where.buffer) {
      case Buffer::kInput:
        return input_;
      case Buffer::kOutput:
        return outputs_[static_cast<size_t>(where.index)];
      case Buffer::kGathered:
        return gathered_;
      default:
        return scratch_.at(where.buffer);
    }
  }

  // Rows of so many columns, as far apart as the stride says, in elements.
  at::Tensor at_place(const Where& where, int64_t rows, int64_t columns, int64_t stride) const {
    const at::Tensor& all = memory(where);
    return all.as_strided({rows, columns}, {stride, 1},
                          all.storage_offset() + where.offset / element_bytes());
  }
  at::Tensor at_place(const Where& where, int64_t rows, int64_t columns) const {
    return at_place(where, rows, columns, columns);
  }

  // --- steps ---

  void take(const steps::Gemm& step, const steps::Step&) {
    const plan::TileOrder& order = list_->orders[static_cast<size_t>(step.order)];
    const int64_t columns = plan_.problem.n;
    const at::Tensor product = at_place(step.outputs[0].where, plan_.problem.m, columns);
    for (int32_t tile = step.first_tile; tile < step.end_tile && !stopped(); ++tile) {
      const plan::TileCoord coord = plan::tile_coord(order, tile);
      const int64_t row = int64_t{coord.row} * plan_.tile_m;
      const int64_t rows = std::min<int64_t>(plan_.tile_m, plan_.problem.m - row);
      const int64_t column = int64_t{coord.column} * plan_.tile_n;
      const int64_t width = std::min<int64_t>(plan_.tile_n, columns - column);
      if (rows > 0) {  // not beyond the product, where clusters are rounded up
        at::Tensor place = product.narrow(0, row, rows).narrow(1, column, width);
        at::mm_out(place, input_.narrow(0, row, rows), transposed_[0].narrow(1, column, width));
      }
      const auto chunk = static_cast<size_t>(plan::tile_chunk(order, tile));
      change([&] { ++counters_[chunk]; });
    }
  }

  void take(const steps::LibraryGemm& step, const steps::Step&) {
    const auto weight = static_cast<size_t>(step.weight);
    const int64_t rows = step.rows.end - step.rows.begin;
    const int64_t columns = call_.weights[weight].size(0);
    if (rows == 0 || columns == 0) return;
    at::Tensor output = at_place(step.output.where, rows, columns);
    const at::Tensor input = at_place(step.input, rows, call_.input.size(1));
    const bool bias =
        plan_.problem.op == plan::Op::kAllGatherGemm || plan_.problem.op == plan::Op::kGemmAllToAll;
    if (bias && call_.biases[weight].has_value()) {
      at::addmm_out(output, *call_.biases[weight], input, transposed_[weight]);
    } else {
      at::mm_out(output, input, transposed_[weight]);
    }
  }

  void take(const steps::WaitForTiles& step, const steps::Step&) {
    const auto chunk = static_cast<size_t>(step.chunk);
    if (wait([&] { return counters_[chunk] >= step.tiles; }, "tiles")) ready_us_[chunk] = now_us();
  }

  void take(const steps::SendReceive& step, const steps::Step& of) {
    const auto chunk = static_cast<size_t>(of.communicates);
    if (side_delay_us() > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(side_delay_us()));
    }
    const Profiled profiled(of.communicates);
    begin_us_[chunk] = now_us();
    std::vector<Receive> arriving;
    arriving.reserve(step.receives.size());
    for (const steps::Message& one : step.receives) {
      arriving.emplace_back(*call_.group, message(one), one.peer, step.lane);
    }
    for (const steps::Message& one : step.sends) {
      send(*call_.group, message(one), one.peer, step.lane);
    }
    for (Receive& one : arriving) one.wait();
    end_us_[chunk] = now_us();
  }
  at::Tensor message(const steps::Message& one) const {
    return at_place(one.where, 1, one.bytes / element_bytes()).view(-1);
  }

  void take(const steps::Copy& step, const steps::Step&) {
    const int64_t count = step.bytes / element_bytes();
    at_place(step.destination, 1, count).copy_(at_place(step.source, 1, count));
  }

  void take(const steps::CopyRows& step, const steps::Step&) {
    const int64_t element = element_bytes();
    at::Tensor to = at_place(step.destination, step.rows, step.row_bytes / element,
                             step.destination_stride / element);
    const at::Tensor from =
        at_place(step.source, step.rows, step.row_bytes / element, step.source_stride / element);
    if (step.adds) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }

  void take(const steps::AddBias& step, const steps::Step&) {
    at::Tensor to = at_place(step.destination, step.rows, plan_.problem.n);
    at::add_out(to, at_place(step.source, step.rows, plan_.problem.n), *call_.bias());
  }

  template <typename Other>
  void take(const Other&, const steps::Step&) {
    TORCH_INTERNAL_ASSERT(false, "a program has no such step");
  }

  void trace() const {
    std::vector<double> rows;
    for (size_t chunk = 0; chunk < ready_us_.size(); ++chunk) {
      rows.insert(rows.end(), {0.0, static_cast<double>(chunk), ready_us_[chunk], begin_us_[chunk],
                               end_us_[chunk]});
    }
    rows.insert(rows.end(), {0.0, -1.0, gemm_us_, 0.0, now_us()});
    TraceSwitch::add_call(call_.problem, call_.group->name(), start_, std::move(rows));
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const OpCall& call_;
  const plan::Plan& plan_;
  const std::shared_ptr<const steps::StepList> list_;
  const at::Tensor input_;
  const std::vector<at::Tensor> outputs_;
  const at::Tensor gathered_;
  std::vector<at::Tensor> transposed_;  // of each weight
  std::map<Buffer, at::Tensor> scratch_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // over what follows
  std::condition_variable changed_;
  std::exception_ptr error_;
  std::vector<bool> done_;         // each step
  std::vector<int32_t> counters_;  // finished tiles of each chunk
  std::vector<double> ready_us_;   // the timeline
  std::vector<double> begin_us_;
  std::vector<double> end_us_;
  double gemm_us_ = 0.0;
};

}  // namespace

void run_program(const OpCall& call, const PlanEntry& entry, std::vector<at::Tensor> outputs,
                 const at::Tensor& gathered) {
  ProgramRun(call, entry, std::move(outputs), gathered)();
}

}  // namespace overlap::binding
