// A mixture's results over memory that the ranks map into each other, back to their tokens' ranks. Each is one CopyCall.
//
//   combine  | results to peers | flag | wait | sums |
#include <torch/library.h>

#include <optional>

#include "binding/cuda/moe_cuda.h"
#include "binding/cuda/moe_exchange.h"

namespace overlap::binding {
namespace {

using at::Tensor;
using runtime::CopyCall;

// The sum of this rank's rows of each token, into the slot of the token's rank, or into the result, [own tokens, D].
Tensor sum_here(const Exchange& exchange, const CopyCall& call, const Tensor& rows,
                const Tensor& shares, const Tensor& source, int64_t tokens, int64_t choices,
                int64_t stride) {
  const int64_t all = exchange.ranks() * stride;
  const Tensor where = empty_longs(source, all * choices);
  Tensor own = at::empty({tokens, rows.size(1)}, rows.options());
  kernels::SumParams params = sum_params(rows, all, choices);
  params.rank = exchange.rank();
  params.routes = source.numel();
  params.route = source.const_data_ptr<int64_t>();
  params.shares = shares.defined() ? shares.const_data_ptr() : nullptr;
  params.row_shares = true;
  params.where = where.data_ptr<int64_t>();
  params.stride = stride;
  // A token's row is own[token] here, and of a peer's slot row token * ranks + this rank.
  for (int rank = 0; rank < exchange.ranks(); ++rank) {
    params.outputs[rank] = call.slot(rank) + exchange.rank() * row_bytes(rows);
  }
  params.outputs[exchange.rank()] = own.data_ptr();
  params.output_step = exchange.ranks() * rows.size(1);
  C10_CUDA_CHECK(kernels::sum_choices(params, exchange.stream()));
  return own;
}

// The call that takes results home; a slot has `places` for the results of a rank's tokens.
CopyCall begin_combine(Exchange& exchange, const Tensor& rows, int64_t places, bool ranks_first) {
  return exchange.begin(places * row_bytes(rows),
                        {kCombine, places, rows.size(1), rows.element_size(), ranks_first});
}

// After `call` announced what this rank sends: the sums of what came, and of this rank's own rows.
Tensor sum_arrived(const Exchange& exchange, CopyCall& call, const Tensor& rows,
                   const Tensor& shares, const Tensor& home, int64_t tokens, int64_t parts) {
  call.announce(0);
  call.await(0);
  Tensor output = at::empty({tokens, rows.size(1)}, rows.options());
  kernels::SumParams params = sum_params(rows, tokens, parts);
  params.rank = exchange.rank();
  params.home = home.const_data_ptr<int64_t>();
  params.arrived = call.slot();
  params.shares = shares.defined() ? shares.const_data_ptr() : nullptr;
  params.output = output.data_ptr();
  C10_CUDA_CHECK(kernels::sum_choices(params, exchange.stream()));
  call.end();
  return output;
}

// [R, D] to [T, D]: the sum of each token's results times their shares, in the choices' order; or of each rank's sums of
// them, in the ranks' order. `stride`: routes of a rank.
Tensor combine(const Tensor& results, const std::optional<Tensor>& shares, const Tensor& home,
               const Tensor& source, int64_t stride, int64_t tokens, int64_t choices,
               bool ranks_first, const std::string& group) {
  Exchange exchange(results, group);
  const Tensor rows = results.contiguous();
  const Tensor wide = wide_shares(shares, rows);
  if (ranks_first) {
    const int64_t most = stride / choices;  // tokens of a rank
    CopyCall call = begin_combine(exchange, rows, most * exchange.ranks(), true);
    const Tensor own = sum_here(exchange, call, rows, wide, source, tokens, choices, most);
    const Tensor visits = empty_longs(home, tokens * exchange.ranks());
    C10_CUDA_CHECK(kernels::find_visits(
        home.const_data_ptr<int64_t>(), tokens, static_cast<int32_t>(choices), exchange.rank(),
        exchange.ranks(), visits.data_ptr<int64_t>(), exchange.stream()));
    return sum_arrived(exchange, call, own, Tensor(), visits, tokens, exchange.ranks());
  }
  CopyCall call = begin_combine(exchange, rows, stride, false);
  kernels::ResultsParams params;
  params.rank = exchange.rank();
  params.rows = rows.size(0);
  params.row_bytes = row_bytes(rows);
  params.results = rows.const_data_ptr();
  params.source = source.const_data_ptr<int64_t>();
  params.stride = stride;
  exchange.set_slots(params, call);
  C10_CUDA_CHECK(kernels::send_results(params, exchange.stream()));
  return sum_arrived(exchange, call, rows, wide, home, tokens, choices);
}

// combine() of the experts' product of hidden [R, I] and weight [e, D, I], whose tiles store rows where their tokens are.
Tensor down(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
            const Tensor& offs, const std::optional<Tensor>& shares, const Tensor& home,
            const Tensor& source, int64_t stride, int64_t tokens, int64_t choices,
            const std::string& group, const std::optional<Tensor>& scale) {
  Exchange exchange(hidden, group);
  Tensor rows = at::empty({hidden.size(0), weight.size(1)}, product_options(hidden));
  const Tensor wide = wide_shares(shares, rows);
  CopyCall call = begin_combine(exchange, rows, stride, false);
  kernels::GroupedGemmParams params = grouped_params(hidden, weight, offs, scale);
  if (bias.has_value()) {
    params.gate.gate_bias = bias->const_data_ptr();
    params.gate.bias_stride = bias->size(1);
  }
  params.gate.output = rows.data_ptr();
  params.home.source = source.const_data_ptr<int64_t>();
  params.home.stride = stride;
  params.home.rank = exchange.rank();
  exchange.set_slots(params.home, call);
  C10_CUDA_CHECK(kernels::launch_grouped_gemm(params, exchange.stream()));
  return sum_arrived(exchange, call, rows, wide, home, tokens, choices);
}

}  // namespace

TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  m.impl("_moe_peer_combine", &combine);
  if (kernels::kHasGroupedGemm) m.impl("_moe_peer_down", &down);
}

}  // namespace overlap::binding
