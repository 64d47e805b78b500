// The operators' schemas, their checks, and the device-independent part of each.
#include <ATen/autocast_mode.h>
#include <ATen/core/stack.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "binding/ops/op_call.h"
#include "binding/ops/operands.h"
#include "binding/ops/profiled.h"
#include "binding/ops/trace_switch.h"

namespace overlap::binding {

// Ranks that disagree about what they call are found on CPU, over peers and, some time later, over NCCL; under
// OVERLAP_DEBUG=1 in each call, before it begins.
void compare_calls(const OpCall& call) {
  if (!debug_enabled() || call.problem.world_size == 1) return;
  call.group->compare("problem", call.description(), call.input.device().type());
}

void compare_local_call(const OpCall& call) {
  call.group->count_unplanned(call.problem, call.input.device().type(),
                              call.problem.world_size == 1
                                  ? "a group of one has nothing to communicate"
                                  : "M, N or K is 0: there is nothing to overlap");
  if (!call.input.is_cpu() || call.problem.world_size == 1) return;
  const auto turn = call.group->turn_on_cpu();
  call.group->announce(call.description(), 0, call.row_counts());
  call.group->agree();
}

void compare_collective(const std::string& what, at::Device device, const std::string& group_name) {
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  if (group->world_size() == 1) return;
  if (debug_enabled()) group->compare("collective", what, device.type());
  if (!device.is_cpu()) return;
  const auto turn = group->turn_on_cpu();
  group->announce(what, 0);
  group->agree();
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The scales of one weight, as those of several are given.
std::optional<at::TensorList> one(const OptionalTensor& scale) {
  return scale ? std::optional<at::TensorList>(*scale) : std::nullopt;
}

// gemm_allreduce, and gemm_reducescatter along a dim.
at::Tensor reduced(plan::Op op, const at::Tensor& input, const at::Tensor& weight,
                   const OptionalTensor& bias, int64_t given_dim,
                   const std::optional<std::string>& invariance, const std::string& group_name,
                   const std::optional<GivenScales>& scales) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool scatters = plan::traits(op).scatters();
  const int64_t dim = scatters ? row_dim(op, input, given_dim, scales.has_value()) : 0;
  OpCall call = make_call(op, input, {weight}, {bias}, group_name, scales);
  set_invariance(call.problem, plan::name(op), invariance);
  const plan::Problem& problem = call.problem;
  const int64_t parts = plan::op_row_parts(problem);
  if (scatters) set_blocks(call, input, dim);
  TORCH_CHECK_VALUE(!scatters || input.size(dim) % parts == 0, "gemm_reducescatter: dim ", dim,
                    " of input must be divisible by the world size ", parts, ", but got shape ",
                    input.sizes(), "; pad it");
  const Profiled profiled(call);
  compare_calls(call);

  const int64_t rows = problem.m / parts;
  at::Tensor output;
  if (problem.m == 0 || problem.n == 0) {
    compare_local_call(call);
    output = at::empty({rows, problem.n}, call.output_options());
  } else if (problem.k == 0 || problem.world_size == 1) {
    // Nothing to add up between ranks: zeros everywhere, or one rank's own product.
    compare_local_call(call);
    output = local_gemm(call, rows, true);
  } else if (input.is_cpu()) {
    output = gemm_reduction_cpu(call);
  } else {
    output = scatters ? gemm_reducescatter_cuda(call) : gemm_allreduce_cuda(call);
  }
  return as_shape_of(output, input, dim, input.size(dim) / parts);
}

// The gathered scales, as many dims as the caller gave for the input's: one number for each rank where one scales all of
// a rank's rows, or one in all.
at::Tensor in_shape_of(const at::Tensor& gathered, const OpCall& call, const at::Tensor& given) {
  if (call.scales->recipe == plan::Recipe::kTensor) return gathered.view({gathered.size(0)});
  std::vector<int64_t> sizes = given.sizes().vec();
  sizes.front() *= call.problem.world_size;
  return gathered.view(sizes);
}

AllGatherGemmResult gather_and_compute(const at::Tensor& input, std::vector<at::Tensor> weights,
                                       std::vector<OptionalTensor> biases, int64_t given_dim,
                                       const std::string& group_name,
                                       const std::optional<GivenScales>& scales) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t dim = row_dim(plan::Op::kAllGatherGemm, input, given_dim);
  OpCall call = make_call(plan::Op::kAllGatherGemm, input, std::move(weights), std::move(biases),
                          group_name, scales);
  set_blocks(call, input, dim);
  call.problem.m *= call.problem.world_size;
  const plan::Problem& problem = call.problem;
  const Profiled profiled(call);
  compare_calls(call);

  AllGatherGemmResult result;
  if (problem.world_size == 1 || problem.m == 0 || problem.k == 0) {
    compare_local_call(call);
    result.gathered = problem.world_size == 1 ? call.input.clone(at::MemoryFormat::Contiguous)
                                              : at::empty({problem.m, problem.k}, input.options());
    if (call.scales) result.scales = gathered_scales(call);
    for (size_t i = 0; i < call.weights.size(); ++i) {
      result.outputs.push_back(local_gemm(call, result.gathered, result.scales, i, true));
    }
  } else {
    result = input.is_cpu() ? allgather_gemm_cpu(call) : allgather_gemm_cuda(call);
  }
  const int64_t size = input.size(dim) * problem.world_size;
  for (at::Tensor& output : result.outputs) output = as_shape_of(output, input, dim, size);
  result.gathered = as_shape_of(result.gathered, input, dim, size);
  if (scales) result.scales = in_shape_of(result.scales, call, scales->input);
  return result;
}

at::Tensor gemm_alltoall(const at::Tensor& input, const at::Tensor& weight,
                         at::IntArrayRef send_rows, at::IntArrayRef recv_rows,
                         const OptionalTensor& bias, const OptionalTensor& scale_input,
                         const OptionalTensor& scale_weight, std::optional<int64_t> recipe_input,
                         std::optional<int64_t> recipe_weight, std::optional<int64_t> output_dtype,
                         bool use_fast_accum, const std::string& group_name) {
  const auto scales = given_scales("gemm_alltoall", scale_input, one(scale_weight), recipe_input,
                                   recipe_weight, output_dtype, use_fast_accum);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  row_dim(plan::Op::kGemmAllToAll, input);
  OpCall call = make_call(plan::Op::kGemmAllToAll, input, {weight}, {bias}, group_name, scales);
  call.problem.m = 0;  // the numbers of rows differ by rank
  check_counts("send_rows", send_rows, *call.group);
  check_counts("recv_rows", recv_rows, *call.group);
  const int64_t sent = c10::sum_integers(send_rows);
  TORCH_CHECK_VALUE(sent == input.size(0),
                    "gemm_alltoall: send_rows must add up to dim 0 of input, ", input.size(0),
                    ", but ", send_rows, " add up to ", sent);
  const auto rank = static_cast<size_t>(call.group->rank());
  TORCH_CHECK_VALUE(send_rows[rank] == recv_rows[rank], "gemm_alltoall: rank ", rank,
                    " sends itself ", send_rows[rank], " rows and expects ", recv_rows[rank],
                    "; these must be equal");
  const at::IntArrayRef inner = input.sizes().slice(1, input.dim() - 2);
  if (!inner.empty()) call.dims = c10::str(" dims=", inner);
  const Profiled profiled(call);
  compare_calls(call);
  if (debug_enabled()) call.group->compare_counts(send_rows, recv_rows, input.device().type());

  // A row of dim 0 is `each` rows of the flattened input.
  const int64_t each = c10::multiply_integers(inner);
  for (const int64_t rows : send_rows) call.send_rows.push_back(rows * each);
  for (const int64_t rows : recv_rows) call.recv_rows.push_back(rows * each);
  const int64_t received = c10::sum_integers(recv_rows);
  at::Tensor output;
  if (call.problem.n == 0 || each == 0) {
    compare_local_call(call);
    output = at::empty({received * each, call.problem.n}, call.output_options());
  } else if (call.problem.world_size == 1) {
    compare_local_call(call);
    output = local_gemm(call, true);
  } else {
    output = input.is_cpu() ? gemm_alltoall_cpu(call) : gemm_alltoall_cuda(call);
  }
  return as_shape_of(output, input, 0, received);
}

at::Tensor gemm_allreduce(const at::Tensor& input, const at::Tensor& weight,
                          const OptionalTensor& bias, const OptionalTensor& scale_input,
                          const OptionalTensor& scale_weight,
                          const std::optional<std::string>& invariance,
                          std::optional<int64_t> recipe_input, std::optional<int64_t> recipe_weight,
                          std::optional<int64_t> output_dtype, bool use_fast_accum,
                          const std::string& group_name) {
  const auto scales = given_scales("gemm_allreduce", scale_input, one(scale_weight), recipe_input,
                                   recipe_weight, output_dtype, use_fast_accum);
  return reduced(plan::Op::kGemmAllReduce, input, weight, bias, 0, invariance, group_name, scales);
}

at::Tensor gemm_reducescatter(const at::Tensor& input, const at::Tensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& scale_input,
                              const OptionalTensor& scale_weight, int64_t dim,
                              const std::optional<std::string>& invariance,
                              std::optional<int64_t> recipe_input,
                              std::optional<int64_t> recipe_weight,
                              std::optional<int64_t> output_dtype, bool use_fast_accum,
                              const std::string& group_name) {
  const auto scales = given_scales("gemm_reducescatter", scale_input, one(scale_weight),
                                   recipe_input, recipe_weight, output_dtype, use_fast_accum);
  return reduced(plan::Op::kGemmReduceScatter, input, weight, bias, dim, invariance, group_name,
                 scales);
}

// As many biases as there are weights.
std::vector<OptionalTensor> all_biases(const c10::List<OptionalTensor>& biases, size_t weights) {
  return biases.empty() ? std::vector<OptionalTensor>(weights) : biases.vec();
}

std::tuple<std::vector<at::Tensor>, at::Tensor> allgather_gemm_weights(
    const at::Tensor& input, at::TensorList weights, const c10::List<OptionalTensor>& biases,
    int64_t dim, const std::string& group_name) {
  AllGatherGemmResult result = gather_and_compute(
      input, weights.vec(), all_biases(biases, weights.size()), dim, group_name, std::nullopt);
  return {std::move(result.outputs), std::move(result.gathered)};
}

std::tuple<std::vector<at::Tensor>, at::Tensor, at::Tensor> allgather_gemm_scaled_weights(
    const at::Tensor& input, at::TensorList weights, const at::Tensor& scale_input,
    at::TensorList scale_weights, const c10::List<OptionalTensor>& biases,
    std::optional<int64_t> recipe_input, std::optional<int64_t> recipe_weight,
    std::optional<int64_t> output_dtype, bool use_fast_accum, bool shared_scale_input,
    const std::string& group_name) {
  const GivenScales scales = {scale_input,  scale_weights.vec(), recipe_input,      recipe_weight,
                              output_dtype, use_fast_accum,      shared_scale_input};
  AllGatherGemmResult result = gather_and_compute(
      input, weights.vec(), all_biases(biases, weights.size()), 0, group_name, scales);
  return {std::move(result.outputs), std::move(result.gathered), std::move(result.scales)};
}

std::tuple<at::Tensor, at::Tensor> allgather_gemm(const at::Tensor& input, const at::Tensor& weight,
                                                  const OptionalTensor& bias, int64_t dim,
                                                  const std::string& group_name) {
  AllGatherGemmResult result =
      gather_and_compute(input, {weight}, {bias}, dim, group_name, std::nullopt);
  return {std::move(result.outputs.front()), std::move(result.gathered)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> allgather_gemm_scaled(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scale_input,
    const at::Tensor& scale_weight, const OptionalTensor& bias, std::optional<int64_t> recipe_input,
    std::optional<int64_t> recipe_weight, std::optional<int64_t> output_dtype, bool use_fast_accum,
    bool shared_scale_input, const std::string& group_name) {
  const GivenScales scales = {scale_input,  {scale_weight}, recipe_input,      recipe_weight,
                              output_dtype, use_fast_accum, shared_scale_input};
  AllGatherGemmResult result = gather_and_compute(input, {weight}, {bias}, 0, group_name, scales);
  return {std::move(result.outputs.front()), std::move(result.gathered), std::move(result.scales)};
}

// The local product of the layers, whose group is one rank or whose gradients need no communication.
at::Tensor scaled_linear(const at::Tensor& input, const at::Tensor& weight,
                         const OptionalTensor& bias, const at::Tensor& scale_input,
                         const at::Tensor& scale_weight, std::optional<int64_t> recipe_input,
                         std::optional<int64_t> recipe_weight, std::optional<int64_t> output_dtype,
                         bool use_fast_accum) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK_VALUE(input.dim() >= 1 && weight.dim() == 2 && input.size(-1) == weight.size(1),
                    "scaled_linear: input must be [..., K] and weight [N, K], but got shapes ",
                    input.sizes(), " and ", weight.sizes());
  const Scales scales = check_scales(
      "scaled_linear", input, {weight},
      {scale_input, {scale_weight}, recipe_input, recipe_weight, output_dtype, use_fast_accum});
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
  const at::Tensor product =
      scaled_product(scales, 0, input.reshape({rows, input.size(-1)}), scales.input, weight, bias);
  return as_shape_of(product, input, 0, input.size(0));
}

// Casts all tensors as F.linear does under autocast, unless they have scales.
template <c10::DispatchKey kKey, at::DeviceType kDevice>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet{kKey});
  if (has_scales(op, *stack)) return op.callBoxed(stack);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const OptionalTensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& argument = torch::jit::peek(*stack, i, arguments);
    if (argument.isTensor()) {
      argument = *cast(argument.toTensor());
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> list = argument.toTensorVector();
      for (at::Tensor& tensor : list) tensor = *cast(tensor);
      argument = std::move(list);
    } else if (argument.isOptionalTensorList()) {
      c10::List<OptionalTensor> list;
      for (const auto& tensor : argument.toOptionalTensorVector()) list.push_back(cast(tensor));
      argument = list;
    }
  }
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY(overlap, m) {
  const auto def = [&](const std::string& schema) {
    m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  // Scales are of fp8 operands; only these have the keywords of `how`. Recipes are numbered as torch.nn.functional.ScalingType,
  // and dtypes as c10::ScalarType: AOTInductor takes no ScalarType of a custom op. Lists of optional scales it would not take.
  const std::string operands =
      "Tensor? bias=None, Tensor? scale_input=None, Tensor? scale_weight=None, *, ";
  const std::string how =
      "int? recipe_input=None, int? recipe_weight=None, int? output_dtype=None, bool "
      "use_fast_accum=False";
  def("gemm_allreduce(Tensor input, Tensor weight, " + operands + "str? invariance=None, " + how +
      ", str group) -> Tensor");
  def("gemm_reducescatter(Tensor input, Tensor weight, " + operands +
      "int dim=0, str? invariance=None, " + how + ", str group) -> Tensor");
  def("allgather_gemm(Tensor input, Tensor weight, Tensor? bias=None, *, int dim=0, str group) -> "
      "(Tensor, Tensor)");
  def("allgather_gemm.weights(Tensor input, Tensor[] weights, Tensor?[] biases, *, int dim=0, str "
      "group) -> (Tensor[], Tensor)");
  def("allgather_gemm.scaled(Tensor input, Tensor weight, Tensor scale_input, Tensor scale_weight, "
      "Tensor? bias=None, *, " +
      how + ", bool shared_scale_input=False, str group) -> (Tensor, Tensor, Tensor)");
  def("allgather_gemm.scaled_weights(Tensor input, Tensor[] weights, Tensor scale_input, Tensor[] "
      "scale_weights, Tensor?[] biases, *, " +
      how + ", bool shared_scale_input=False, str group) -> (Tensor[], Tensor, Tensor)");
  def("gemm_alltoall(Tensor input, Tensor weight, SymInt[] send_rows, SymInt[] recv_rows, " +
      operands + how + ", str group) -> Tensor");
  def("scaled_linear(Tensor input, Tensor weight, Tensor? bias, Tensor scale_input, Tensor "
      "scale_weight, *, " +
      how + ") -> Tensor");
  // On CPU by PyTorch's operators, in Python. Without a weight the input is what is added up. Results: the norm or its cast, the sum, the cast's
  // scales, and the norm that was cast.
  def("allreduce_rmsnorm(Tensor input, Tensor? weight, Tensor? residual, Tensor norm_weight, "
      "Tensor? bias=None, Tensor? scale=None, *, float eps=1e-6, float gain_offset=0.0, bool "
      "round_before_gain=False, str? quantize=None, bool return_norm=False, str? invariance=None, "
      "str group) -> Tensor[]");
}

// Ops of this package's own use.
TORCH_LIBRARY_FRAGMENT(overlap, m) {
  m.def("_make_ops_known() -> ()");  // Python's: see overlap_torch/_ops/dtensor.py
  m.def("check() -> ()", &check_cuda_groups);
  m.def("_compare_collective(str what, Device device, str group) -> ()", &compare_collective);
  m.def("_trace_start() -> ()", &TraceSwitch::start);
  m.def("_trace_stop() -> (Tensor, Dict(str, str)[])", &TraceSwitch::stop);
#if defined(OVERLAP_WITH_CUDA)
  m.def(
      "gemm_alone(Tensor input, Tensor weight, int[] plan, Tensor? scale_input=None, Tensor? "
      "scale_weight=None) -> Tensor",
      &gemm_alone);
#endif
}

template <c10::DispatchKey kAutocast, at::DeviceType kDevice>
void implement_autocast(torch::Library& m) {
  for (const char* op : {"gemm_allreduce", "gemm_reducescatter", "allgather_gemm",
                         "allgather_gemm.weights", "gemm_alltoall"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast<kAutocast, kDevice>>());
  }
}

void implement(torch::Library& m) {
  m.impl("gemm_allreduce", &gemm_allreduce);
  m.impl("gemm_reducescatter", &gemm_reducescatter);
  m.impl("allgather_gemm", &allgather_gemm);
  m.impl("allgather_gemm.weights", &allgather_gemm_weights);
  m.impl("gemm_alltoall", &gemm_alltoall);
  m.impl("allgather_gemm.scaled", &allgather_gemm_scaled);
  m.impl("allgather_gemm.scaled_weights", &allgather_gemm_scaled_weights);
  m.impl("scaled_linear", &scaled_linear);
}

TORCH_LIBRARY_IMPL(overlap, CPU, m) {
  implement(m);
}
TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  implement(m);
}
TORCH_LIBRARY_IMPL(overlap, AutocastCPU, m) {
  implement_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>(m);
}
TORCH_LIBRARY_IMPL(overlap, AutocastCUDA, m) {
  implement_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>(m);
}

}  // namespace overlap::binding
