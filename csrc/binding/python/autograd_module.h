#pragma once

#include <torch/csrc/python_headers.h>

namespace overlap::binding {

// The result of a torch.autograd.Function, a tensor or a tuple, by nodes of C++: see
// autograd_module.cc. The second argument says whether backward gets the very gradients again when
// it is run only for the weights.
PyObject* recorded(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace overlap::binding
