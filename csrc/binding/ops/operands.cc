#include "binding/ops/operands.h"

#include <c10/util/accumulate.h>

#include "binding/ops/environment.h"

namespace overlap::binding {
namespace {

void check_input(const char* op, const at::Tensor& input, bool scaled) {
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must be [..., K], but got shape ",
                    input.sizes());
  TORCH_CHECK_TYPE(scaled || !is_fp8(input.scalar_type()), op, ": input is ", input.scalar_type(),
                   ", which takes scales: give scale_input and scale_weight");
  TORCH_CHECK_TYPE(scaled || has_plan_dtype(input.scalar_type()), op, ": input is ",
                   input.scalar_type(), "; supported are bfloat16, float16, float32 and float64");
  TORCH_CHECK_VALUE(input.layout() == at::kStrided, op,
                    ": only dense tensors are supported, but input's layout is ", input.layout());
}

// `scaled_output`: the type of the output of scaled operands.
void check_weight(const char* op, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias,
                  std::optional<at::ScalarType> scaled_output) {
  TORCH_CHECK_VALUE(weight.dim() == 2, op,
                    ": input must be [..., K] and weight [N, K], but got shapes ", input.sizes(),
                    " and ", weight.sizes());
  TORCH_CHECK_VALUE(input.size(-1) == weight.size(1), op,
                    ": the last dims of input and weight must be equal, but got shapes ",
                    input.sizes(), " and ", weight.sizes());
  TORCH_CHECK_TYPE(scaled_output || weight.scalar_type() == input.scalar_type(), op, ": input is ",
                   input.scalar_type(), " but weight is ", weight.scalar_type(),
                   "; convert one of them, or use torch.autocast");
  TORCH_CHECK_VALUE(weight.device() == input.device(), op, ": input is on ", input.device(),
                    " but weight on ", weight.device(), "; move them to one device");
  TORCH_CHECK_VALUE(weight.layout() == at::kStrided, op,
                    ": only dense tensors are supported, but weight's layout is ", weight.layout());
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must be [N] = [", weight.size(0), "], but got shape ", bias->sizes());
  const at::ScalarType type = scaled_output.value_or(input.scalar_type());
  TORCH_CHECK_TYPE(bias->scalar_type() == type, op, ": ", scaled_output ? "output_dtype" : "input",
                   " is ", type, " but bias is ", bias->scalar_type(), "; convert one of them");
  TORCH_CHECK_VALUE(bias->device() == input.device(), op, ": input is on ", input.device(),
                    " but bias on ", bias->device(), "; move them to one device");
}

// [..., K] -> [M, K] without a copy where strides allow it.
at::Tensor as_rows(const at::Tensor& input) {
  if (input.dim() == 2) return input;
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < input.dim(); ++dim) rows *= input.size(dim);
  return input.reshape({rows, input.size(-1)});
}

}  // namespace

OpCall make_call(plan::Op op, const at::Tensor& input, std::vector<at::Tensor> weights,
                 std::vector<std::optional<at::Tensor>> biases, const std::string& group_name,
                 const std::optional<GivenScales>& scales) {
  const char* name = plan::name(op);
  check_input(name, input, scales.has_value());
  TORCH_CHECK_VALUE(!weights.empty(), name, ": weights must hold one tensor or more");
  TORCH_CHECK_VALUE(biases.size() == weights.size(), name, ": biases must be empty or ",
                    weights.size(), ", one for each weight, but there are ", biases.size());
  const auto scaled_output = scales ? std::optional(scales->output_dtype()) : std::nullopt;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_weight(name, input, weights[i], biases[i], scaled_output);
  }
  std::optional<Scales> checked;
  if (scales) {
    checked = check_scales(name, input, weights, *scales);
    // GPUs' GEMMs of scaled operands take weights along K: once in a call, and not for each chunk.
    for (at::Tensor& weight : weights) {
      if (weight.is_cuda() && weight.size(1) > 1 && weight.stride(1) != 1) {
        weight = weight.contiguous();
      }
    }
  }

  OpCall call{as_rows(input),
              std::move(weights),
              std::move(biases),
              find_group(group_name),
              {},
              {},
              {},
              {},
              std::move(checked)};
  call.problem.op = op;
  call.problem.m = call.input.size(0);
  for (const at::Tensor& weight : call.weights) call.problem.n += weight.size(0);
  call.problem.k = input.size(-1);
  call.problem.dtype = to_plan_dtype(input.scalar_type());
  call.problem.world_size = call.group->world_size();
  if (call.scales) {
    call.problem.recipe = call.scales->recipe;
    call.problem.fast_accum = call.scales->use_fast_accum;
  }
  call.problem.output_dtype = to_plan_dtype(call.output_dtype());
  return call;
}

void set_invariance(plan::Problem& problem, const char* op,
                    const std::optional<std::string>& given) {
  problem.invariance = environment().invariance;
  if (given) {
    const auto asked = invariance_named(*given);
    TORCH_CHECK_VALUE(asked.has_value(), op, ": invariance is '", *given,
                      "'; allowed are None, which leaves it to OVERLAP_INVARIANCE, 'none', 'batch' "
                      "and 'world'");
    problem.invariance = *asked;
  }
  if (problem.invariance != plan::Invariance::kWorld) return;
  try {
    plan::check_problem(problem);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, op, ": ", error.what());
  }
}

int64_t row_dim(plan::Op op, const at::Tensor& input, int64_t dim, bool scaled) {
  TORCH_CHECK_VALUE(!scaled || dim == 0, plan::name(op),
                    ": with scaled operands dim must be 0, but is ", dim, "; move it to the front");
  TORCH_CHECK_VALUE(
      input.dim() >= 2, plan::name(op),
      ": input must be [D0, ..., K], because dim 0 is cut between the ranks, but got shape ",
      input.sizes());
  const int64_t from_front = dim < 0 ? dim + input.dim() : dim;
  TORCH_CHECK_VALUE(from_front >= 0 && from_front < input.dim() - 1, plan::name(op),
                    ": dim must be one of the input's before the last, but is ", dim,
                    " and the input's shape is ", input.sizes());
  return from_front;
}

void set_blocks(OpCall& call, const at::Tensor& input, int64_t dim) {
  if (dim == 0 || call.problem.world_size == 1) return;
  call.blocks = c10::multiply_integers(input.sizes().slice(0, dim));
  if (call.blocks > 1) call.dims = c10::str(" blocks=", call.blocks);
}

void check_counts(const char* name, at::IntArrayRef rows, const GroupEntry& group) {
  const auto world_size = static_cast<size_t>(group.world_size());
  TORCH_CHECK_VALUE(rows.size() == world_size, "gemm_alltoall: ", name, " must hold ", world_size,
                    " counts, one for each rank of group '", group.name(), "', but is ", rows);
  for (const int64_t count : rows) {
    TORCH_CHECK_VALUE(count >= 0, "gemm_alltoall: ", name, " must not be negative, but is ", rows);
  }
}

at::Tensor as_shape_of(const at::Tensor& rows, const at::Tensor& input, int64_t dim, int64_t size) {
  if (input.dim() == 2) return rows;
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  sizes.back() = rows.size(1);
  return rows.view(sizes);
}

namespace {

// [outer, inner, rows, columns] as [inner, outer, rows, columns].
at::Tensor swapped(const at::Tensor& rows, int64_t outer, int64_t inner) {
  const int64_t each = rows.size(0) / (outer * inner);
  return rows.view({outer, inner, each, rows.size(1)})
      .transpose(0, 1)
      .reshape({rows.size(0), rows.size(1)});
}

}  // namespace

at::Tensor parts_of_blocks(const OpCall& call, const at::Tensor& rows) {
  return call.blocks == 1 ? rows : swapped(rows, call.blocks, call.problem.world_size);
}

at::Tensor blocks_of_parts(const OpCall& call, const at::Tensor& rows) {
  return call.blocks == 1 ? rows : swapped(rows, call.problem.world_size, call.blocks);
}

}  // namespace overlap::binding
