// The ops on CPU: plan, list of steps, results.
#include <c10/util/accumulate.h>

#include "binding/ops/op_call.h"
#include "cpu/run.h"

namespace overlap::binding {
namespace {

// One call. Making it looks the plan up, and announces it to the other ranks.
class CpuCall {
 public:
  explicit CpuCall(const OpCall& call)
      : call_(call),
        machine_(cpu_machine()),
        entry_(call.group->plan(call.problem, at::kCPU, machine_)) {
    if (debug_enabled()) call.group->compare("plan", plan().to_string(), at::kCPU);
    call.group->announce(call.description(), entry_->communication_hash, call.row_counts());
    entry_->tally->count();
  }

  const plan::Plan& plan() const { return entry_->plan; }
  bool overlapped() const { return plan().schedule == plan::Schedule::kOverlapped; }
  at::Tensor empty(int64_t rows, int64_t columns) const {
    return at::empty({rows, columns}, call_.output_options());
  }

  at::Tensor reduce() const {
    const plan::Problem& problem = plan().problem;
    // Packed tiles are computed one by one, whole rows chunk by chunk.
    cpu::Call made = with_list({.compute = steps::kernel_if(plan().layout == plan::Layout::kPacked),
                                .bias = overlapped() && call_.bias().has_value()});
    made.input = parts_of_blocks(call_, call_.input);
    made.outputs = {empty(problem.m / plan::op_row_parts(problem), problem.n)};
    const at::Tensor& output = made.outputs[0];
    // A sequence's product becomes the output, and no step adds the bias.
    if (problem.traits().all_reduces() && !overlapped()) made.product = output;
    run(made, call_.scales ? call_.scales->input : at::Tensor());
    if (!overlapped() && call_.bias().has_value()) output.add_(*call_.bias());
    return output;
  }

  AllGatherGemmResult gather() const {
    AllGatherGemmResult result;
    result.gathered = at::empty({plan().problem.m, plan().problem.k}, call_.input.options());
    if (call_.scales) result.scales = gathered_scales(call_);
    steps::Variant variant = {.compute = steps::Compute::kLibrary};
    for (const at::Tensor& weight : call_.weights) {
      result.outputs.push_back(empty(plan().problem.m, weight.size(0)));
      variant.weights.push_back({weight.size(0), false});
    }
    cpu::Call made = with_list(variant);
    made.input = call_.input.contiguous();
    made.biases = call_.biases;
    made.outputs = result.outputs;
    made.gathered = result.gathered;
    run(made, result.scales);
    result.gathered = blocks_of_parts(call_, result.gathered);
    for (at::Tensor& output : result.outputs) output = blocks_of_parts(call_, output);
    return result;
  }

  at::Tensor exchange() const {
    cpu::Call made = with_list({.compute = steps::Compute::kLibrary,
                                .send_rows = call_.send_rows,
                                .receive_rows = call_.recv_rows});
    made.biases = call_.biases;
    made.outputs = {empty(c10::sum_integers(call_.recv_rows), plan().problem.n)};
    run(made, call_.scales ? call_.scales->input : at::Tensor());
    return made.outputs[0];
  }

 private:
  cpu::Call with_list(const steps::Variant& variant) const {
    return {.plan = plan(),
            .list = entry_->lists.of(plan(), call_.group->rank(), machine_, variant),
            .group = *call_.group,
            .input = call_.input,
            .weights = call_.weights,
            .bias = call_.bias(),
            .delay_us = side_delay_us(),
            .traced = TraceSwitch::on()};
  }

  // The scales are those of the rows that the GEMMs read.
  void run(cpu::Call& made, const at::Tensor& scales) const {
    if (call_.scales) {
      made.scaled_product = [&](at::Tensor& output, size_t weight, const at::Tensor& rows,
                                const std::optional<at::Tensor>& bias) {
        scaled_product_out(output, *call_.scales, weight, rows, scales, call_.weights[weight],
                           bias);
      };
    }
    cpu::Timeline timeline = cpu::run(made);
    if (!made.traced) return;
    TraceSwitch::add_call(call_.problem, call_.group->name(), timeline.start,
                          std::move(timeline.rows));
  }

  const OpCall& call_;
  const plan::Machine machine_;
  const std::shared_ptr<const PlanEntry> entry_;
};

// True: the call is left to the composition, and is counted as such.
bool takes_composition(const OpCall& call) {
  if (call.problem.invariance != plan::Invariance::kNone) {
    call.group->count_unplanned(call.problem, at::kCPU,
                                "no plan on CPU is invariant: blocks of 128 rows, whose "
                                "terms are gathered and added in order");
    if (call.group->runs_plans(at::kCPU))
      call.group->announce(call.description(), 0, call.row_counts());
    return true;
  }
  const std::string why = call.group->why_no_plans(at::kCPU);
  if (why.empty()) return false;
  call.group->count_unplanned(call.problem, at::kCPU, why + ": a GEMM, then its collective");
  return true;
}

}  // namespace

at::Tensor gemm_reduction_cpu(const OpCall& call) {
  const auto turn = call.group->turn_on_cpu();
  if (!takes_composition(call)) return CpuCall(call).reduce();
  return call.problem.traits().all_reduces() ? gemm_allreduce_composition(call)
                                             : gemm_reducescatter_composition(call);
}

AllGatherGemmResult allgather_gemm_cpu(const OpCall& call) {
  const auto turn = call.group->turn_on_cpu();
  return takes_composition(call) ? allgather_gemm_composition(call) : CpuCall(call).gather();
}

at::Tensor gemm_alltoall_cpu(const OpCall& call) {
  const auto turn = call.group->turn_on_cpu();
  return takes_composition(call) ? gemm_alltoall_composition(call) : CpuCall(call).exchange();
}

}  // namespace overlap::binding
