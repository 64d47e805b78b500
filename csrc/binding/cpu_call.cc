// The ops on CPU: plan, list of steps, results.
#include <c10/util/accumulate.h>

#include "binding/op_call.h"
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
    call.group->announce(call.description(), entry_->communication_hash);
    entry_->tally->count();
  }

  const plan::Plan& plan() const { return entry_->plan; }
  bool overlapped() const { return plan().schedule == plan::Schedule::kOverlapped; }
  at::Tensor empty(int64_t rows, int64_t columns) const {
    return at::empty({rows, columns}, call_.output_options());
  }

  at::Tensor reduce() const {
    const bool all_reduces = plan().problem.op == plan::Op::kGemmAllReduce;
    const int64_t rows = plan().problem.m / plan::op_row_parts(plan().problem);
    at::Tensor output = empty(rows, plan().problem.n);
    // Packed tiles are computed one by one, whole rows chunk by chunk.
    const steps::Variant variant = {.kernel_takes = plan().layout == plan::Layout::kPacked,
                                    .bias = overlapped() && call_.bias().has_value()};
    // Of a sequence the product becomes the output, and no step adds the bias.
    run(variant, {.outputs = {output},
                  .product = all_reduces && !overlapped() ? output : at::Tensor(),
                  .scales = own_scales()});
    if (!overlapped() && call_.bias().has_value()) output.add_(*call_.bias());
    return output;
  }

  AllGatherGemmResult gather() const {
    AllGatherGemmResult result;
    result.gathered = at::empty({plan().problem.m, plan().problem.k}, call_.input.options());
    if (call_.scales) result.scales = gathered_scales(call_);
    steps::Variant variant = {.kernel_takes = false};
    for (const at::Tensor& weight : call_.weights) {
      result.outputs.push_back(empty(plan().problem.m, weight.size(0)));
      variant.weights.push_back({weight.size(0), false});
    }
    run(variant, {.outputs = result.outputs, .gathered = result.gathered, .scales = result.scales});
    return result;
  }

  at::Tensor exchange() const {
    const at::Tensor output = empty(c10::sum_integers(call_.recv_rows), plan().problem.n);
    run({.kernel_takes = false, .send_rows = call_.send_rows, .receive_rows = call_.recv_rows},
        {.outputs = {output}, .scales = own_scales()});
    return output;
  }

 private:
  struct Memory {
    std::vector<at::Tensor> outputs;
    at::Tensor gathered = {};
    at::Tensor product = {};
    at::Tensor scales;  // of the rows that the GEMMs read, where operands are scaled
  };

  at::Tensor own_scales() const { return call_.scales ? call_.scales->input : at::Tensor(); }

  void run(const steps::Variant& variant, const Memory& memory) const {
    const auto list = entry_->lists.of(plan(), call_.group->rank(), machine_, variant);
    const bool gathers = memory.gathered.defined();
    const bool reduces = call_.send_rows.empty() && !gathers;
    cpu::Call made = {.plan = plan(),
                      .list = *list,
                      .group = *call_.group,
                      .input = gathers ? call_.input.contiguous() : call_.input,
                      .weights = call_.weights,
                      .biases = reduces ? std::vector<std::optional<at::Tensor>>() : call_.biases,
                      .bias = call_.bias(),
                      .outputs = memory.outputs,
                      .gathered = memory.gathered,
                      .product = memory.product,
                      .delay_us = side_delay_us(),
                      .traced = TraceSwitch::on()};
    if (call_.scales) {
      made.scaled_product = [&](size_t weight, const at::Tensor& rows,
                                const std::optional<at::Tensor>& bias) {
        return scaled_product(*call_.scales, weight, rows, memory.scales, call_.weights[weight],
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

}  // namespace

at::Tensor gemm_reduction_cpu(const OpCall& call) {
  return CpuCall(call).reduce();
}

AllGatherGemmResult allgather_gemm_cpu(const OpCall& call) {
  return CpuCall(call).gather();
}

at::Tensor gemm_alltoall_cpu(const OpCall& call) {
  return CpuCall(call).exchange();
}

}  // namespace overlap::binding
