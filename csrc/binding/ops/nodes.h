// Nodes of an autograd graph that pipelines' schedules can run in two halves.
//
// Zero-bubble schedules compute the gradients of a stage's inputs first and those of its weights later. Both halves run the
// same node. A schedule keeps what reaches a node as one sum over the node's outputs, so a node of several outputs is made of
// two:
//
//   outputs -> Outputs, which leaves their gradients with -> Halved, which has one output -> the operands
//
// Both halves then get the same tensors. A call that communicates its output's gradient has the two nodes as well, as the
// second half has to know the tensor for which the first half communicated.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace overlap::binding {

using torch::autograd::Node;
using torch::autograd::variable_list;

// std::shared_ptr, or from PyTorch 2.15 on c10::intrusive_ptr.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>)
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

class Halved : public Node {
 public:
  using Node::Node;

  // One number stands for the gradients of all outputs, which Outputs brings.
  template <typename Metadata>
  void take_outputs(const Metadata& of_one) {
    add_input_metadata(of_one.options(), {}, /*is_tensor_subclass=*/false, /*is_nested=*/false,
                       of_one.grad_dtype());
    several_ = true;
  }
  void keep(variable_list&& grads) {
    grads_ = std::move(grads);
    is_new_ = true;
  }
  void release_variables() override { grads_.clear(); }

 protected:
  // The operands whose gradients this backward wants, and whether these are all that have one.
  struct Wanted {
    std::vector<bool> operands;
    bool all = true;
  };
  Wanted wanted() const {
    Wanted found;
    for (size_t i = 0; i < num_outputs(); ++i) {
      const bool has_edge = next_edge(i).is_valid();
      found.operands.push_back(has_edge && task_should_compute_output(i));
      found.all = found.all && (found.operands.back() || !has_edge);
    }
    return found;
  }

  // The gradients of all outputs, undefined where nothing has arrived.
  variable_list gradients(variable_list&& inputs, size_t outputs) const {
    variable_list grads = several_ ? grads_ : std::move(inputs);
    grads.resize(outputs);
    return grads;
  }
  // Called once the gradients have been taken: says whether they came for this backward. They stay for another half.
  bool take(bool all) {
    // Gradients that can be differentiated refer to what made them, which may be this node.
    if (all || at::GradMode::is_enabled()) grads_.clear();
    return std::exchange(is_new_, false);
  }
  // Zeros for weights of an output that nobody used: a schedule takes them for used, as it has seen one node.
  void fill(variable_list& results, const std::vector<bool>& wanted) const {
    for (size_t i = 0; several_ && i < results.size(); ++i) {
      if (!wanted[i] || results[i].defined()) continue;
      results[i] = next_edge(i).function->input_metadata(next_edge(i).input_nr).zeros_like();
    }
  }

 private:
  bool several_ = false;
  bool is_new_ = false;
  variable_list grads_;
};

// Leaves the gradients of several outputs with its Halved.
class Outputs final : public Node {
 public:
  explicit Outputs(NodePtr halved) { add_next_edge({std::move(halved), 0}); }

  template <typename Metadata>
  void take(const Metadata& metadata) {
    input_metadata_.push_back(metadata);
  }

  std::string name() const override { return next_edge(0).function->name() + "Outputs"; }
  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {}
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::autograd::SwapSavedVariables& /*saved*/) override {
    return apply(variable_list(inputs));
  }

 private:
  variable_list apply(variable_list&& inputs) override {
    at::Tensor number;
    for (const at::Tensor& grad : inputs) {
      if (!grad.defined() || number.defined()) continue;
      const at::NoGradGuard no_grad;
      const bool has_one =
          !grad.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && grad.numel() > 0;
      number = has_one ? grad.as_strided({}, {}) : at::zeros({}, grad.options());
    }
    static_cast<Halved&>(*next_edge(0).function).keep(std::move(inputs));
    return {std::move(number)};
  }
};

}  // namespace overlap::binding
