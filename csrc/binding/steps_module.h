// The part of overlap_torch._plan that shows steps.
#pragma once

#include <pybind11/pybind11.h>

namespace overlap::binding {

void bind_steps(pybind11::module_& m);

}  // namespace overlap::binding
