// allreduce_rmsnorm: an all-reduce, or a GEMM and its all-reduce, whose rows the kernels of peer_finish.h finish.
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "binding/cuda/cuda_call.h"
#include "binding/ops/operands.h"
#include "binding/ops/profiled.h"
#include "kernels/peer/peer_finish.h"

namespace overlap::binding {
namespace {

constexpr const char* kOp = "allreduce_rmsnorm";
constexpr int64_t kBlock = 128;  // columns that share a scale

// Planned as an all-reduce after a GEMM, of K = 0 if the caller gives what is added up.
OpCall call_of(const at::Tensor& input, const std::optional<at::Tensor>& weight,
               const std::optional<std::string>& invariance, const std::string& group_name) {
  OpCall call;
  if (weight) {
    call = make_call(plan::Op::kGemmAllReduce, input, {*weight}, {std::nullopt}, group_name);
  } else {
    TORCH_CHECK_VALUE(input.dim() >= 1 && input.layout() == at::kStrided, kOp,
                      ": input must be dense, [..., N], but got the shape ", input.sizes(),
                      " and the layout ", input.layout());
    const int64_t rows = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
    call.input = input.reshape({rows, input.size(-1)});
    call.biases = {std::nullopt};
    call.group = find_group(group_name);
    call.problem.m = rows;
    call.problem.n = input.size(-1);
    call.problem.dtype = call.problem.output_dtype = to_plan_dtype(input.scalar_type());
    call.problem.world_size = call.group->world_size();
  }
  TORCH_CHECK_VALUE(kernels::finish_takes(call.problem.dtype, call.problem.n), kOp,
                    ": the kernels take rows of bfloat16 and float16, of N columns, a multiple of ",
                    kernels::kFinishGrain, " up to ", kernels::kMostFinishColumns, ", but got ",
                    input.scalar_type(), " and N = ", call.problem.n, "; leave fused out");
  TORCH_CHECK_NOT_IMPLEMENTED(has_kernels(input.device()), kOp, ": this build has no kernels for ",
                              input.device(), "; leave fused out");
  set_invariance(call.problem, kOp, invariance);
  call.dims = " with a norm";
  return call;
}

// An operand as the kernels read it; undefined where there is none.
at::Tensor checked(const char* name, const std::optional<at::Tensor>& operand,
                   at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& input) {
  if (!operand) return {};
  TORCH_CHECK_VALUE(operand->sizes() == sizes, kOp, ": ", name, " must have the shape ", sizes,
                    ", but has ", operand->sizes());
  TORCH_CHECK_TYPE(operand->scalar_type() == dtype, kOp, ": ", name, " is ", operand->scalar_type(),
                   ", but must be ", dtype, "; convert it");
  TORCH_CHECK_VALUE(operand->device() == input.device(), kOp, ": ", name, " is on ",
                    operand->device(), ", but input on ", input.device(),
                    "; move them to one device");
  return aligned(*operand);
}

const void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

std::vector<at::Tensor> allreduce_rmsnorm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& given_residual, const at::Tensor& norm_weight,
    const std::optional<at::Tensor>& given_bias, const std::optional<at::Tensor>& given_scale,
    double eps, double gain_offset, bool round_before_gain,
    const std::optional<std::string>& quantize, bool return_norm,
    const std::optional<std::string>& invariance, const std::string& group_name) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::cuda::CUDAGuard guard(input.device());
  OpCall call = call_of(input, weight, invariance, group_name);
  const auto [rows, columns] = std::pair(call.problem.m, call.problem.n);
  const std::string cast = quantize.value_or("");
  const bool by_rows = cast == "rowwise";
  const bool by_blocks = cast == "blockwise";
  TORCH_CHECK_VALUE(!quantize || by_rows || by_blocks || cast == "tensorwise", kOp,
                    ": quantize is '", cast,
                    "'; allowed are None, 'tensorwise', 'rowwise' and 'blockwise'");
  TORCH_CHECK_VALUE((cast == "tensorwise") == given_scale.has_value(), kOp,
                    ": give a scale with quantize='tensorwise', and with nothing else");

  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = columns;
  const at::ScalarType dtype = input.scalar_type();
  const at::Tensor gain = checked("norm_weight", norm_weight, {columns}, dtype, input);
  const at::Tensor bias = checked("bias", given_bias, {columns}, dtype, input);
  const at::Tensor residual = checked("residual", given_residual, sizes, dtype, input);
  const at::Tensor scale =
      checked("scale", given_scale,
              given_scale && given_scale->numel() == 1 ? given_scale->sizes() : at::IntArrayRef(),
              at::kFloat, input);
  const at::TensorOptions options = input.options();
  at::Tensor normed, values, scales;
  if (!quantize || return_norm) normed = empty({rows, columns}, options);
  if (quantize) values = empty({rows, columns}, options.dtype(at::kFloat8_e4m3fn));
  if (by_rows) scales = empty({rows, 1}, options.dtype(at::kFloat));
  if (by_blocks) {
    scales = empty({(columns + kBlock - 1) / kBlock, rows}, options.dtype(at::kFloat)).t();
  }

  kernels::FinishParams finish;
  finish.dtype = call.problem.dtype;
  finish.rows = rows;
  finish.columns = columns;
  finish.bias = pointer(bias);
  finish.residual = pointer(residual);
  finish.gain = pointer(gain);
  finish.eps = static_cast<float>(eps);
  finish.gain_offset = static_cast<float>(gain_offset);
  finish.round_before_gain = round_before_gain;
  if (normed.defined()) finish.normed = normed.data_ptr();
  if (values.defined()) finish.values = values.data_ptr();
  if (scale.defined()) finish.given_scale = scale.const_data_ptr<float>();
  if (scales.defined()) finish.scales = scales.data_ptr<float>();
  finish.by_blocks = by_blocks;
  call.finish = &finish;

  const Profiled profiled(call);
  compare_calls(call);
  const bool local = rows == 0 || call.problem.world_size == 1 || (weight && call.problem.k == 0);
  if (local) compare_local_call(call);
  const at::Tensor sum = local ? local_gemm(call, false) : gemm_allreduce_cuda(call);
  if (finish.sum == nullptr) {
    finish.terms = finish.sum = sum.data_ptr();
    C10_CUDA_CHECK(kernels::finish_rows(finish, c10::cuda::getCurrentCUDAStream()));
  }

  const auto shaped = [&](const at::Tensor& of_rows) {
    return as_shape_of(of_rows, input, 0, input.size(0));
  };
  std::vector<at::Tensor> results = {shaped(quantize ? values : normed), shaped(sum)};
  if (scales.defined()) results.push_back(shaped(scales));
  if (quantize && return_norm) results.push_back(shaped(normed));
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  m.impl("allreduce_rmsnorm", &allreduce_rmsnorm);
}

}  // namespace overlap::binding
