// Nodes of C++ in the place of the nodes of Python's autograd Functions. Three things need them:
//
// - Zero-bubble schedules of pipelines hold nothing but the node's Python object between the two halves of a backward,
//   which owns a node of C++ only (binding/ops/nodes.h).
// - A Python Function is told which gradients may be wanted at all; a node of C++ can ask which ones this backward wants.
// - A Function's output that is a view cannot be changed in place. Here it is a tensor of its own, without a copy.
//
//   outputs -> [Outputs ->] Gradients -> the Function's inputs
#include "binding/python/autograd_module.h"

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <string>
#include <utility>
#include <vector>

#include "binding/ops/nodes.h"

namespace overlap::binding {
namespace {

using torch::autograd::CompiledNodeArgs;
using torch::autograd::Edge;
using torch::autograd::PyNode;
using torch::autograd::SwapSavedVariables;

// For the time of one backward, the Function's needs_input_grad says what this one wants.
class WantedNow {
 public:
  WantedNow(PyObject* function, const std::vector<bool>& wanted) : function_(function) {
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
  ~WantedNow() {
    if (PyObject_SetAttrString(function_, kName, saved_.get()) != 0) PyErr_Clear();
  }
  WantedNow(const WantedNow&) = delete;
  WantedNow& operator=(const WantedNow&) = delete;

 private:
  static constexpr const char* kName = "needs_input_grad";
  PyObject* function_;
  THPObjectPtr saved_;
};

// Runs the Python Function's backward, for the gradients that are wanted.
class Gradients final : public Halved {
 public:
  Gradients(NodePtr function, PyObject* object)
      : Halved(torch::autograd::edge_list(function->next_edges())),
        function_(std::move(function)),
        object_(object) {}

  void take_first_output() { input_metadata_.push_back(function_->input_metadata(0)); }

  std::string name() const override { return function_->name(); }
  void release_variables() override {
    Halved::release_variables();
    function_->release_variables();
  }
  void compiled_args(CompiledNodeArgs& args) const override { function_->compiled_args(args); }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    return function_->apply_with_saved(gradients(variable_list(inputs), function_->num_inputs()),
                                       saved);
  }

 private:
  variable_list apply(variable_list&& inputs) override {
    const Wanted wants = wanted();
    variable_list grads = gradients(std::move(inputs), function_->num_inputs());
    auto& function = static_cast<PyNode&>(*function_);
    const bool is_new = take(wants.all);
    if (wants.all) return function.apply(std::move(grads));
    const pybind11::gil_scoped_acquire gil;
    const WantedNow only(object_, wants.operands);
    variable_list results = function.apply(std::move(grads));
    if (!is_new) fill(results, wants.operands);
    return results;
  }

  NodePtr function_;
  PyObject* object_;  // function_'s, which owns it
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
  uint32_t valid = 0;
  while (function->input_metadata(valid).was_default_constructed()) ++valid;
  gradients->take_outputs(function->input_metadata(valid));
  const auto outputs = make_node<Outputs>(std::move(gradients));
  for (uint32_t i = 0; i < function->num_inputs(); ++i) outputs->take(function->input_metadata(i));
  return outputs;
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
