#include "binding/ops/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "binding/ops/groups.h"
#include "binding/ops/op_call.h"

namespace overlap::binding {
namespace {

template <typename... Arguments>
at::Tensor call(const char* op, Arguments&&... arguments) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  torch::jit::Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  handle.callBoxed(&stack);
  return std::move(stack.front()).toTensor();
}

// Tracers, fakes and other subclasses do not communicate, or by their own rules.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.key_set().has_any(
      c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
}

// On CPU the ranks compare each collective before it begins: if a rank raised elsewhere and skipped one, the error names the
// rank, and no message is left for a later call.
void compare(const char* what, const at::Tensor& tensor, c10::SymIntArrayRef sizes,
             const std::string& group) {
  if (!is_plain(tensor) || !(tensor.is_cpu() || debug_enabled())) return;
  compare_collective(
      c10::str(what, " of ", sizes, " ", c10::getDtypeNames(tensor.scalar_type()).first),
      tensor.device(), group);
}

}  // namespace

at::Tensor start_all_gather(const at::Tensor& shard, const std::string& group) {
  compare("an all-gather", shard, shard.sym_sizes(), group);
  const std::shared_ptr<GroupEntry> entry = find_group(group);
  const auto ranks = static_cast<size_t>(entry->world_size());
  if (shard.is_cpu() && entry->backend(at::kCPU) == "gloo") {
    // Gloo's two worker threads write the name of what they have just done into one string of the group, without a
    // lock (ProcessGroupGloo::runLoop, PyTorch 2.11). The names of the other collectives here fit into the string
    // itself; that of this functional op, ALLGATHER_COALESCED, is on the heap, where two writers at a time free it
    // twice or write into what has been freed.
    const std::vector<c10::SymInt> counts(ranks, shard.sym_size(0));
    return call("_c10d_functional::all_to_all_single",
                at::cat(std::vector<at::Tensor>(ranks, shard)), counts, counts, group);
  }
  return call("_c10d_functional::all_gather_into_tensor", shard.contiguous(),
              static_cast<int64_t>(ranks), group);
}

at::Tensor wait_for_gather(const at::Tensor& begun, int64_t dim, const std::string& group) {
  const at::Tensor gathered = wait(begun);
  if (dim == 0) return gathered;
  return at::cat(gathered.chunk(find_group(group)->world_size()), dim);
}

at::Tensor start_reduce_scatter(const at::Tensor& whole, int64_t dim, const std::string& group) {
  compare("a reduce-scatter", whole, whole.sym_sizes(), group);
  const auto ranks = static_cast<int64_t>(find_group(group)->world_size());
  const at::Tensor parts = dim == 0 ? whole : at::cat(whole.chunk(ranks, dim));
  return call("_c10d_functional::reduce_scatter_tensor", parts.contiguous(), "sum", ranks, group);
}

at::Tensor wait(const at::Tensor& begun) {
  return call("_c10d_functional::wait_tensor", begun);
}

at::Tensor all_to_all(const at::Tensor& whole, c10::SymIntArrayRef send_rows,
                      c10::SymIntArrayRef recv_rows, const std::string& group) {
  compare("an all-to-all of rows", whole, whole.sym_sizes().slice(1), group);
  return wait(call("_c10d_functional::all_to_all_single", whole.contiguous(), recv_rows.vec(),
                   send_rows.vec(), group));
}

at::Tensor collective(const at::Tensor& input, const Collective& how, const std::string& group) {
  return call("overlap::_collective", input, how.kind, how.dim, how.send_rows.vec(),
              how.recv_rows.vec(), group);
}

namespace {

at::Tensor run_collective(const at::Tensor& input, const std::string& kind, int64_t dim,
                          c10::SymIntArrayRef send_rows, c10::SymIntArrayRef recv_rows,
                          const std::string& group) {
  if (kind == "gather") return wait_for_gather(start_all_gather(input, group), dim, group);
  if (kind == "scatter") return wait(start_reduce_scatter(input, dim, group));
  if (kind == "rows") return all_to_all(input, send_rows, recv_rows, group);
  if (kind == "copy") return input.clone();
  TORCH_CHECK_VALUE(kind == "sum", "overlap::_collective: kind is '", kind,
                    "'; allowed are 'gather', 'scatter', 'rows', 'copy' and 'sum'");
  compare("an all-reduce", input, input.sym_sizes(), group);
  return wait(call("_c10d_functional::all_reduce", input.contiguous(), "sum", group));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(overlap, m) {
  m.def("_start_all_gather(Tensor shard, str group) -> Tensor", &start_all_gather);
  m.def("_start_reduce_scatter(Tensor whole, int dim, str group) -> Tensor", &start_reduce_scatter);
  m.def(
      "_collective(Tensor input, str kind, int dim, SymInt[] send_rows, SymInt[] recv_rows, str "
      "group) -> Tensor");
}
TORCH_LIBRARY_IMPL(overlap, CompositeExplicitAutograd, m) {
  m.impl("_collective", &run_collective);
}

}  // namespace overlap::binding
