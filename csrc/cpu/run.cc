#include "cpu/run.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <deque>
#include <future>
#include <thread>
#include <variant>

#include "cpu/memory.h"

namespace overlap::cpu {
namespace {

// A step's communication, which has begun.
struct Begun {
  steps::StepId step = 0;
  int32_t chunk = -1;
  double ready_us = 0.0;
  double begin_us = 0.0;
  double end_us = 0.0;
  bool ended = false;
  at::RecordFunction range{at::RecordScope::USER_SCOPE};  // for profilers
  std::vector<Communication> parts;
  std::shared_future<void> started;  // where a thread of its own begins it
  std::future<double> observed;      // traced calls: when it ends

  // The thread puts in the parts: it ends before they do where a call fails.
  ~Begun() {
    if (started.valid()) started.wait();
  }

  void wait() {
    if (started.valid()) started.get();
    for (Communication& part : parts) part.wait();
  }
};

// gloo writes messages to the socket in the thread that sends: from this number of bytes on, another thread than the GEMMs' sends.
constexpr int64_t kLongMessage = int64_t{512} << 10;

// Messages so far, with a rank.
struct Messages {
  int sent = 0;
  int received = 0;
};

template <typename Work>
auto async(Work work) {
  return std::async(std::launch::async, [work = std::move(work), state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    return work();
  });
}

bool computes(const steps::Step& step) {
  return std::holds_alternative<steps::LibraryGemm>(step.what) ||
         std::holds_alternative<steps::WaitForTiles>(step.what);
}

// Steps that compute, or move rows, within this rank's memory.
class LocalSteps : public Memory {
 public:
  using Memory::Memory;

  void perform(const steps::LibraryGemm& step, steps::StepId) {
    const bool all = step.weight == steps::LibraryGemm::kAllWeights;
    const int64_t rows = counted(step.count, step.rows.count());
    for (size_t i = 0; i < call_.weights.size(); ++i) {
      const auto weight = static_cast<int32_t>(i);
      if (!all && weight != step.weight) continue;
      steps::Where where = step.output.where;
      if (all) where.index = weight;
      at::Tensor output = matrix(where, rows, call_.weights[i].size(0));
      const at::Tensor input = matrix(step.input, rows, plan_.problem.k);
      const auto bias = call_.biases.empty() ? std::nullopt : call_.biases[i];
      if (call_.scaled_product) {
        call_.scaled_product(output, i, input, bias);
      } else {
        multiply(output, input, call_.weights[i], bias);
      }
    }
  }

  // The chunks' tiles are computed when they are asked for; those of a caller's kernel have been.
  void perform(const steps::Gemm& step, steps::StepId) { gemm_ = &step; }
  void perform(const steps::CallersKernel&, steps::StepId) {}
  void perform(const steps::WaitForTiles& step, steps::StepId) {
    if (call_.counters.defined()) return;
    for_tiles(step.chunk, gemm_->order, [&](int32_t tile, const Block& block) {
      multiply(
          packed(gemm_->outputs[0].where, gemm_->order, tile, gemm_->terms, gemm_->term, block),
          call_.input.narrow(0, block.row, block.rows),
          call_.weights[0].narrow(0, block.column, block.columns));
    });
  }

  void perform(const steps::Pack& step, steps::StepId) {
    const at::Tensor product = matrix(step.source, plan_.problem.m, plan_.problem.n);
    for_tiles(step.chunk, step.order, [&](int32_t tile, const Block& block) {
      packed(step.destination, step.order, tile, step.terms, step.term, block)
          .copy_(block.of(product));
    });
  }

  void perform(const steps::Unpack& step, steps::StepId) {
    const at::Tensor output = matrix(step.destination, plan_.problem.m, plan_.problem.n);
    for_tiles(step.chunk, step.order, [&](int32_t tile, const Block& block) {
      at::Tensor place = block.of(output);
      place.copy_(packed(step.source, step.order, tile, step.terms, 0, block));
      for (int32_t term = 1; term < step.terms; ++term) {
        place.add_(packed(step.source, step.order, tile, step.terms, term, block));
      }
      if (step.bias) place.add_(call_.bias->narrow(0, block.column, block.columns));
    });
  }

  void perform(const steps::AddTerms& step, steps::StepId) {
    at::Tensor output = matrix(step.destination, step.rows, plan_.problem.n);
    const auto term = [&](int32_t number) {
      steps::Where where = step.source;
      where.offset += number * step.stride;
      return matrix(where, step.rows, plan_.problem.n);
    };
    if (step.terms > 1) {  // rounded once
      at::Tensor sum = term(0).to(at::promote_types(output.scalar_type(), at::kFloat), false, true);
      for (int32_t number = 1; number < step.terms; ++number) sum.add_(term(number));
      output.copy_(sum);
    }
    if (step.bias) at::add_out(output, step.terms > 1 ? output : term(0), *call_.bias);
  }

  void perform(const steps::Copy& step, steps::StepId) {
    bytes(step.destination, step.bytes).copy_(bytes(step.source, step.bytes));
  }
  void perform(const steps::CopyRows& step, steps::StepId) {
    const int64_t rows = counted(step.count, step.rows);
    if (rows == 0) return;
    at::Tensor from = step.from_rows
                          ? all_spaced(step.source, step.row_bytes, step.source_stride)
                                .index_select(0, flat(*step.from_rows, rows))
                          : spaced(step.source, rows, step.row_bytes, step.source_stride);
    if (step.to_rows) {
      all_spaced(step.destination, step.row_bytes, step.destination_stride)
          .index_copy_(0, flat(*step.to_rows, rows), from);
      return;
    }
    at::Tensor to = spaced(step.destination, rows, step.row_bytes, step.destination_stride);
    if (step.adds) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }

  // For the caller's kernel.
  void perform(const steps::Arrive& step, steps::StepId) {
    call_.counters.narrow(0, step.chunk, 1).fill_(1);
  }

  template <typename Other>
  void perform(const Other&, steps::StepId id) {
    TORCH_INTERNAL_ASSERT(false, "step ", id, " is none of a CPU's: ", plan_.to_string());
  }

 private:
  void multiply(at::Tensor output, const at::Tensor& input, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias = {}) {
    if (output.numel() == 0) return;
    if (bias.has_value()) {
      at::addmm_out(output, *bias, input, weight.t());
    } else {
      at::mm_out(output, input, weight.t());
    }
  }

  const steps::Gemm* gemm_ = nullptr;
};

// The order of a call's steps, and what the group has under way.
class Run {
 public:
  explicit Run(const Call& call)
      : call_(call),
        plan_(call.plan),
        program_(plan::has_program(plan_)),
        local_(call),
        in_order_(program_ || plan::hierarchical(plan_) || call.counters.defined()),
        messages_(static_cast<size_t>(plan_.problem.world_size)) {
    for (const steps::Step& step : steps()) {
      const auto* const messages = std::get_if<steps::SendReceive>(&step.what);
      if (messages == nullptr) continue;
      for (const steps::Message& one : messages->sends) sends_apart_ |= one.bytes >= kLongMessage;
    }
  }

  // Does the steps before the caller's kernel, and the rest.
  void begin() {
    while (!std::holds_alternative<steps::CallersKernel>(steps()[next_].what)) take_next();
  }
  Timeline finish() {
    while (next_ < steps().size()) take_next();
    return {start_, call_.traced ? rows() : std::vector<double>()};
  }

 private:
  const std::vector<steps::Step>& steps() const { return call_.list->steps; }

  void take_next() {
    const steps::Step& step = steps()[next_];
    const auto id = static_cast<steps::StepId>(next_++);
    if (step.lane == steps::Lane::kCopy) {
      put_off_.push_back(id);
    } else if (program_ && step.after.empty() &&
               std::holds_alternative<steps::LibraryGemm>(step.what)) {
      to_compute_.push_back(id);
    } else {
      perform(id);
    }
  }

  void perform(steps::StepId id) {
    const steps::Step& step = call_.list->steps[static_cast<size_t>(id)];
    for (const steps::StepId before : step.after) {
      while (!to_compute_.empty() && to_compute_.front() <= before) compute_next();
      for (Begun& one : begun_) {
        if (one.step == before) wait(one);
      }
    }
    if (in_order_ && step.lane != steps::Lane::kCaller) {
      for (Begun& one : begun_) {
        if (lane(one.step) == step.lane) wait(one);
      }
    }
    std::visit([&](const auto& what) { this->perform(what, id); }, step.what);
    if (call_.traced && computes(step)) gemm_us_ = now_us();
  }

  // --- lanes ---

  steps::Lane lane(steps::StepId id) const {
    return call_.list->steps[static_cast<size_t>(id)].lane;
  }

  void perform(const steps::Fork&, steps::StepId) {}
  void perform(const steps::Mark&, steps::StepId) {}
  void perform(const steps::Join&, steps::StepId) {
    while (!to_compute_.empty()) compute_next();
    for (const steps::StepId id : put_off_) perform(id);
    for (Begun& one : begun_) wait(one);
    call_.group.agree();  // where there was nothing to send and receive
  }

  template <typename Other>
  void perform(const Other& step, steps::StepId id) {
    local_.perform(step, id);
  }

  // A program's next GEMM that waits for nothing.
  void compute_next() {
    const steps::StepId id = to_compute_.front();
    to_compute_.pop_front();
    perform(id);
  }

  void perform(const steps::Collective& step, steps::StepId id) {
    const int64_t all = step.count * plan_.problem.world_size;
    begin(id, false, [this, &step, all](Begun& begun) {
      switch (step.kind) {
        case plan::Collective::kReduceScatter:
          begun.parts.push_back(reduce_scatter(call_.group,
                                               local_.flat(step.destination, step.count),
                                               local_.flat(step.source, all), begun.chunk));
          return;
        case plan::Collective::kAllReduce:
          begun.parts.push_back(
              all_reduce(call_.group, local_.flat(step.destination, step.count), begun.chunk));
          return;
        default:
          begun.parts.push_back(all_gather(call_.group, local_.flat(step.destination, all),
                                           local_.flat(step.source, step.count), begun.chunk));
      }
    });
  }

  void perform(const steps::SendReceive& step, steps::StepId id) {
    if (step.sends.empty() && step.receives.empty()) return;
    begin(id, sends_apart_, [this, &step](Begun& begun) {
      for (const steps::Message& one : step.receives) {
        begun.parts.push_back(receive(call_.group, local_.bytes(one.where, one.bytes), one.peer,
                                      messages_[static_cast<size_t>(one.peer)].received++));
      }
      for (const steps::Message& one : step.sends) {
        begun.parts.push_back(send(call_.group, local_.bytes(one.where, one.bytes), one.peer,
                                   messages_[static_cast<size_t>(one.peer)].sent++));
      }
    });
  }

  // `apart`: by a thread of its own, after those before.
  template <typename Start>
  void begin(steps::StepId id, bool apart, const Start& start) {
    const steps::Step& step = call_.list->steps[static_cast<size_t>(id)];
    Begun& begun = begun_.emplace_back();
    begun.step = id;
    begun.chunk = step.communicates;
    begun.ready_us = now_us();
    if (begun.chunk >= 0 && begun.range.isActive()) {
      begun.range.before(c10::str("overlap::chunk ", begun.chunk));
      begun.range._setAsync();  // other chunks begin before it ends
    }
    const auto go = [this, &begun, start] {
      if (begun.chunk >= 0 && call_.delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(call_.delay_us));
      }
      begun.begin_us = now_us();
      start(begun);
    };
    if (apart) {
      begun.started = async([before = last_started_, go] {
                        if (before.valid()) before.get();
                        go();
                      }).share();
      last_started_ = begun.started;
    } else {
      go();
    }
    if (call_.traced) {
      // So that it is known when it ends, and not when somebody asks.
      begun.observed = async([&begun, this] {
        begun.wait();
        return now_us();
      });
    }
    if (step.lane == steps::Lane::kCaller) wait(begun);
  }

  void wait(Begun& begun) {
    if (begun.ended) return;
    begun.ended = true;
    if (!to_compute_.empty()) compute_next();  // while the peers come to it
    if (begun.observed.valid()) {
      begun.end_us = begun.observed.get();
    } else {
      begun.wait();
    }
    begun.range.end();
    if (plan_.problem.traits().gathers()) begun.ready_us = now_us();  // for its GEMM
  }

  // --- the timeline ---

  double now_us() const {
    const auto passed = std::chrono::steady_clock::now() - start_;
    return std::chrono::duration<double, std::micro>(passed).count();
  }

  std::vector<double> rows() const {
    std::vector<double> rows;
    for (const Begun& one : begun_) {
      if (one.chunk < 0) continue;
      rows.insert(rows.end(),
                  {0.0, static_cast<double>(one.chunk), one.ready_us, one.begin_us, one.end_us});
    }
    rows.insert(rows.end(), {0.0, -1.0, gemm_us_, 0.0, now_us()});
    return rows;
  }

  const Call& call_;
  const plan::Plan& plan_;
  const bool program_;
  LocalSteps local_;
  const bool in_order_;       // the steps of each lane
  bool sends_apart_ = false;  // some message is long
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double gemm_us_ = 0.0;
  size_t next_ = 0;
  std::vector<steps::StepId> put_off_;  // until the join
  std::deque<steps::StepId>
      to_compute_;  // a program's GEMMs, until one is needed, or something is waited for
  std::vector<Messages> messages_;  // with each rank
  std::shared_future<void> last_started_;
  std::deque<Begun> begun_;
};

}  // namespace

Timeline run(const Call& call) {
  return Run(call).finish();
}

class OpenCall::State : public Run {
 public:
  using Run::Run;
};

OpenCall::OpenCall(const Call& call) : state_(std::make_unique<State>(call)) {}
OpenCall::~OpenCall() = default;
void OpenCall::begin() {
  state_->begin();
}
Timeline OpenCall::finish() {
  return state_->finish();
}

}  // namespace overlap::cpu
