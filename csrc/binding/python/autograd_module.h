#pragma once

#include <torch/csrc/python_headers.h>

namespace overlap::binding {

// What a torch.autograd.Function has returned, a tensor or a tuple, by nodes of C++: see autograd_module.cc. The
// second argument: whether backward gets the very gradients again when it is run for the weights alone.
PyObject* recorded(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace overlap::binding
