// The unfused compositions.
#include <c10/util/accumulate.h>

#include "binding/ops/op_call.h"
#include "cpu/collectives.h"

namespace overlap::binding {

at::Tensor local_gemm(const OpCall& call, const at::Tensor& rows, const at::Tensor& scales,
                      size_t weight, bool with_bias) {
  const at::Tensor& matrix = call.weights[weight];
  const auto bias = with_bias ? call.biases[weight] : std::nullopt;
  if (call.scales) return scaled_product(*call.scales, weight, rows, scales, matrix, bias);
  return bias.has_value() ? at::addmm(*bias, rows, matrix.t()) : at::mm(rows, matrix.t());
}

at::Tensor local_gemm(const OpCall& call, int64_t count, bool with_bias) {
  return local_gemm(call, call.input.narrow(0, 0, count),
                    call.scales ? call.scales->of_rows(0, count) : at::Tensor(), 0, with_bias);
}

at::Tensor local_gemm(const OpCall& call, bool with_bias) {
  if (call.weights.empty()) return call.input.clone(at::MemoryFormat::Contiguous);
  return local_gemm(call, call.input.size(0), with_bias);
}

// Every rank's scales of its rows, in rank order.
at::Tensor gathered_scales(const OpCall& call) {
  const at::Tensor& own = call.scales->input;
  const int64_t ranks = call.scales->shared_input ? 1 : call.group->world_size();
  if (ranks == 1) return own.clone(at::MemoryFormat::Contiguous);
  at::Tensor all = at::empty({ranks * own.size(0), own.size(1)}, own.options());
  if (all.numel() > 0) cpu::all_gather(*call.group, all, own.contiguous(), 0).wait();
  return all;
}

at::Tensor gemm_allreduce_composition(const OpCall& call) {
  at::Tensor output = local_gemm(call, false);
  cpu::all_reduce(*call.group, output, 0).wait();
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

at::Tensor gemm_reducescatter_composition(const OpCall& call) {
  const at::Tensor partial = parts_of_blocks(call, local_gemm(call, false));
  at::Tensor output =
      at::empty({call.problem.m / call.problem.world_size, call.problem.n}, partial.options());
  cpu::reduce_scatter(*call.group, output, partial, 0).wait();
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

AllGatherGemmResult allgather_gemm_composition(const OpCall& call) {
  AllGatherGemmResult result;
  result.gathered = at::empty({call.problem.m, call.problem.k}, call.input.options());
  cpu::all_gather(*call.group, result.gathered, call.input.contiguous(), 0).wait();
  result.gathered = blocks_of_parts(call, result.gathered);
  if (call.scales) result.scales = gathered_scales(call);
  for (size_t i = 0; i < call.weights.size(); ++i) {
    result.outputs.push_back(local_gemm(call, result.gathered, result.scales, i, true));
  }
  return result;
}

at::Tensor gemm_alltoall_composition(const OpCall& call) {
  const at::Tensor rows = local_gemm(call, true);
  at::Tensor output =
      at::empty({c10::sum_integers(call.recv_rows), call.problem.n}, rows.options());
  cpu::all_to_all(*call.group, output, rows, call.recv_rows, call.send_rows, 0).wait();
  return output;
}

}  // namespace overlap::binding
