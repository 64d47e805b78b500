// Jobs on CPU: the kernel is done when it returns. Its signals are checked by overlap_torch/_kernels/job.py before the call
// ends, and what it has left of arrivals here.
#include <optional>

#include "binding/kernels/kernel_job.h"
#include "binding/ops/trace_switch.h"
#include "cpu/run.h"

namespace overlap::binding {
namespace {

class CpuRunner : public KernelCall::Runner {
 public:
  explicit CpuRunner(KernelCall& call)
      : call_(call), job_(call.job()), plan_(job_.plan()), group_(*job_.group()) {}

  void begin() override {
    using steps::Buffer;
    const auto turn = group_.turn_on_cpu();
    call_.make_counters(at::zeros({KernelCounters::kSize}, at::kInt));
    made_.emplace(cpu::Call{.plan = plan_,
                            .list = call_.list(),
                            .group = group_,
                            .input = call_.memory(Buffer::kInput),
                            .weights = no_weights_,
                            .outputs = {call_.memory(Buffer::kOutput)},
                            .gathered = call_.memory(Buffer::kGathered),
                            .product = call_.memory(Buffer::kProduct),
                            .counters = call_.counters(),
                            .delay_us = side_delay_us()});
    open_.emplace(*made_);
    if (communicates_first()) announce(job_.text());
    open_->begin();
  }

  void finish() override {
    const auto turn = group_.turn_on_cpu();
    if (communicates_first()) {
      check_arrivals();
    } else {
      announce(job_.text());
    }
    open_->finish();
  }

  // Ranks compare announcements: the ranks that have not left the call hear of it and communicate
  // nothing.
  void abandon(const std::string& why) override {
    if (communicates_first()) return;
    const auto turn = group_.turn_on_cpu();
    announce(why);
    try {
      group_.agree();
    } catch (const std::exception&) {
      // This rank has an error of its own.
    }
  }

 private:
  bool communicates_first() const { return plan_.problem.traits().gathers(); }
  void announce(const std::string& text) {
    const RowCounts rows = {job_.job().send_rows, job_.job().receive_rows};
    job_.group()->announce(text, plan::communication_hash(plan_), rows);
  }

  // A kernel that has given up waiting sets a flag's highest bits.
  void check_arrivals() const {
    const int32_t* const seen = call_.counters().const_data_ptr<int32_t>();
    for (int32_t chunk = 0; chunk < call_.list()->counters; ++chunk) {
      TORCH_CHECK(seen[chunk] == 1, "overlap_torch: group '", group_.name(), "', rank ",
                  group_.rank(), ": ", job_.text(), ": the flag of chunk ", chunk, " is ",
                  seen[chunk], " after the kernel and not 1; the kernel has written to it");
    }
  }

  KernelCall& call_;
  const KernelJob& job_;
  const plan::Plan& plan_;
  GroupEntry& group_;
  const std::vector<at::Tensor> no_weights_;
  std::optional<cpu::Call> made_;
  std::optional<cpu::OpenCall> open_;
};

}  // namespace

std::unique_ptr<KernelCall::Runner> cpu_runner(KernelCall& call) {
  return std::make_unique<CpuRunner>(call);
}

}  // namespace overlap::binding
