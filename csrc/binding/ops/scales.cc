#include "binding/ops/scales.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>

#include "binding/ops/groups.h"

namespace overlap::binding {
namespace {

using plan::Recipe;

constexpr int64_t kBlock = 128;

// torch.nn.functional.ScalingType
constexpr std::array kScalingTypes = {"TensorWise",    "RowWise",        "BlockWise1x16",
                                      "BlockWise1x32", "BlockWise1x128", "BlockWise128x128"};

// The numbers of the input's and the weight's ScalingType.
struct Types {
  Recipe recipe;
  int64_t input;
  int64_t weight;
};
constexpr std::array kRecipes = {Types{Recipe::kTensor, 0, 0}, Types{Recipe::kRow, 1, 1},
                                 Types{Recipe::kBlock, 4, 5}};

int64_t blocks(int64_t size) {
  return (size + kBlock - 1) / kBlock;
}

std::string scaling_type(int64_t number) {
  const bool known = number >= 0 && number < static_cast<int64_t>(kScalingTypes.size());
  return known ? kScalingTypes[static_cast<size_t>(number)] : c10::str("of number ", number);
}

// The recipe of this number of an operand's ScalingType; `name`: the argument that gave it.
Recipe recipe_of(const char* op, const char* name, int64_t number, int64_t Types::* of_operand) {
  std::string supported;
  for (const Types& types : kRecipes) {
    if (types.*of_operand == number) return types.recipe;
    supported += supported.empty() ? "" : types.recipe == Recipe::kBlock ? " and " : ", ";
    supported += scaling_type(types.*of_operand);
  }
  TORCH_CHECK_VALUE(false, op, ": ", name, " is ", scaling_type(number), "; supported are ",
                    supported);
}

bool is_one(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes) == 1;
}

// [rows, columns], or with the input's own leading dims.
bool is_matrix(at::IntArrayRef sizes, at::IntArrayRef leading, int64_t columns) {
  if (sizes.empty() || sizes.back() != columns) return false;
  const at::IntArrayRef before = sizes.slice(0, sizes.size() - 1);
  return before == leading || (before.size() == 1 && before[0] == c10::multiply_integers(leading));
}

bool fits_input(Recipe recipe, at::IntArrayRef sizes, at::IntArrayRef input) {
  const at::IntArrayRef leading = input.slice(0, input.size() - 1);
  switch (recipe) {
    case Recipe::kTensor:
      return is_one(sizes);
    case Recipe::kRow:
      return is_matrix(sizes, leading, 1) ||
             (sizes.size() == 1 && sizes[0] == c10::multiply_integers(leading));
    default:
      return is_matrix(sizes, leading, blocks(input.back()));
  }
}

bool fits_weight(Recipe recipe, at::IntArrayRef sizes, at::IntArrayRef weight) {
  const int64_t n = weight[0];
  const at::IntArrayRef rows = weight.slice(0, 1);
  switch (recipe) {
    case Recipe::kTensor:
      return is_one(sizes);
    case Recipe::kRow:
      return is_matrix(sizes, rows, 1) || (sizes.size() == 1 && sizes[0] == n);
    default:
      return sizes == at::IntArrayRef({blocks(n), blocks(weight[1])});
  }
}

// The shapes that a recipe's scales have, for messages.
std::string shapes_of(Recipe recipe, const at::Tensor& input, const at::Tensor& weight) {
  const int64_t m = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
  const int64_t n = weight.size(0);
  const int64_t k_blocks = blocks(weight.size(1));
  switch (recipe) {
    case Recipe::kTensor:
      return "one number each (TensorWise)";
    case Recipe::kRow:
      return c10::str("[", m, ", 1] and [", n, ", 1] (RowWise)");
    default:
      return c10::str("[", m, ", ", k_blocks, "] and [", blocks(n), ", ", k_blocks,
                      "] (BlockWise1x128 and BlockWise128x128)");
  }
}

std::string shapes_of(const std::vector<Recipe>& recipes, const at::Tensor& input,
                      const at::Tensor& weight, const char* between) {
  std::string shapes;
  for (const Recipe recipe : recipes) {
    shapes += (shapes.empty() ? "" : between) + shapes_of(recipe, input, weight);
  }
  return shapes;
}

void check_scale(const char* op, const char* name, const at::Tensor& scale,
                 const at::Tensor& input) {
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat, op, ": ", name, " is ", scale.scalar_type(),
                   "; scales are float32");
  TORCH_CHECK_VALUE(scale.device() == input.device(), op, ": input is on ", input.device(), " but ",
                    name, " on ", scale.device(), "; move them to one device");
  TORCH_CHECK_VALUE(scale.layout() == at::kStrided, op,
                    ": only dense tensors are supported, but the layout of ", name, " is ",
                    scale.layout());
}

// One recipe for all operands, from what is named and what the scales' shapes leave.
Recipe recipe_of(const char* op, const at::Tensor& input, const std::vector<at::Tensor>& weights,
                 const GivenScales& given) {
  std::optional<Recipe> named;
  if (given.recipe_input) named = recipe_of(op, "recipe_input", *given.recipe_input, &Types::input);
  if (given.recipe_weight) {
    const Recipe of_weight = recipe_of(op, "recipe_weight", *given.recipe_weight, &Types::weight);
    TORCH_CHECK_VALUE(!named || *named == of_weight, op, ": recipe_input is ",
                      scaling_type(*given.recipe_input), " but recipe_weight ",
                      scaling_type(*given.recipe_weight),
                      "; supported are TensorWise for both, RowWise for both, and BlockWise1x128 "
                      "with BlockWise128x128");
    named = of_weight;
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    std::vector<Recipe> possible;
    for (const Types& types : kRecipes) {
      if (!named || types.recipe == *named) possible.push_back(types.recipe);
    }
    std::vector<Recipe> fitting;
    for (const Recipe recipe : possible) {
      if (fits_input(recipe, given.input.sizes(), input.sizes()) &&
          fits_weight(recipe, given.weights[i].sizes(), weights[i].sizes())) {
        fitting.push_back(recipe);
      }
    }
    TORCH_CHECK_VALUE(!fitting.empty(), op, ": input ", input.sizes(), " and weight ",
                      weights[i].sizes(), " have scales of shapes ", given.input.sizes(), " and ",
                      given.weights[i].sizes(), "; they must be ",
                      shapes_of(possible, input, weights[i], ", or "));
    TORCH_CHECK_VALUE(fitting.size() == 1, op, ": scales of shapes ", given.input.sizes(), " and ",
                      given.weights[i].sizes(), " fit two recipes, ",
                      shapes_of(fitting, input, weights[i], " and "),
                      "; name recipe_input, a torch.nn.functional.ScalingType");
    named = fitting[0];
  }
  return *named;
}

// Scales as a contiguous matrix; most are one.
at::Tensor as_matrix(const at::Tensor& scales, int64_t rows, int64_t columns) {
  if (scales.sizes() == at::IntArrayRef({rows, columns}) && scales.is_contiguous()) return scales;
  return scales.reshape({rows, columns}).contiguous();
}

// Each of `blocks` rows or columns stands for 128 of them, `size` in all.
at::Tensor spread(const at::Tensor& scales, int64_t dim, int64_t size) {
  return scales.repeat_interleave(kBlock, dim).narrow(dim, 0, size);
}

// Dequantised operands. Scales of whole rows multiply the sums, as in GEMM kernels.
at::Tensor dequantised_product(const Scales& scales, const at::Tensor& input,
                               const at::Tensor& input_scales, const at::Tensor& weight,
                               const at::Tensor& weight_scales,
                               const std::optional<at::Tensor>& bias) {
  at::Tensor left = input.to(at::kFloat);
  at::Tensor right = weight.to(at::kFloat);
  const bool by_blocks = scales.recipe == Recipe::kBlock;
  if (by_blocks) {
    left.mul_(spread(input_scales, 1, left.size(1)));
    right.mul_(spread(spread(weight_scales, 0, right.size(0)), 1, right.size(1)));
  }
  at::Tensor sums = at::mm(left, right.t());
  if (!by_blocks) sums.mul_(input_scales).mul_(weight_scales.t());
  if (bias.has_value()) sums.add_(*bias);
  return sums.to(scales.output_dtype);
}

}  // namespace

std::optional<GivenScales> given_scales(const char* op, const std::optional<at::Tensor>& input,
                                        std::optional<at::TensorList> weights,
                                        std::optional<int64_t> recipe_input,
                                        std::optional<int64_t> recipe_weight,
                                        std::optional<int64_t> output_dtype, bool use_fast_accum,
                                        bool shared_input) {
  if (!input && !weights && !recipe_input && !recipe_weight) return std::nullopt;
  TORCH_CHECK_VALUE(input && weights, op, ": ", input ? "scale_weight" : "scale_input",
                    " is None, but scaled operands need scale_input and scale_weight, and operands "
                    "without scales take no recipes; give both scales, or none of these");
  return GivenScales{*input,       weights->vec(), recipe_input, recipe_weight,
                     output_dtype, use_fast_accum, shared_input};
}

bool has_scales(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack) {
  const auto place = op.schema().argumentIndexWithName("scale_input");
  const size_t arguments = op.schema().arguments().size();
  return place && !torch::jit::peek(stack, static_cast<size_t>(*place), arguments).isNone();
}

int64_t scaling_type_of_input(Recipe recipe) {
  return std::ranges::find(kRecipes, recipe, &Types::recipe)->input;
}

Scales check_scales(const char* op, const at::Tensor& input, const std::vector<at::Tensor>& weights,
                    const GivenScales& given) {
  for (const at::Tensor& weight : weights) {
    TORCH_CHECK_TYPE(is_fp8(input.scalar_type()) && is_fp8(weight.scalar_type()), op,
                     ": scales are for fp8 operands, but input is ", input.scalar_type(),
                     " and weight ", weight.scalar_type(),
                     "; supported are Float8_e4m3fn and Float8_e5m2");
    TORCH_CHECK_TYPE(
        input.scalar_type() == at::kFloat8_e4m3fn || weight.scalar_type() == at::kFloat8_e4m3fn, op,
        ": input and weight are both Float8_e5m2, which no GEMM takes; one of them must be "
        "Float8_e4m3fn");
  }
  const at::ScalarType out = given.output_dtype();
  TORCH_CHECK_TYPE(out == at::kBFloat16 || out == at::kHalf || out == at::kFloat, op,
                   ": output_dtype is ", out, "; supported are bfloat16, float16 and float32");
  TORCH_CHECK_VALUE(given.weights.size() == weights.size(), op, ": scale_weight must hold ",
                    weights.size(), " tensors, one for each weight, but holds ",
                    given.weights.size());
  check_scale(op, "scale_input", given.input, input);
  for (const at::Tensor& scale : given.weights) check_scale(op, "scale_weight", scale, input);

  Scales scales;
  scales.recipe = recipe_of(op, input, weights, given);
  TORCH_CHECK_VALUE(!given.shared_input || scales.recipe == Recipe::kTensor, op,
                    ": shared_scale_input is for TensorWise scales, but these are ",
                    shapes_of(scales.recipe, input, weights.front()));
  const bool one = scales.recipe == Recipe::kTensor;
  const int64_t columns = scales.recipe == Recipe::kBlock ? blocks(input.size(-1)) : 1;
  const int64_t m = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
  scales.input = as_matrix(given.input, one ? 1 : m, columns);
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t n = weights[i].size(0);
    const int64_t rows = one ? 1 : scales.recipe == Recipe::kBlock ? blocks(n) : n;
    scales.weights.push_back(as_matrix(given.weights[i], rows, columns));
  }
  scales.output_dtype = out;
  scales.use_fast_accum = given.use_fast_accum;
  scales.shared_input = given.shared_input;
  return scales;
}

namespace {

// Into `output`, where that is given and the product needs no more.
at::Tensor product_of(const Scales& scales, size_t weight_number, const at::Tensor& input,
                      const at::Tensor& input_scales, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, at::Tensor* output) {
  const at::Tensor& weight_scales = scales.weights[weight_number];
  at::Tensor row_scales = input_scales;
  // One number for each part of the rows: each row has its part's.
  const int64_t parts = input_scales.size(0);
  if (scales.recipe == Recipe::kTensor && parts > 1) {
    row_scales = input_scales.repeat_interleave(input.size(0) / parts, 0);
  }
  if (input.is_cuda()) {
    if (auto product =
            device_scaled_product(scales, input, row_scales, weight, weight_scales, bias, output)) {
      return *product;
    }
  }
  return dequantised_product(scales, input, row_scales, weight, weight_scales, bias);
}

}  // namespace

at::Tensor scaled_product(const Scales& scales, size_t weight_number, const at::Tensor& input,
                          const at::Tensor& input_scales, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias) {
  return product_of(scales, weight_number, input, input_scales, weight, bias, nullptr);
}

void scaled_product_out(at::Tensor& output, const Scales& scales, size_t weight_number,
                        const at::Tensor& input, const at::Tensor& input_scales,
                        const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const at::Tensor product =
      product_of(scales, weight_number, input, input_scales, weight, bias, &output);
  if (!product.is_same(output)) output.copy_(product);
}

}  // namespace overlap::binding
