// Nodes of C++ in the place of the nodes of Python's autograd Functions. Three things need them:
//
// - Zero-bubble schedules of pipelines compute the gradients of a stage's inputs first and those of its weights
//   later. In between they hold nothing but the node's Python object, which owns a node of C++ only.
// - Both of these backwards run the same node. A Python Function is told which gradients may be wanted at all;
//   one of C++ can ask which ones this backward wants.
// - A Function's output that is a view cannot be changed in place. Here it is a tensor of its own, without a copy.
//
//   one output:        output -> Gradients -> the Function's inputs
//   several outputs:   outputs -> Outputs -> Gradients -> the Function's inputs
//
// A schedule keeps what reaches a node as one sum over the node's outputs. Gradients therefore has one output, and
// Outputs leaves the gradients with it. Both backwards then get the same tensors.
#include "binding/python/autograd_module.h"

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace overlap::binding {
namespace {

using torch::autograd::CompiledNodeArgs;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::PyNode;
using torch::autograd::SwapSavedVariables;
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

// For the time of one backward, the Function's needs_input_grad says what this one wants.
class Wanted {
 public:
  Wanted(PyObject* function, const std::vector<bool>& wanted) : function_(function) {
    saved_ = THPObjectPtr(PyObject_GetAttrString(function, kName));
    if (!saved_) throw python_error();
    const std::vector<bool>& is_tensor =
        reinterpret_cast<THPFunction*>(function)->is_variable_input;
    const Py_ssize_t count = PyTuple_GET_SIZE(saved_.get());
    THPObjectPtr now(PyTuple_New(count));
    if (!now) throw python_error();
    size_t edge = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const bool wants = is_tensor[static_cast<size_t>(i)] && wanted[edge++];
      PyTuple_SET_ITEM(now.get(), i, PyBool_FromLong(wants));
    }
    if (PyObject_SetAttrString(function, kName, now.get()) != 0) throw python_error();
  }
  ~Wanted() {
    if (PyObject_SetAttrString(function_, kName, saved_.get()) != 0) PyErr_Clear();
  }
  Wanted(const Wanted&) = delete;
  Wanted& operator=(const Wanted&) = delete;

 private:
  static constexpr const char* kName = "needs_input_grad";
  PyObject* function_;
  THPObjectPtr saved_;
};

// Runs the Python Function's backward, for the gradients that are wanted.
class Gradients final : public Node {
 public:
  Gradients(NodePtr function, PyObject* object)
      : Node(torch::autograd::edge_list(function->next_edges())),
        function_(std::move(function)),
        object_(object) {}

  void take_first_output() { input_metadata_.push_back(function_->input_metadata(0)); }

  // One number stands for the gradients of all outputs, which Outputs brings by keep().
  void take_outputs() {
    uint32_t valid = 0;
    while (function_->input_metadata(valid).was_default_constructed()) ++valid;
    const auto& one = function_->input_metadata(valid);
    add_input_metadata(one.options(), {}, /*is_tensor_subclass=*/false, /*is_nested=*/false,
                       one.grad_dtype());
    several_ = true;
  }

  void keep(variable_list&& grads) {
    grads_ = std::move(grads);
    is_new_ = true;
  }

  std::string name() const override { return function_->name(); }
  void release_variables() override {
    grads_.clear();
    function_->release_variables();
  }
  void compiled_args(CompiledNodeArgs& args) const override { function_->compiled_args(args); }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    return function_->apply_with_saved(of_function(variable_list(inputs)), saved);
  }

 private:
  variable_list apply(variable_list&& inputs) override {
    std::vector<bool> wanted;
    bool all = true;
    for (size_t i = 0; i < num_outputs(); ++i) {
      wanted.push_back(next_edge(i).is_valid() && task_should_compute_output(i));
      all = all && (wanted.back() || !next_edge(i).is_valid());
    }
    variable_list grads = of_function(std::move(inputs));
    auto& function = static_cast<PyNode&>(*function_);
    const bool is_new = std::exchange(is_new_, false);
    // Gradients that can be differentiated refer to what made them, which may be this node.
    if (all || at::GradMode::is_enabled()) grads_.clear();
    if (all) return function.apply(std::move(grads));
    const pybind11::gil_scoped_acquire gil;
    const Wanted only(object_, wanted);
    variable_list results = function.apply(std::move(grads));
    // Weights of an output that nobody used: a schedule takes them for used, as it has seen one node.
    for (size_t i = 0; several_ && !is_new && i < results.size(); ++i) {
      if (!wanted[i] || results[i].defined()) continue;
      results[i] = next_edge(i).function->input_metadata(next_edge(i).input_nr).zeros_like();
    }
    return results;
  }

  // The gradients of all the Function's outputs, undefined where nothing has arrived.
  variable_list of_function(variable_list&& inputs) const {
    variable_list grads = several_ ? grads_ : std::move(inputs);
    grads.resize(function_->num_inputs());
    return grads;
  }

  NodePtr function_;
  PyObject* object_;  // function_'s, which owns it
  bool several_ = false;
  bool is_new_ = false;
  variable_list
      grads_;  // of several outputs; kept until the weights' gradients have been computed, too
};

// Leaves the gradients of several outputs with Gradients.
class Outputs final : public Node {
 public:
  Outputs(NodePtr gradients, const Node& function) {
    add_next_edge(Edge(std::move(gradients), 0));
    for (uint32_t i = 0; i < function.num_inputs(); ++i)
      input_metadata_.push_back(function.input_metadata(i));
  }

  std::string name() const override { return next_edge(0).function->name() + "Outputs"; }
  void compiled_args(CompiledNodeArgs& /*args*/) const override {}
  variable_list apply_with_saved(const variable_list& inputs,
                                 SwapSavedVariables& /*saved*/) override {
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
    static_cast<Gradients&>(*next_edge(0).function).keep(std::move(inputs));
    return {std::move(number)};
  }
};

// The node that outputs of a Python Function get in the place of its own; null where it has none.
NodePtr node_for(const NodePtr& function, bool several) {
  THPObjectPtr object(torch::autograd::functionToPyObject(function));
  if (!object) throw python_error();
  if (!THPFunction_Check(object.get())) return nullptr;
  auto gradients = make_node<Gradients>(function, object.get());
  if (!several) {
    gradients->take_first_output();
    return gradients;
  }
  gradients->take_outputs();
  return make_node<Outputs>(std::move(gradients), *function);
}

void give_nodes(const std::vector<at::Tensor*>& outputs, bool several) {
  NodePtr function;
  for (const at::Tensor* output : outputs) {
    if (!output->requires_grad() || output->is_leaf()) continue;
    several = several || function || output->output_nr() != 0;
    function = output->grad_fn();
  }
  const NodePtr node = function ? node_for(function, several) : nullptr;
  for (at::Tensor* output : outputs) {
    const bool has_node = node && output->requires_grad() && !output->is_leaf();
    if (!has_node && !output->is_view()) continue;
    const auto place = static_cast<uint32_t>(output->output_nr());
    *output = output->tensor_data();  // shares memory and version
    if (has_node) torch::autograd::impl::set_gradient_edge(*output, Edge(node, place));
  }
}

}  // namespace

PyObject* recorded(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count_arguments == 2,
                   "recorded takes outputs, and whether backward gets the same gradients twice");
  PyObject* outputs = arguments[0];
  const bool one = THPVariable_Check(outputs);
  const Py_ssize_t count = one ? 1 : PyTuple_Size(outputs);
  if (count < 0) return nullptr;
  std::vector<at::Tensor> tensors(static_cast<size_t>(count));
  std::vector<at::Tensor*> found;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = one ? outputs : PyTuple_GET_ITEM(outputs, i);
    if (!THPVariable_Check(object)) continue;
    tensors[static_cast<size_t>(i)] = THPVariable_Unpack(object);
    found.push_back(&tensors[static_cast<size_t>(i)]);
  }
  give_nodes(found, Py_IsTrue(arguments[1]));
  if (one) return THPVariable_Wrap(tensors[0]);
  THPObjectPtr results(PyTuple_New(count));
  if (!results) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* result = PyTuple_GET_ITEM(outputs, i);
    if (THPVariable_Check(result)) {
      result = THPVariable_Wrap(tensors[static_cast<size_t>(i)]);
      if (result == nullptr) return nullptr;
    } else {
      Py_INCREF(result);
    }
    PyTuple_SET_ITEM(results.get(), i, result);
  }
  return results.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace overlap::binding
