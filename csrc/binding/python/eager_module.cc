// `_eager`: the ops' short path from Python. torch.ops reads schema and arguments at every call, and after it
// stands the autograd kernel, in Python, while a single call's GPU waits for its GEMM.
#include "binding/python/autograd_module.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace overlap::binding {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;

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

bool read(PyObject* object, std::optional<std::string>& text) {
  return Py_IsNone(object) || read(object, text.emplace());
}

bool read(PyObject* object, int64_t& number) {
  if (!PyLong_Check(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read(PyObject* object, std::optional<int64_t>& number) {
  return Py_IsNone(object) || read(object, number.emplace());
}

bool read(PyObject* object, bool& truth) {
  if (!PyBool_Check(object)) return false;
  truth = Py_IsTrue(object);
  return true;
}

bool read(PyObject* object, at::ScalarType& dtype) {
  if (!THPDtype_Check(object)) return false;
  dtype = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}

template <typename Element, typename Elements>
bool read_list(PyObject* object, Elements& elements) {
  if (!PyList_Check(object) && !PyTuple_Check(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    Element element{};
    if (!read(PySequence_Fast_GET_ITEM(object, i), element)) return false;
    elements.push_back(std::move(element));
  }
  return true;
}

bool read(PyObject* object, std::vector<int64_t>& numbers) {
  return read_list<int64_t>(object, numbers);
}

bool read(PyObject* object, std::vector<at::Tensor>& tensors) {
  return read_list<at::Tensor>(object, tensors);
}

bool read(PyObject* object, OptionalTensors& tensors) {
  return read_list<OptionalTensor>(object, tensors);
}

PyObject* wrap(at::Tensor&& tensor) {
  return THPVariable_Wrap(std::move(tensor));
}

PyObject* wrap(std::vector<at::Tensor>&& tensors) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = wrap(std::move(tensors[i]));
    if (tensor == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tensor);
  }
  return list.release();
}

template <typename... Results>
PyObject* wrap(std::tuple<Results...>&& results) {
  THPObjectPtr tuple(PyTuple_New(sizeof...(Results)));
  if (!tuple) return nullptr;
  Py_ssize_t place = 0;
  const auto add = [&](auto& result) {
    PyObject* object = wrap(std::move(result));
    if (object != nullptr) PyTuple_SET_ITEM(tuple.get(), place++, object);
    return object != nullptr;
  };
  const bool all = std::apply([&](auto&... each) { return (add(each) && ...); }, results);
  return all ? tuple.release() : nullptr;
}

// Modes, tracers and function transforms see a call through torch.ops.
bool is_observed() {
  constexpr c10::DispatchKeySet kObservers{
      c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Tracer,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kObservers) ||
         at::impl::torch_function_mode_enabled();
}

// Autograd and the dispatcher ask this of the tensors among a call's arguments.
struct Operands {
  bool require_grad = false;
  c10::DispatchKeySet keys;

  void add(const at::Tensor& tensor) {
    require_grad |= tensor.requires_grad();
    keys = keys | tensor.key_set();
  }
  void add(const OptionalTensor& tensor) {
    if (tensor) add(*tensor);
  }
  void add(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& each : tensors) add(each);
  }
  void add(const OptionalTensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) add(tensors.get(i));
  }
  template <typename Other>
  void add(const Other& /*no tensor*/) {}

  // True if the dispatcher would come to the autograd kernel first: no autocast, no transform.
  bool reach_autograd_first() const {
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    const c10::DispatchKeySet all = (keys | local.included_) - local.excluded_;
    return all.highestFunctionalityKey() == c10::DispatchKey::AutogradFunctionality;
  }
};

template <typename Parameter>
struct Owner {
  using type = std::decay_t<Parameter>;
};
template <typename Element>
struct Owner<c10::ArrayRef<Element>> {
  using type = std::vector<Element>;
};

// The function of an op, with its schema's parameters by position. None: a call for torch.ops. True:
// one for the op's autograd Function, as an operand requires grad and nothing else is in the way.
template <const auto& kOp, typename Signature>
struct Function;
template <const auto& kOp, typename Result, typename... Parameters>
struct Function<kOp, Result(Parameters...)> {
  static PyObject* call(PyObject* /*module*/, PyObject* const* objects, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(kOp.name, kOp.overload)
                               .template typed<Result(Parameters...)>();
    if (count != sizeof...(Parameters) || is_observed()) Py_RETURN_NONE;
    std::tuple<typename Owner<Parameters>::type...> arguments;
    const auto read_all = [&](auto&... argument) { return (read(*objects++, argument) && ...); };
    if (!std::apply(read_all, arguments)) Py_RETURN_NONE;
    if (at::GradMode::is_enabled()) {
      Operands operands;
      std::apply([&](const auto&... argument) { (operands.add(argument), ...); }, arguments);
      if (operands.require_grad) {
        if (operands.reach_autograd_first()) Py_RETURN_TRUE;
        Py_RETURN_NONE;
      }
    }
    const auto run = [&](const auto&... argument) {
      const py::gil_scoped_release no_gil;
      const at::AutoDispatchBelowAutograd below_autograd;
      return op.call(argument...);
    };
    return wrap(std::apply(run, arguments));
    END_HANDLE_TH_ERRORS
  }
};

struct Op {
  const char* name;
  const char* overload;
};
constexpr Op kAllReduce{"overlap::gemm_allreduce", ""};
constexpr Op kReduceScatter{"overlap::gemm_reducescatter", ""};
constexpr Op kAllGather{"overlap::allgather_gemm", ""};
constexpr Op kAllGatherWeights{"overlap::allgather_gemm", "weights"};
constexpr Op kAllToAll{"overlap::gemm_alltoall", ""};
constexpr Op kScaledAllReduce{"overlap::gemm_allreduce", "scaled"};
constexpr Op kScaledReduceScatter{"overlap::gemm_reducescatter", "scaled"};
constexpr Op kScaledAllGather{"overlap::allgather_gemm", "scaled"};
constexpr Op kScaledAllGatherWeights{"overlap::allgather_gemm", "scaled_weights"};
constexpr Op kScaledAllToAll{"overlap::gemm_alltoall", "scaled"};

using OptionalText = std::optional<std::string>;
using Produce = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                           const OptionalText&, const std::string&);
using ProduceParts = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                int64_t, const OptionalText&, const std::string&);
using Consume = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                   const OptionalTensor&, int64_t,
                                                   const std::string&);
using ConsumeWeights = std::tuple<std::vector<at::Tensor>, at::Tensor>(const at::Tensor&,
                                                                       at::TensorList,
                                                                       const OptionalTensors&,
                                                                       int64_t, const std::string&);
using AllToAll = at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                            const OptionalTensor&, const std::string&);

// Operands with scales have recipes by number, and the output's dtype.
using ScaledProduce = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const OptionalTensor&, std::optional<int64_t>,
                                 std::optional<int64_t>, at::ScalarType, bool, const OptionalText&,
                                 const std::string&);
using ScaledConsume = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const OptionalTensor&, std::optional<int64_t>, std::optional<int64_t>, at::ScalarType, bool,
    bool, const std::string&);
using ScaledConsumeWeights = std::tuple<std::vector<at::Tensor>, at::Tensor, at::Tensor>(
    const at::Tensor&, at::TensorList, const at::Tensor&, at::TensorList, const OptionalTensors&,
    std::optional<int64_t>, std::optional<int64_t>, at::ScalarType, bool, bool, const std::string&);
using ScaledAllToAll = at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                  at::IntArrayRef, const at::Tensor&, const at::Tensor&,
                                  const OptionalTensor&, std::optional<int64_t>,
                                  std::optional<int64_t>, at::ScalarType, bool, const std::string&);

template <const auto& kOp, typename Signature>
PyMethodDef method(const char* name) {
  void* function = reinterpret_cast<void*>(&Function<kOp, Signature>::call);
  return {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
}

}  // namespace
}  // namespace overlap::binding

PyMODINIT_FUNC PyInit__eager() {
  using namespace overlap::binding;
  static PyMethodDef methods[] = {
      method<kAllReduce, Produce>("gemm_allreduce"),
      method<kReduceScatter, ProduceParts>("gemm_reducescatter"),
      method<kAllGather, Consume>("allgather_gemm"),
      method<kAllGatherWeights, ConsumeWeights>("allgather_gemm_weights"),
      method<kAllToAll, AllToAll>("gemm_alltoall"),
      method<kScaledAllReduce, ScaledProduce>("gemm_allreduce_scaled"),
      method<kScaledReduceScatter, ScaledProduce>("gemm_reducescatter_scaled"),
      method<kScaledAllGather, ScaledConsume>("allgather_gemm_scaled"),
      method<kScaledAllGatherWeights, ScaledConsumeWeights>("allgather_gemm_scaled_weights"),
      method<kScaledAllToAll, ScaledAllToAll>("gemm_alltoall_scaled"),
      {"recorded", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&recorded)), METH_FASTCALL,
       nullptr},
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
