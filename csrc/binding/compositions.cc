// The unfused compositions.
#include <numeric>

#include "binding/collectives.h"
#include "binding/op_call.h"

namespace overlap::binding {

at::Tensor local_gemm(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias) {
  return bias.has_value() ? at::addmm(*bias, input, weight.t()) : at::mm(input, weight.t());
}

at::Tensor gemm_allreduce_composition(const OpCall& call) {
  at::Tensor output = at::mm(call.input, call.weight().t());
  all_reduce(*call.group, output, 0);
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

at::Tensor gemm_reducescatter_composition(const OpCall& call) {
  const at::Tensor partial = at::mm(call.input, call.weight().t());
  at::Tensor output =
      at::empty({call.problem.m / call.problem.world_size, call.problem.n}, partial.options());
  reduce_scatter(*call.group, output, partial, 0);
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

AllGatherGemmResult allgather_gemm_composition(const OpCall& call) {
  AllGatherGemmResult result;
  result.gathered = at::empty({call.problem.m, call.problem.k}, call.input.options());
  all_gather(*call.group, result.gathered, call.input.contiguous(), 0);
  for (size_t i = 0; i < call.weights.size(); ++i) {
    result.outputs.push_back(local_gemm(result.gathered, call.weights[i], call.biases[i]));
  }
  return result;
}

at::Tensor gemm_alltoall_composition(const OpCall& call) {
  const at::Tensor rows = local_gemm(call.input, call.weight(), call.bias());
  const int64_t received =
      std::accumulate(call.recv_rows.begin(), call.recv_rows.end(), int64_t{0});
  at::Tensor output = at::empty({received, call.problem.n}, rows.options());
  all_to_all(*call.group, output, rows, call.recv_rows, call.send_rows, 0);
  return output;
}

}  // namespace overlap::binding
