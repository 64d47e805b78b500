// `_eager`: the ops' short path from Python. torch.ops matches names and defaults at every call, while a single call's GPU
// waits for its GEMM. A function here takes all of a schema's arguments by position: a tuple, and the last one.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/python/autograd_module.h"

namespace overlap::binding {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Each `read` turns an argument into what the op takes, or returns false: it is no such argument, or
// a tensor that somebody else has to see first, a subclass or one with a tangent.
bool read(PyObject* object, at::Tensor& tensor) {
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  const bool may_have_tangent = tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  return !may_have_tangent || !tensor._fw_grad(/*level=*/0).defined();
}

bool read(PyObject* object, OptionalTensor& tensor) {
  return Py_IsNone(object) || read(object, tensor.emplace());
}

bool read(PyObject* object, std::string& text) {
  if (!PyUnicode_Check(object)) return false;
  Py_ssize_t length = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(object, &length);
  if (bytes == nullptr) {
    PyErr_Clear();
    return false;
  }
  text.assign(bytes, static_cast<size_t>(length));
  return true;
}

bool read(PyObject* object, int64_t& number) {
  if (!PyLong_Check(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read(PyObject* object, bool& truth) {
  if (!PyBool_Check(object)) return false;
  truth = Py_IsTrue(object);
  return true;
}

template <typename Element>
bool read(PyObject* object, c10::List<Element>& list) {
  if (!PyList_Check(object) && !PyTuple_Check(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    Element element{};
    if (!read(PySequence_Fast_GET_ITEM(object, i), element)) return false;
    list.push_back(std::move(element));
  }
  return true;
}

// Reads one argument of this type of C++ onto the stack.
template <typename T>
bool push(PyObject* object, torch::jit::Stack& stack) {
  T value{};
  if (!read(object, value)) return false;
  stack.emplace_back(std::move(value));
  return true;
}
template <typename T>
bool push_list(PyObject* object, torch::jit::Stack& stack) {
  c10::List<T> list;
  if (!read(object, list)) return false;
  stack.emplace_back(std::move(list));
  return true;
}
using Push = bool (*)(PyObject* object, torch::jit::Stack& stack);

template <typename T>
bool push_optional(PyObject* object, torch::jit::Stack& stack) {
  if (!Py_IsNone(object)) return push<T>(object, stack);
  stack.emplace_back();
  return true;
}

// A number, None, or a dtype, which is a number in a schema.
bool push_number(PyObject* object, torch::jit::Stack& stack) {
  if (!THPDtype_Check(object)) return push_optional<int64_t>(object, stack);
  stack.emplace_back(static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type));
  return true;
}

Push push_of(const c10::Argument& argument) {
  const std::string type = argument.real_type()->str();
  static const std::vector<std::pair<std::string, Push>> known = {
      {"Tensor", &push<at::Tensor>},
      {"Tensor?", &push_optional<at::Tensor>},
      {"Tensor[]", &push_list<at::Tensor>},
      {"Tensor?[]", &push_list<OptionalTensor>},
      {"SymInt[]", &push_list<int64_t>},
      {"int", &push<int64_t>},
      {"int?", &push_number},
      {"bool", &push<bool>},
      {"str", &push<std::string>},
      {"str?", &push_optional<std::string>},
  };
  for (const auto& [name, push] : known) {
    if (name == type) return push;
  }
  TORCH_INTERNAL_ASSERT(false, "_eager reads no ", type);
}

PyObject* wrap(const c10::IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  const std::vector<at::Tensor> tensors = value.toTensorVector();
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = THPVariable_Wrap(tensors[i]);
    if (tensor == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tensor);
  }
  return list.release();
}

PyObject* wrap(const torch::jit::Stack& results) {
  if (results.size() == 1) return wrap(results.front());
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  if (!tuple) return nullptr;
  for (size_t i = 0; i < results.size(); ++i) {
    PyObject* object = wrap(results[i]);
    if (object == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), object);
  }
  return tuple.release();
}

// Modes, tracers and function transforms see a call through torch.ops.
bool is_observed() {
  constexpr c10::DispatchKeySet kObservers{
      c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Tracer,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kObservers) ||
         at::impl::torch_function_mode_enabled();
}

struct Op {
  c10::OperatorHandle handle;
  std::vector<Push> arguments;
};
constexpr const char* kOp = "overlap_torch._eager.Op";

// The function of an op, which `self` holds. None: a call for torch.ops.
PyObject* call(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& op = *static_cast<const Op*>(PyCapsule_GetPointer(self, kOp));
  const size_t last = op.arguments.size() - 1;
  const bool fits = count == 2 && PyTuple_Check(objects[0]) &&
                    PyTuple_GET_SIZE(objects[0]) == static_cast<Py_ssize_t>(last);
  if (!fits || is_observed()) Py_RETURN_NONE;
  torch::jit::Stack stack;
  stack.reserve(op.arguments.size());
  for (size_t i = 0; i < last; ++i) {
    PyObject* object = PyTuple_GET_ITEM(objects[0], static_cast<Py_ssize_t>(i));
    if (!op.arguments[i](object, stack)) Py_RETURN_NONE;
  }
  if (!op.arguments[last](objects[1], stack)) Py_RETURN_NONE;
  {
    const py::gil_scoped_release no_gil;
    op.handle.callBoxed(&stack);
  }
  return wrap(stack);
  END_HANDLE_TH_ERRORS
}

// The function of the op of this name and overload, which torch.ops knows already.
PyObject* function_of(PyObject* /*module*/, PyObject* const* names, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::string name;
  std::string overload;
  TORCH_CHECK_TYPE(count == 2 && read(names[0], name) && read(names[1], overload),
                   "function_of takes an op's name and its overload");
  static PyMethodDef definition = {"overlap",
                                   reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                                   METH_FASTCALL, nullptr};
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto op = std::make_unique<Op>(Op{handle, {}});
  for (const c10::Argument& argument : handle.schema().arguments())
    op->arguments.push_back(push_of(argument));
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<Op*>(PyCapsule_GetPointer(capsule, kOp));
  };
  THPObjectPtr self(PyCapsule_New(op.get(), kOp, destroy));
  if (!self) return nullptr;
  op.release();
  return PyCFunction_New(&definition, self.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef method(const char* name,
                   PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          nullptr};
}

}  // namespace
}  // namespace overlap::binding

PyMODINIT_FUNC PyInit__eager() {
  using namespace overlap::binding;
  static PyMethodDef methods[] = {
      method("function_of", &function_of),
      method("recorded", &recorded),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef module = [] {
    PyModuleDef definition{};
    definition.m_base = PyModuleDef_HEAD_INIT;
    definition.m_name = "_eager";
    definition.m_size = -1;  // one for the process, as torch is
    definition.m_methods = methods;
    return definition;
  }();
  return PyModule_Create(&module);
}
