// The parts of overlap_torch._plan that show steps, and what is wrong with them.
#pragma once

#include <pybind11/pybind11.h>

namespace overlap::plan {
struct Plan;
}

namespace overlap::binding {

// What plan::validate refuses, and plans whose steps have a fault on a usual machine.
void validate_with_steps(const plan::Plan& plan);

void bind_steps(pybind11::module_& m);
void bind_proof(pybind11::module_& m);

}  // namespace overlap::binding
