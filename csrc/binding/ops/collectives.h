// The collectives of gradients and layers: functional ones, which a compiler sees. None records a gradient, except `collective`.
// overlap_torch/_ops/collectives.py has those that only layers call.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace overlap::binding {

// Begins a gather of the ranks' shards along dim 0. `wait_for_gather` puts them together along `dim`.
at::Tensor start_all_gather(const at::Tensor& shard, const std::string& group);
at::Tensor wait_for_gather(const at::Tensor& begun, int64_t dim, const std::string& group);

// Begins to sum `whole` and to cut it along `dim`; the result may be used after `wait`.
at::Tensor start_reduce_scatter(const at::Tensor& whole, int64_t dim, const std::string& group);
at::Tensor wait(const at::Tensor& begun);

// Sends the first send_rows[0] rows to rank 0, and so on; what comes is in rank order.
at::Tensor all_to_all(const at::Tensor& whole, c10::SymIntArrayRef send_rows,
                      c10::SymIntArrayRef recv_rows, const std::string& group);

// A linear map between the ranks' tensors, for gradients that are differentiated again: overlap::_collective.
// `kind`: "sum" adds the ranks' tensors, and "copy" is its reverse: a replicated tensor whose gradient is a sum. "gather" and
// "scatter" are each other's reverse, and "rows" is with the counts exchanged.
struct Collective {
  std::string kind;
  int64_t dim = 0;
  c10::SymIntArrayRef send_rows = {};
  c10::SymIntArrayRef recv_rows = {};
};
at::Tensor collective(const at::Tensor& input, const Collective& how, const std::string& group);

}  // namespace overlap::binding
