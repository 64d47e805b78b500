// The parts of a mixture of experts that have kernels of their own on CUDA; overlap_torch/_moe has the same as compositions.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "binding/cuda/cuda_call.h"
#include "binding/cuda/moe_cuda.h"
#include "kernels/moe/moe.h"

namespace overlap::binding {

using at::Tensor;
using kernels::Element;

Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kFloat16;
    case at::kDouble:
      return Element::kFloat64;
    default:
      TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat,
                       "a mixture of experts takes bfloat16, float16, float32 or float64, not ",
                       tensor.scalar_type());
      return Element::kFloat32;
  }
}

at::ScalarType wide_of(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

kernels::SumParams sum_params(const Tensor& rows, int64_t tokens, int64_t choices) {
  kernels::SumParams params;
  params.element = element_of(rows);
  params.tokens = tokens;
  params.width = rows.size(1);
  params.choices = static_cast<int32_t>(choices);
  params.rows = rows.const_data_ptr();
  return params;
}

Tensor wide_shares(const std::optional<Tensor>& shares, const Tensor& rows) {
  return shares.has_value() ? shares->to(wide_of(rows)).contiguous() : Tensor();
}

namespace {

cudaStream_t stream() {
  return at::cuda::getCurrentCUDAStream();
}

Tensor longs(const Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(at::kLong));
}

Tensor ints(const Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(at::kInt));
}

}  // namespace

Routes find_routes(const Tensor& ids, at::IntArrayRef experts, bool tokens) {
  const auto ranks = static_cast<int64_t>(experts.size());
  TORCH_CHECK_VALUE(
      ranks >= 1 && ranks <= kernels::kMaxExpertRanks && ids.size(1) <= kernels::kMaxChoices,
      "a mixture of experts takes up to ", kernels::kMaxExpertRanks, " ranks and ",
      kernels::kMaxChoices, " experts of a token on CUDA, but got ", ranks, " and ", ids.size(1));
  kernels::RoutesParams params;
  params.experts.ranks = static_cast<int32_t>(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    params.experts.first[rank + 1] =
        params.experts.first[rank] + static_cast<int32_t>(experts[rank]);
    params.message_width = std::max(params.message_width, static_cast<int32_t>(experts[rank]) + 1);
  }
  params.ids = ids.const_data_ptr();
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.tokens = ids.size(0);
  params.choices = static_cast<int32_t>(ids.size(1));
  const Tensor scratch = ints(ids, {kernels::routes_scratch(params)});
  Routes found;
  found.experts = params.experts;
  found.message = longs(ids, {ranks, params.message_width});
  found.routes = longs(ids, {ids.numel()});
  params.scratch = scratch.data_ptr<int32_t>();
  params.message = found.message.data_ptr<int64_t>();
  params.routes = found.routes.data_ptr<int64_t>();
  if (tokens) {
    found.slots = ints(ids, {ids.numel()});
    found.sent = longs(ids, {ranks * params.tokens});
    params.slots = found.slots.data_ptr<int32_t>();
    params.sent = found.sent.data_ptr<int64_t>();
  } else {
    found.begins = longs(ids, {ranks + 1});
    params.begins = found.begins.data_ptr<int64_t>();
  }
  const cudaError_t error = kernels::find_routes(params, stream());
  TORCH_CHECK_VALUE(error != cudaErrorInvalidValue, "a mixture of ", params.experts.first[ranks],
                    " experts on ", ranks, " ranks and ", params.choices,
                    " experts of a token is too large for CUDA: their sum is to be at most 10000");
  C10_CUDA_CHECK(error);
  return found;
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> count_routes(const Tensor& ids,
                                                        at::IntArrayRef experts) {
  const c10::cuda::CUDAGuard guard(ids.device());
  const Routes found = find_routes(ids.contiguous(), experts, true);
  return {found.message, found.routes, found.slots, found.sent};
}

std::tuple<Tensor, Tensor, Tensor> count_arrivals(const Tensor& message, const Tensor& met,
                                                  int64_t experts, int64_t align) {
  const c10::cuda::CUDAGuard guard(message.device());
  kernels::ArrivalsParams params;
  params.ranks = static_cast<int32_t>(met.size(0));
  params.experts = static_cast<int32_t>(experts);
  params.message_width = static_cast<int32_t>(met.size(1));
  params.align = align;
  Tensor known = longs(met, {4 * met.size(0) + 1});
  Tensor offs = ints(met, {experts});
  Tensor counts = longs(met, {experts});
  params.message = message.const_data_ptr<int64_t>();
  params.met = met.const_data_ptr<int64_t>();
  params.known = known.data_ptr<int64_t>();
  params.offs = offs.data_ptr<int32_t>();
  params.counts = counts.data_ptr<int64_t>();
  C10_CUDA_CHECK(kernels::count_arrivals(params, stream()));
  return {known, offs, counts};
}

std::tuple<Tensor, Tensor> place_arrivals(const Tensor& met, const Tensor& offs,
                                          const Tensor& slots, int64_t rows, int64_t choices) {
  const c10::cuda::CUDAGuard guard(met.device());
  kernels::ArrivalsParams params;
  params.ranks = static_cast<int32_t>(met.size(0));
  params.experts = static_cast<int32_t>(offs.size(0));
  params.message_width = static_cast<int32_t>(met.size(1));
  params.choices = static_cast<int32_t>(choices);
  Tensor place = longs(met, {slots.numel()});
  Tensor source = longs(met, {rows});
  params.met = met.const_data_ptr<int64_t>();
  params.offs = offs.data_ptr<int32_t>();
  params.slots = slots.const_data_ptr<int32_t>();
  params.place = place.data_ptr<int64_t>();
  params.source = source.data_ptr<int64_t>();
  C10_CUDA_CHECK(kernels::place_arrivals(params, stream()));
  return {place, source};
}

Tensor gather_rows(const Tensor& source, const Tensor& index, int64_t divisor) {
  const c10::cuda::CUDAGuard guard(source.device());
  const Tensor from = source.contiguous();
  Tensor output = at::empty({index.numel(), source.size(1)}, source.options());
  kernels::RowsParams params;
  params.element = element_of(source);
  params.rows = index.numel();
  params.width = source.size(1);
  params.source = from.const_data_ptr();
  params.index = index.const_data_ptr<int64_t>();
  params.divisor = divisor;
  params.output = output.data_ptr();
  C10_CUDA_CHECK(kernels::gather_rows(params, stream()));
  return output;
}

// bfloat16 [R, K] to packed rows [R, K + bytes of scales]; rows from the last of `offs` on are undefined.
Tensor pack_rows(const Tensor& rows, const std::optional<Tensor>& offs, bool by_blocks) {
  const c10::cuda::CUDAGuard guard(rows.device());
  TORCH_CHECK_VALUE(rows.size(1) % 16 == 0 && rows.scalar_type() == at::kBFloat16,
                    "packed rows are made of a multiple of 16 bfloat16 numbers, not of ",
                    rows.size(1), " ", rows.scalar_type());
  const Tensor from = aligned(rows);
  const int64_t row_bytes = rows.size(1) + kernels::scale_bytes(rows.size(1), by_blocks);
  Tensor output = at::empty({rows.size(0), row_bytes}, rows.options().dtype(at::kFloat8_e4m3fn));
  kernels::PackParams params;
  params.by_blocks = by_blocks;
  params.rows = rows.size(0);
  params.width = rows.size(1);
  params.source = from.const_data_ptr();
  params.output = output.data_ptr();
  if (offs.has_value() && offs->numel() > 0) {
    params.end = offs->const_data_ptr<int32_t>() + offs->numel() - 1;
  }
  C10_CUDA_CHECK(kernels::pack_rows(params, stream()));
  return output;
}

Tensor sum_choices(const Tensor& rows, const Tensor& routes, const std::optional<Tensor>& shares,
                   int64_t tokens, int64_t choices, bool row_shares) {
  const c10::cuda::CUDAGuard guard(rows.device());
  const Tensor from = rows.contiguous();
  const Tensor wide = wide_shares(shares, rows);
  const Tensor where = longs(rows, {tokens * choices});
  Tensor output = at::empty({tokens, rows.size(1)}, rows.options());
  kernels::SumParams params = sum_params(from, tokens, choices);
  params.routes = routes.numel();
  params.route = routes.const_data_ptr<int64_t>();
  params.shares = wide.defined() ? wide.const_data_ptr() : nullptr;
  params.row_shares = row_shares;
  params.where = where.data_ptr<int64_t>();
  params.output = output.data_ptr();
  if (choices == 0) output.zero_();
  C10_CUDA_CHECK(kernels::sum_choices(params, stream()));
  return output;
}

std::tuple<Tensor, Tensor> weigh_rows(const Tensor& grad, const Tensor& results,
                                      const Tensor& shares) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const Tensor given = grad.contiguous();
  const Tensor other = results.contiguous();
  const Tensor wide = shares.to(wide_of(grad)).contiguous();
  Tensor scaled = at::empty_like(given);
  Tensor dots = at::zeros({grad.size(0), 1}, wide.options());
  kernels::WeighParams params;
  params.element = element_of(grad);
  params.rows = grad.size(0);
  params.width = grad.size(1);
  params.grad = given.const_data_ptr();
  params.results = other.const_data_ptr();
  params.shares = wide.const_data_ptr();
  params.scaled = scaled.data_ptr();
  params.dots = dots.data_ptr();
  C10_CUDA_CHECK(kernels::weigh_rows(params, stream()));
  return {scaled, dots};
}

kernels::Activation activation_of(c10::string_view name) {
  using kernels::Activation;
  for (const auto& [known, activation] :
       {std::pair<c10::string_view, Activation>{"", Activation::kNone},
        {"silu", Activation::kSilu},
        {"gelu", Activation::kGelu},
        {"gelu_tanh", Activation::kGeluTanh},
        {"relu", Activation::kRelu}}) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, "unknown activation ", name);
}

// The numbers of an operator's activation.
struct Form {
  c10::string_view activation;
  double alpha = 1.0;
  double limit = 0.0;
  double offset = 0.0;
  bool gated = false;
  bool interleaved = false;
};

void set_form(kernels::GateParams& params, const Form& form) {
  params.activation = activation_of(form.activation);
  params.alpha = form.alpha;
  params.limit = form.limit;
  params.offset = form.offset;
  params.interleaved = form.gated && form.interleaved;
}

// Where the up begins: in a tensor of its own, or after the gate's columns.
void* up_place(const Tensor& gate, const Tensor& up, int64_t width) {
  return up.defined() ? up.data_ptr()
                      : static_cast<char*>(gate.data_ptr()) + width * gate.element_size();
}

void set_experts(kernels::GateParams& params, const Tensor& offs) {
  params.offs = offs.const_data_ptr<int32_t>();
  params.experts = static_cast<int32_t>(offs.size(0));
}

// `bias` is contiguous, the gate's columns first unless they take turns with the up's.
void set_bias(kernels::GateParams& params, const Tensor& bias, bool gated, const Tensor& offs) {
  const int64_t to_up = params.width * bias.element_size();
  params.gate_bias = bias.const_data_ptr();
  params.up_bias = gated && !params.interleaved
                       ? static_cast<const char*>(bias.const_data_ptr()) + to_up
                       : nullptr;
  params.bias_stride = bias.size(1);
  set_experts(params, offs);
}

// Everything but the outputs. `hidden` and `up` are contiguous.
kernels::GateParams gate_params(const Tensor& hidden, const Tensor& up, const Tensor& bias,
                                const Tensor& offs, const Form& form) {
  kernels::GateParams params;
  params.element = element_of(hidden);
  set_form(params, form);
  params.rows = hidden.size(0);
  params.row_stride = hidden.size(1);
  params.width = form.gated && !up.defined() ? hidden.size(1) / 2 : hidden.size(1);
  params.gate = hidden.const_data_ptr();
  if (form.gated && !form.interleaved) params.up = up_place(hidden, up, params.width);
  if (bias.defined()) set_bias(params, bias, form.gated, offs);
  return params;
}

Tensor contiguous(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->contiguous() : Tensor();
}

Tensor gate(const Tensor& hidden, const std::optional<Tensor>& up,
            const std::optional<Tensor>& bias, const std::optional<Tensor>& shares,
            const Tensor& offs, c10::string_view name, double alpha, double limit, double offset,
            bool gated, bool interleaved) {
  const c10::cuda::CUDAGuard guard(hidden.device());
  const Tensor left = hidden.contiguous();
  const Tensor right = contiguous(up);
  const Tensor added = contiguous(bias);
  const Tensor wide = wide_shares(shares, hidden);
  kernels::GateParams params =
      gate_params(left, right, added, offs, Form{name, alpha, limit, offset, gated, interleaved});
  Tensor output = at::empty({params.rows, params.width}, hidden.options());
  params.shares = wide.defined() ? wide.const_data_ptr() : nullptr;
  params.output = output.data_ptr();
  C10_CUDA_CHECK(kernels::apply_gate(params, stream()));
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gate_backward(const Tensor& grad, const Tensor& hidden,
                                                         const std::optional<Tensor>& up,
                                                         const std::optional<Tensor>& bias,
                                                         const std::optional<Tensor>& shares,
                                                         const Tensor& offs, c10::string_view name,
                                                         double alpha, double limit, double offset,
                                                         bool gated, bool interleaved) {
  const c10::cuda::CUDAGuard guard(hidden.device());
  const Tensor given = grad.contiguous();
  const Tensor left = hidden.contiguous();
  const Tensor right = contiguous(up);
  const Tensor added = contiguous(bias);
  const Tensor wide = wide_shares(shares, hidden);
  kernels::GateParams params =
      gate_params(left, right, added, offs, Form{name, alpha, limit, offset, gated, interleaved});
  Tensor hidden_grad = at::empty_like(left);
  Tensor up_grad = right.defined() ? at::empty_like(right) : at::empty({0}, hidden.options());
  Tensor returned = at::empty({params.rows, params.width}, hidden.options());
  Tensor dots = at::empty({params.rows, 1}, hidden.options().dtype(wide_of(hidden)));
  params.grad = given.const_data_ptr();
  params.shares = wide.defined() ? wide.const_data_ptr() : nullptr;
  params.gate_grad = hidden_grad.data_ptr();
  params.up_grad = up_place(hidden_grad, right.defined() ? up_grad : Tensor(), params.width);
  params.grad_stride = params.row_stride;
  params.output = returned.data_ptr();
  params.dots = dots.data_ptr();
  C10_CUDA_CHECK(kernels::apply_gate_backward(params, stream()));
  return {hidden_grad, up_grad, returned, dots};
}

// [R, K] and [e, N, K] to [R, N]; gated, through gate and up: [R, N / 2], or [R, N] with an `up` [e, N, K] beside the gate. And what
// came before the gate, of each weight, if it is kept; else two empty tensors.
std::tuple<Tensor, Tensor, Tensor> grouped(
    const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& up,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& shares, const Tensor& offs,
    c10::string_view name, double alpha, double limit, double offset, bool gated, bool interleaved,
    bool keep, const std::optional<Tensor>& scale, const std::optional<Tensor>& up_scale) {
  const c10::cuda::CUDAGuard guard(rows.device());
  const Tensor added = contiguous(bias);
  const Tensor wide = wide_shares(shares, rows);
  kernels::GroupedGemmParams params = grouped_params(rows, weight, offs, scale);
  kernels::GateParams& gate = params.gate;
  const at::TensorOptions options = product_options(rows);
  Tensor kept = at::empty({0}, options);
  Tensor kept_up = kept;
  if (gated) {
    params.form = kernels::GroupedForm::kGate;
    set_form(gate, {name, alpha, limit, offset, gated, interleaved});
    gate.shares = wide.defined() ? wide.const_data_ptr() : nullptr;
    if (up.has_value()) {
      params.up_weight = up->const_data_ptr();
      if (up_scale.has_value()) params.up_scale = up_scale->const_data_ptr<float>();
    } else {
      gate.width /= 2;
    }
    if (keep) {
      kept = at::empty({params.rows, params.n}, options);
      if (up.has_value()) kept_up = at::empty_like(kept);
      gate.gate_grad = kept.data_ptr();
      gate.up_grad = up_place(kept, up.has_value() ? kept_up : Tensor(), gate.width);
      gate.grad_stride = params.n;
    }
  }
  if (added.defined()) set_bias(gate, added, gated, offs);
  Tensor output = at::empty({params.rows, gate.width}, options);
  gate.output = output.data_ptr();
  C10_CUDA_CHECK(kernels::launch_grouped_gemm(params, stream()));
  return {output, kept, kept_up};
}

// [R, N] and [R, K] to [e, N, K].
Tensor grouped_weights(const Tensor& grad, const Tensor& rows, const Tensor& offs) {
  const c10::cuda::CUDAGuard guard(rows.device());
  kernels::GroupedGemmParams params = grouped_params(rows, rows.unsqueeze(0), offs);
  params.form = kernels::GroupedForm::kWeights;
  params.input = grad.const_data_ptr();
  params.n = grad.size(1);
  params.gate.width = params.k;
  Tensor output = at::empty({offs.size(0), params.n, params.k}, rows.options());
  params.gate.output = output.data_ptr();
  C10_CUDA_CHECK(kernels::launch_grouped_gemm(params, stream()));
  return output;
}

}  // namespace

at::TensorOptions product_options(const Tensor& rows) {
  const bool packed = rows.scalar_type() == at::kFloat8_e4m3fn;
  return packed ? rows.options().dtype(at::kBFloat16) : rows.options();
}

kernels::GroupedGemmParams grouped_params(const Tensor& rows, const Tensor& weight,
                                          const Tensor& offs, const std::optional<Tensor>& scale) {
  TORCH_CHECK(has_kernels(rows.device()), "overlap_torch: this build has no kernels for ",
              rows.device());
  kernels::GroupedGemmParams params;
  params.rows = rows.size(0);
  params.k = weight.size(2);
  params.input = rows.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.turned = !weight.is_contiguous();
  if (scale.has_value()) {
    params.scale = scale->const_data_ptr<float>();
    params.by_blocks = scale->dim() == 3;
  }
  params.n = weight.size(1);
  params.gate.element = scale.has_value() ? Element::kBFloat16 : element_of(rows);
  params.gate.width = params.n;
  set_experts(params.gate, offs);
  params.ctas = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return params;
}

TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  if (kernels::kHasGroupedGemm) {
    m.impl("_moe_grouped", &grouped);
    m.impl("_moe_grouped_weights", &grouped_weights);
  }
  m.impl("_moe_count", &count_routes);
  m.impl("_moe_meet", &count_arrivals);
  m.impl("_moe_arrive", &place_arrivals);
  m.impl("_moe_rows", &gather_rows);
  m.impl("_moe_pack", &pack_rows);
  m.impl("_moe_sum", &sum_choices);
  m.impl("_moe_weigh", &weigh_rows);
  m.impl("_moe_gate", &gate);
  m.impl("_moe_gate_backward", &gate_backward);
}

}  // namespace overlap::binding
