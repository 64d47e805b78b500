// Scales of fp8 operands: their checks, and products of scaled operands on this rank.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "plan/plan.h"

namespace c10 {
class OperatorHandle;
}

namespace overlap::binding {

// A caller gives these beside the operands; recipes are numbered as in
// torch.nn.functional.ScalingType.
struct GivenScales {
  at::Tensor input;
  std::vector<at::Tensor> weights;
  std::optional<int64_t> recipe_input;
  std::optional<int64_t> recipe_weight;
  std::optional<int64_t> output_number;  // as c10::ScalarType; bfloat16 if there is none
  bool use_fast_accum = false;
  bool shared_input = false;  // allgather_gemm, tensor-wise: all ranks have the same input scale

  at::ScalarType output_dtype() const {
    return output_number ? static_cast<at::ScalarType>(*output_number) : at::kBFloat16;
  }
};

// The scales of a call; none if it has neither scales nor recipes. Throws ValueError if either scale is missing.
std::optional<GivenScales> given_scales(const char* op, const std::optional<at::Tensor>& input,
                                        std::optional<at::TensorList> weights,
                                        std::optional<int64_t> recipe_input,
                                        std::optional<int64_t> recipe_weight,
                                        std::optional<int64_t> output_dtype, bool use_fast_accum,
                                        bool shared_input = false);

// True if a call of an operator, whose arguments are on the stack, has scales.
bool has_scales(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack);

// The same, checked: contiguous float32 matrices, [1, 1] where one number scales all.
struct Scales {
  plan::Recipe recipe = plan::Recipe::kNone;
  at::Tensor input;  // [1, 1], [M, 1] or [M, ceil(K / 128)], M being this rank's rows
  std::vector<at::Tensor> weights;  // [1, 1], [N, 1] or [ceil(N / 128), ceil(K / 128)]
  at::ScalarType output_dtype = at::kBFloat16;
  bool use_fast_accum = false;
  bool shared_input = false;

  // The scales of rows [begin, begin + count) of this rank's input.
  at::Tensor of_rows(int64_t begin, int64_t count) const {
    return recipe == plan::Recipe::kTensor ? input : input.narrow(0, begin, count);
  }
};

// A recipe as torch.nn.functional.ScalingType numbers that of the input.
int64_t scaling_type_of_input(plan::Recipe recipe);

// Checks fp8 operands and their scales. Throws ValueError or TypeError that names the op, what was given and
// what is allowed. `input` is [..., K], the weights are [N, K].
Scales check_scales(const char* op, const at::Tensor& input, const std::vector<at::Tensor>& weights,
                    const GivenScales& given);

// input @ weight.T of scaled operands, plus bias, in the output's type. Sums are taken in float32, and the bias is added
// before they are rounded. The input's scales may also be [parts, 1], one for each of equal parts of
// its rows (gathered ones).
at::Tensor scaled_product(const Scales& scales, size_t weight_number, const at::Tensor& input,
                          const at::Tensor& input_scales, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias);

// The same, into `output`, which is contiguous.
void scaled_product_out(at::Tensor& output, const Scales& scales, size_t weight_number,
                        const at::Tensor& input, const at::Tensor& input_scales,
                        const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The same by PyTorch's own scaled GEMM, where the device has one for these operands. On CUDA only; input scales are
// [1, 1], [rows, 1] or [rows, ceil(K / 128)]. Into `output`, where that is given and the product needs no more.
std::optional<at::Tensor> device_scaled_product(const Scales& scales, const at::Tensor& input,
                                                const at::Tensor& input_scales,
                                                const at::Tensor& weight,
                                                const at::Tensor& weight_scales,
                                                const std::optional<at::Tensor>& bias,
                                                at::Tensor* output = nullptr);

}  // namespace overlap::binding
