// The gradients of ops: reverse mode, of any order.
//
// An op is linear in its input and in its weight, so its gradients are products of the same kind. A tensor is either this
// rank's own or replicated. A replicated tensor counts once in the differentiated function, and every rank has its whole
// gradient. Therefore an op that sums over the ranks has gradients that do not, and the reverse:
//
//   gemm_allreduce       grad @ weight, grad.T @ input             no communication
//   gemm_reducescatter   gathered, g = allgather_gemm(grad, weight.T);  g.T @ input
//   allgather_gemm       gemm_reducescatter(grad, weight.T);  grad.T @ all_gather(input)
//   gemm_alltoall        the gradient's rows go back;  the rest as gemm_allreduce's
//
// A gradient that may be differentiated again takes the same lines, by operators that record, and `collective` in place of
// plain collectives. They communicate or not depending on requires_grad and on which outputs were used, which all ranks share.
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "binding/ops/collectives.h"
#include "binding/ops/nodes.h"
#include "binding/ops/scales.h"

namespace overlap::binding {
namespace {

using torch::autograd::Edge;
using torch::autograd::SavedVariable;
using OptionalTensor = std::optional<at::Tensor>;

enum class Gradient { kLocal, kGathers, kScatters, kSendsBack };

Gradient gradient_of(const std::string& op) {
  if (op == "overlap::gemm_allreduce") return Gradient::kLocal;
  if (op == "overlap::gemm_reducescatter") return Gradient::kGathers;
  return op == "overlap::allgather_gemm" ? Gradient::kScatters : Gradient::kSendsBack;
}

std::string without_library(const std::string& op) {
  return op.substr(op.rfind(':') + 1);
}

// A call's arguments, by the names of the op's schema.
struct Call {
  std::string op;
  std::string group;
  int64_t dim = 0;
  std::vector<c10::SymInt> send_rows;
  std::vector<c10::SymInt> recv_rows;
  at::Tensor input;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;  // as many as weights, undefined where there is none

  void set_bias(size_t i, const OptionalTensor& bias) {
    if (biases.size() <= i) biases.resize(i + 1);
    if (bias) biases[i] = *bias;
  }
};

void take(Call& call, const std::string& name, const c10::IValue& value) {
  if (value.isNone()) return;
  if (name == "input") call.input = value.toTensor();
  if (name == "weight") call.weights = {value.toTensor()};
  if (name == "weights") call.weights = value.toTensorVector();
  if (name == "bias") call.set_bias(0, value.toOptional<at::Tensor>());
  if (name == "biases") {
    size_t i = 0;
    for (const OptionalTensor& bias : value.toOptionalTensorVector()) call.set_bias(i++, bias);
  }
  if (name == "send_rows") call.send_rows = value.toSymIntVector();
  if (name == "recv_rows") call.recv_rows = value.toSymIntVector();
  if (name == "dim") call.dim = value.toInt();
  if (name == "group") call.group = value.toStringRef();
}

Call read(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Call call;
  call.op = op.schema().name();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    take(call, arguments[i].name(), torch::jit::peek(stack, i, arguments.size()));
  call.biases.resize(call.weights.size());
  return call;
}

// [..., C] -> [rows, C].
at::Tensor rows(const at::Tensor& tensor) {
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

// [..., N], [..., K] -> [N, K], summed over the rows.
at::Tensor weight_gradient(const at::Tensor& grad, const at::Tensor& input) {
  return rows(grad).t().matmul(rows(input));
}

std::tuple<at::Tensor, at::Tensor> allgather_gemm(const at::Tensor& input, const at::Tensor& weight,
                                                  int64_t dim, const std::string& group) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("overlap::allgather_gemm", "");
  torch::jit::Stack stack{input, weight, {}, dim, group};
  op.callBoxed(stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

at::Tensor gemm_reducescatter(const at::Tensor& input, const at::Tensor& weight, int64_t dim,
                              const std::string& group) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("overlap::gemm_reducescatter", "");
  torch::jit::Stack stack{input, weight, {}, {}, {}, dim, {}, {}, {}, {}, false, group};
  op.callBoxed(stack);
  return stack[0].toTensor();
}

// The gradients of a call, by those of its outputs.
struct Gradients {
  std::string op;
  std::string group;
  Gradient kind = Gradient::kLocal;
  int64_t dim = 0;
  std::vector<c10::SymInt> send_rows = {};
  std::vector<c10::SymInt> recv_rows = {};

  // True if the gradients may be differentiated.
  static bool records() { return at::GradMode::is_enabled(); }
  bool scatters() const { return kind == Gradient::kScatters; }

  // The gradients of input, weight and bias. They share the gradient that was communicated: `communicated` brings it from
  // another half of this backward, or takes it to one.
  variable_list of_product(const at::Tensor& grad, const at::Tensor& input,
                           const at::Tensor& weight, const std::vector<bool>& wanted,
                           at::Tensor* communicated) const {
    variable_list results(3);
    if (!grad.defined()) return results;
    at::Tensor all = std::exchange(*communicated, at::Tensor());
    if (kind == Gradient::kGathers) {
      if (wanted[0])
        std::tie(results[0], all) = allgather_gemm(grad, weight.t(), dim, group);
      else if (wanted[1] && !all.defined())
        all = gathered(grad);
    } else {
      if (kind == Gradient::kSendsBack && !all.defined()) all = sent_back(grad);
      // Each rank's gradients follow from its own operands (as in Megatron's row-parallel layer, arXiv 1909.08053).
      if (kind == Gradient::kLocal)
        all = records() ? collective(grad, {.kind = "copy"}, group) : grad;
      if (wanted[0]) results[0] = all.matmul(weight);
    }
    if (wanted[1]) results[1] = weight_gradient(all, input);
    if (wanted[2]) results[2] = rows(kind == Gradient::kSendsBack ? all : grad).sum(0);
    if (kind != Gradient::kLocal && input.defined() && !wanted[1]) *communicated = all;
    return results;
  }

  // The gradients of an all-gather's input, weights and biases. `grads`: of each output, and of the gathered input.
  variable_list of_gathered(const variable_list& grads, const at::Tensor& input,
                            const std::vector<at::Tensor>& weights,
                            const std::vector<bool>& wanted) const {
    const size_t count = weights.size();
    variable_list results(1 + 2 * count);
    const auto wants = [&](size_t operand, size_t output) {
      return wanted[operand] && grads[output].defined();
    };
    bool gathers = false;
    for (size_t i = 0; i < count; ++i) gathers |= wants(1 + i, i);
    at::Tensor all;
    if (gathers) all = records() ? gathered(input) : start_all_gather(input, group);
    if (wanted[0]) results[0] = input_gradient(grads, weights);
    if (gathers && !records()) all = wait_for_gather(all, from_front(input), group);
    for (size_t i = 0; i < count; ++i) {
      if (wants(1 + i, i)) results[1 + i] = weight_gradient(grads[i], all);
      if (wants(1 + count + i, i)) results[1 + count + i] = rows(grads[i]).sum(0);
    }
    return results;
  }

 private:
  // The outputs' part by one reduce-scatter over all weights, and the gradient of the gathered input.
  at::Tensor input_gradient(const variable_list& grads,
                            const std::vector<at::Tensor>& weights) const {
    const at::Tensor& gathered_grad = grads.back();
    at::Tensor scattered;
    if (gathered_grad.defined()) {
      const int64_t along = from_front(gathered_grad);
      scattered = records() ? collective(gathered_grad, {.kind = "scatter", .dim = along}, group)
                            : start_reduce_scatter(gathered_grad, along, group);
    }
    const auto scattered_part = [&] { return records() ? scattered : wait(scattered); };
    std::vector<at::Tensor> used_grads;
    std::vector<at::Tensor> used_weights;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!grads[i].defined()) continue;
      used_grads.push_back(grads[i]);
      used_weights.push_back(weights[i]);
    }
    if (used_grads.empty()) return scattered.defined() ? scattered_part() : scattered;
    const bool one = used_grads.size() == 1;
    const at::Tensor sum =
        gemm_reducescatter(one ? used_grads[0] : at::cat(used_grads, -1),
                           (one ? used_weights[0] : at::cat(used_weights)).t(), dim, group);
    return scattered.defined() ? sum + scattered_part() : sum;
  }

  at::Tensor gathered(const at::Tensor& shard) const {
    if (records()) return collective(shard, {.kind = "gather", .dim = from_front(shard)}, group);
    return wait_for_gather(start_all_gather(shard, group), from_front(shard), group);
  }
  at::Tensor sent_back(const at::Tensor& grad) const {
    if (!records()) return all_to_all(grad, recv_rows, send_rows, group);
    return collective(grad, {.kind = "rows", .send_rows = recv_rows, .recv_rows = send_rows},
                      group);
  }
  int64_t from_front(const at::Tensor& tensor) const { return dim < 0 ? dim + tensor.dim() : dim; }
};

// The node of a call. Its operands are the input, the weights, and a bias of each weight.
class Recorded final : public Halved {
 public:
  explicit Recorded(const Call& call)
      : gradients_{call.op,  call.group,     gradient_of(call.op),
                   call.dim, call.send_rows, call.recv_rows},
        weights_(call.weights.size()) {
    const auto edge = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.requires_grad()
                 ? torch::autograd::impl::gradient_edge(tensor)
                 : Edge();
    };
    add_next_edge(edge(call.input));
    bool any_weight = false;
    for (const at::Tensor& weight : call.weights) {
      add_next_edge(edge(weight));
      any_weight |= weight.requires_grad();
    }
    for (const at::Tensor& bias : call.biases) add_next_edge(edge(bias));
    // The shard of an all-gather is saved and gathered again, so that the gathered input need not be kept.
    if (any_weight) input_ = SavedVariable(call.input, /*is_output=*/false);
    for (size_t i = 0; i < weights_.size() && call.input.requires_grad(); ++i)
      weights_[i] = SavedVariable(call.weights[i], /*is_output=*/false);
  }

  bool needs_input() const { return next_edge(0).is_valid(); }
  bool is_halved() const { return gradients_.kind != Gradient::kLocal; }
  bool scatters() const { return gradients_.scatters(); }

  // Profilers name the node so, and the ops by their library.
  std::string name() const override { return without_library(gradients_.op) + "Backward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Halved::release_variables();
    communicated_.reset();
    input_.reset_data();
    for (SavedVariable& weight : weights_) weight.reset_data();
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(gradients_.op);
    args.collect(gradients_.group);
    args.collect(gradients_.dim);
    args.collect(gradients_.send_rows);
    args.collect(gradients_.recv_rows);
    args.collect(input_, /*is_output=*/false);
    args.collect(weights_, /*is_output=*/false);
  }

  // Compiled autograd traces the gradients as a function of all that they are made from.
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    const auto each = [&](auto&& swap) {
      swap(gradients_.send_rows);
      swap(gradients_.recv_rows);
      swap(input_);
      swap(weights_);
    };
    each([&](auto& member) { saved.before(member); });
    PackedArgs packed;
    packed.pack(saved_tensors());
    packed.pack(gradients_.send_rows);
    packed.pack(gradients_.recv_rows);
    packed.pack(wanted().operands);
    const auto apply_to =
        [gradients = Gradients{gradients_.op, gradients_.group, gradients_.kind, gradients_.dim}](
            const variable_list& grads, const std::vector<c10::IValue>& values) {
          PackedArgs args(values);
          const auto tensors = args.unpack<variable_list>();
          Gradients by = gradients;
          by.send_rows = args.unpack<std::vector<c10::SymInt>>();
          by.recv_rows = args.unpack<std::vector<c10::SymInt>>();
          at::Tensor communicated;
          return of_tensors(by, grads, tensors, args.unpack<std::vector<bool>>(), &communicated);
        };
    std::vector<at::TypePtr> schema;
    for (const c10::IValue& value : packed.vec())
      schema.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
    const auto& compiler = getPyCompilerInterface();
    const std::string function =
        compiler->bind_function(saved.get_py_compiler(), name(), apply_to, schema,
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    variable_list results = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, of_outputs(variable_list(inputs)),
        packed.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            get_input_metadata(next_edges())));
    each([&](auto& member) { saved.after(member); });
    return results;
  }

 private:
  variable_list apply(variable_list&& inputs) override {
    const Wanted wants = wanted();
    const variable_list grads = of_outputs(std::move(inputs));
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tensors = saved_tensors();
    }
    const bool is_new = take(wants.all);
    if (is_new) communicated_.reset();
    variable_list results = of_tensors(gradients_, grads, tensors, wants.operands, &communicated_);
    if (!wants.all && !is_new) fill(results, wants.operands);
    return results;
  }

  // `tensors`: the input and the weights, undefined where no gradient needs them.
  static variable_list of_tensors(const Gradients& by, const variable_list& grads,
                                  const variable_list& tensors, const std::vector<bool>& wanted,
                                  at::Tensor* communicated) {
    const std::vector<at::Tensor> weights(tensors.begin() + 1, tensors.end());
    if (by.scatters()) return by.of_gathered(grads, tensors[0], weights, wanted);
    return by.of_product(grads[0], tensors[0], weights[0], wanted, communicated);
  }

  variable_list of_outputs(variable_list&& inputs) const {
    return gradients(std::move(inputs), scatters() ? weights_.size() + 1 : 1);
  }
  variable_list saved_tensors() const {
    variable_list tensors{input_.unpack()};
    for (const SavedVariable& weight : weights_) tensors.push_back(weight.unpack());
    return tensors;
  }

  Gradients gradients_;
  SavedVariable input_;                 // if a weight requires grad
  std::vector<SavedVariable> weights_;  // if the input requires grad
  at::Tensor communicated_;             // the gradient, as the first half left it
};

// The node of a collective: its reverse, of the gradient.
class Reversed final : public Node {
 public:
  explicit Reversed(c10::ArrayRef<c10::IValue> arguments)
      : kind_(arguments[1].toStringRef()),
        group_(arguments[5].toStringRef()),
        dim_(arguments[2].toInt()),
        send_rows_(arguments[3].toSymIntVector()),
        recv_rows_(arguments[4].toSymIntVector()) {
    add_next_edge(torch::autograd::impl::gradient_edge(arguments[0].toTensor()));
  }
  std::string name() const override { return "_collectiveBackward"; }
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(kind_);
    args.collect(group_);
    args.collect(dim_);
    args.collect(send_rows_);
    args.collect(recv_rows_);
  }
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::autograd::SwapSavedVariables& /*saved*/) override {
    return apply(variable_list(inputs));
  }

 private:
  variable_list apply(variable_list&& inputs) override {
    if (!inputs[0].defined()) return {at::Tensor()};
    const char* reverse = kind_ == "sum"      ? "copy"
                          : kind_ == "copy"   ? "sum"
                          : kind_ == "gather" ? "scatter"
                          : kind_ == "rows"   ? "rows"
                                              : "gather";
    const Collective how = {
        .kind = reverse, .dim = dim_, .send_rows = recv_rows_, .recv_rows = send_rows_};
    return {collective(inputs[0], how, group_)};
  }

  const std::string kind_;
  const std::string group_;
  const int64_t dim_;
  const std::vector<c10::SymInt> send_rows_;
  const std::vector<c10::SymInt> recv_rows_;
};

// Modes and subclasses have to know the ops before an op reaches them. Python tells them.
void make_ops_known() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("overlap::_make_ops_known", "");
  torch::jit::Stack nothing;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &nothing);
}

// Looks at the tensors among the last values of the stack, with the values' numbers.
template <typename Look>
void look_at_tensors(const torch::jit::Stack& stack, size_t count, Look&& look) {
  size_t i = 0;
  for (const c10::IValue& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) {
      look(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) look(each, i);
    } else if (value.isOptionalTensorList()) {
      for (const OptionalTensor& each : value.toOptionalTensorVector())
        look(each.value_or(at::Tensor()), i);
    }
    ++i;
  }
}

// True if the call is recorded. Scaled operands have no gradients.
bool records(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const bool may_record = at::GradMode::is_enabled();
  bool has_tangent = false;
  bool is_python = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python);
  const c10::Argument* first = nullptr;
  look_at_tensors(stack, arguments.size(), [&](const at::Tensor& operand, size_t i) {
    if (!operand.defined()) return;
    const bool tangent = operand._fw_grad(0).defined();
    has_tangent |= tangent;
    is_python |= operand.key_set().has(c10::DispatchKey::Python);
    if (first == nullptr && (tangent || (may_record && operand.requires_grad())))
      first = &arguments[i];
  });
  if (is_python) make_ops_known();
  if (first == nullptr) return false;
  const std::string name = without_library(op.schema().name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_scales(op, stack), name, ": ", first->name(),
      " requires grad, but scaled operands have no gradients here, because the op does not make "
      "the casts; take the layers of overlap_torch.nn with fp8=\"tensorwise\" or "
      "\"rowwise\", or overlap_torch.parallel's styles with torchao's Float8Linear, or detach it");
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent, name,
                              " has reverse-mode gradients only, but an operand has a tangent "
                              "(forward_ad, torch.func.jvp): differentiate with backward() or "
                              "torch.autograd.grad, or detach the operand");
  return true;
}

void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// The outputs of a call: the tensors of its results, which are on top of the stack, in order.
std::vector<at::Tensor> outputs_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::vector<at::Tensor> outputs;
  look_at_tensors(stack, op.schema().returns().size(),
                  [&](const at::Tensor& output, size_t /*i*/) { outputs.push_back(output); });
  return outputs;
}

// The ops' autograd kernel: runs the op below autograd, and records the call if an operand requires grad.
void record_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  if (!records(op, *stack)) return run_below(op, keys, stack);
  const auto node = make_node<Recorded>(read(op, *stack));
  run_below(op, keys, stack);
  std::vector<at::Tensor> outputs = outputs_of(op, *stack);
  // Without a gradient of the input nothing reaches it through what was gathered.
  if (node->scatters() && !node->needs_input()) outputs.pop_back();
  if (!node->is_halved()) return torch::autograd::set_history(outputs, node);
  const auto several = make_node<Outputs>(node);
  torch::autograd::set_history(outputs, several);
  node->take_outputs(several->input_metadata(0));
}

// The same of overlap::_collective.
void record_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  if (!records(op, *stack)) return run_below(op, keys, stack);
  const auto node = make_node<Reversed>(torch::jit::last(*stack, op.schema().arguments().size()));
  run_below(op, keys, stack);
  torch::autograd::set_history(outputs_of(op, *stack), node);
}

}  // namespace

TORCH_LIBRARY_IMPL(overlap, Autograd, m) {
  for (const char* op : {"gemm_allreduce", "gemm_reducescatter", "allgather_gemm",
                         "allgather_gemm.weights", "allgather_gemm.scaled",
                         "allgather_gemm.scaled_weights", "gemm_alltoall", "scaled_linear"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&record_call>());
  }
  m.impl("_collective", torch::CppFunction::makeFromBoxedFunction<&record_collective>());
}

}  // namespace overlap::binding
