// The unfused compositions.
#include <chrono>
#include <numeric>

#include "binding/collectives.h"
#include "binding/op_call.h"

namespace overlap::binding {
namespace {

// The timeline of a composition on CPU: a chunk of everything, and one GEMM before or after it. On
// other devices a call returns before anything has happened.
class Timeline {
 public:
  explicit Timeline(const OpCall& call)
      : call_(call), on_(call.input.is_cpu() && TraceSwitch::on()) {}

  void communication_begins() { begin_us_ = now_us(); }
  void communication_ends() { end_us_ = now_us(); }
  void gemm_ends() { gemm_us_ = now_us(); }

  // `ready_us`: when the GEMM had the chunk ready, or the chunk what the GEMM needs.
  void record() const {
    if (!on_) return;
    const double ready_us = gemm_us_ <= begin_us_ ? gemm_us_ : end_us_;
    TraceSwitch::add_call(
        call_.problem, call_.group->name(), start_,
        {0.0, 0.0, ready_us, begin_us_, end_us_, 0.0, -1.0, gemm_us_, 0.0, now_us()});
  }

 private:
  double now_us() const {
    const auto passed = std::chrono::steady_clock::now() - start_;
    return std::chrono::duration<double, std::micro>(passed).count();
  }

  const OpCall& call_;
  const bool on_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double begin_us_ = 0.0;
  double end_us_ = 0.0;
  double gemm_us_ = 0.0;
};

at::Tensor as_bytes(const at::Tensor& tensor) {
  return is_fp8(tensor.scalar_type()) ? tensor.view(at::kByte) : tensor;
}

}  // namespace

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
  return local_gemm(call, call.input.size(0), with_bias);
}

// Every rank's scales of its rows, in rank order.
at::Tensor gathered_scales(const OpCall& call) {
  const at::Tensor& own = call.scales->input;
  const int64_t ranks = call.scales->shared_input ? 1 : call.group->world_size();
  if (ranks == 1) return own.clone(at::MemoryFormat::Contiguous);
  at::Tensor all = at::empty({ranks * own.size(0), own.size(1)}, own.options());
  if (all.numel() > 0) all_gather(*call.group, all, own.contiguous(), 0);
  return all;
}

at::Tensor gemm_allreduce_composition(const OpCall& call) {
  Timeline timeline(call);
  at::Tensor output = local_gemm(call, false);
  timeline.gemm_ends();
  timeline.communication_begins();
  all_reduce(*call.group, output, 0);
  timeline.communication_ends();
  if (call.bias().has_value()) output.add_(*call.bias());
  timeline.record();
  return output;
}

at::Tensor gemm_reducescatter_composition(const OpCall& call) {
  Timeline timeline(call);
  const at::Tensor partial = local_gemm(call, false);
  timeline.gemm_ends();
  at::Tensor output =
      at::empty({call.problem.m / call.problem.world_size, call.problem.n}, partial.options());
  timeline.communication_begins();
  reduce_scatter(*call.group, output, partial, 0);
  timeline.communication_ends();
  if (call.bias().has_value()) output.add_(*call.bias());
  timeline.record();
  return output;
}

AllGatherGemmResult allgather_gemm_composition(const OpCall& call) {
  Timeline timeline(call);
  AllGatherGemmResult result;
  result.gathered = at::empty({call.problem.m, call.problem.k}, call.input.options());
  timeline.communication_begins();
  // A gather moves bytes; gloo knows no fp8.
  all_gather(*call.group, as_bytes(result.gathered), as_bytes(call.input.contiguous()), 0);
  if (call.scales) result.scales = gathered_scales(call);
  timeline.communication_ends();
  for (size_t i = 0; i < call.weights.size(); ++i) {
    result.outputs.push_back(local_gemm(call, result.gathered, result.scales, i, true));
  }
  timeline.gemm_ends();
  timeline.record();
  return result;
}

at::Tensor gemm_alltoall_composition(const OpCall& call) {
  Timeline timeline(call);
  const at::Tensor rows = local_gemm(call, true);
  timeline.gemm_ends();
  const int64_t received =
      std::accumulate(call.recv_rows.begin(), call.recv_rows.end(), int64_t{0});
  at::Tensor output = at::empty({received, call.problem.n}, rows.options());
  timeline.communication_begins();
  all_to_all(*call.group, output, rows, call.recv_rows, call.send_rows, 0);
  timeline.communication_ends();
  timeline.record();
  return output;
}

}  // namespace overlap::binding
