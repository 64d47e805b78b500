// The parts of overlap_torch._plan that show steps, plan, and find what is wrong with steps.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace overlap::binding {

namespace py = pybind11;

// Columns of each weight, and whether the plan's kernel takes it.
using Weights = std::vector<std::pair<int64_t, bool>>;

// Refuses plans that plan::validate refuses, and plans whose steps have a fault on a usual machine.
void validate_with_steps(const plan::Plan& plan);

void bind_planner(py::module_& m);
void bind_steps(py::module_& m);
void bind_proof(py::module_& m);

}  // namespace overlap::binding
