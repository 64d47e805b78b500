// Transfers of a plan's own in place of its collectives.
//
// Each rank comes to the rounds of plan::rounds in their order, each on its stream's lane: what a round's transfer needs is
// waited for first, of what this rank knows; then sends and receives are one call of NCCL; and what is added, or is no
// run of memory, lands in staging memory first and is put in its place behind the call.
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ....................................... | join | result, bias |
//   side   |      | wait 0 [A] | send and receive | wait 1 [A] | add what was received | ...    | ^
//
// An all-gather computes its own rows first, and others once all transfers that write them have arrived.
#include "steps/program_steps.h"

namespace overlap::steps {
namespace {

class OverNccl : ProgramSteps {
 public:
  OverNccl(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
           const Variant& variant)
      : ProgramSteps(plan, rank, machine, variant) {}

  StepList lower() {
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      list_.made.communicators.push_back({plan_.chunks[0].max_ctas, lane});
    }
    begin(lanes_);
    communicate();
    if (gathers_) {
      compute_arrived([&](const std::set<size_t>& writers) { return arrivals(writers); });
    }
    list_.add(Lane::kCaller, Join{});
    StepList made = end();
    made.chunks = std::max(made.chunks, made.counters);
    return made;
  }

 private:
  void communicate() {
    for (const auto& [round, transfers] : own_rounds()) {
      if (program_.transfers[transfers[0]].way == plan::Way::kCopy) {
        for (const size_t i : transfers) copy(i);
      } else {
        exchange(transfers);
      }
    }
  }
};

}  // namespace

StepList lower_program(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant) {
  if (plan::over_peers(plan)) return lower_program_over_peers(plan, rank, machine, variant);
  return OverNccl(plan, rank, machine, variant).lower();
}

}  // namespace overlap::steps
