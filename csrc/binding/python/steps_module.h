// The parts of overlap_torch._plan that show steps, plan, and find what is wrong with steps.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "steps/list/step.h"

namespace overlap::binding {

namespace py = pybind11;

// Columns of each weight, and whether the plan's kernel takes it.
using Weights = std::vector<std::pair<int64_t, bool>>;

// Throws ValueError.
[[noreturn]] inline void refuse(const std::string& what) {
  throw py::value_error(what);
}

// Refuses plans that plan::validate refuses, and plans whose steps have a fault on a usual machine.
void validate_with_steps(const plan::Plan& plan);

// Refuses plans that are not overlapped ones of allgather_gemm.
void check_gather(const plan::Plan& plan);

// A rank's steps; refuses arguments that do not fit the plan.
steps::StepList lowered(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                        bool kernel_takes, bool bias, bool captured, const Weights& weights,
                        const std::vector<int64_t>& send_rows,
                        const std::vector<int64_t>& receive_rows, int64_t longest_message);

// Binds a function of a rank's steps.
template <typename Print>
void def_steps(py::module_& m, const char* name, Print print, const char* doc) {
  m.def(
      name,
      [print](const plan::Plan& plan, int32_t rank, const plan::Machine& machine, bool kernel_takes,
              bool bias, bool captured, const Weights& weights,
              const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
              int64_t longest_message) {
        return print(lowered(plan, rank, machine, kernel_takes, bias, captured, weights, send_rows,
                             receive_rows, longest_message),
                     plan, rank, machine);
      },
      py::arg("plan"), py::arg("rank"), py::arg("machine"), py::arg("kernel_takes") = true,
      py::arg("bias") = false, py::arg("captured") = false, py::arg("weights") = Weights{},
      py::arg("send_rows") = std::vector<int64_t>{},
      py::arg("receive_rows") = std::vector<int64_t>{}, py::arg("longest_message") = 0, doc);
}

void bind_planner(py::module_& m);
void bind_steps(py::module_& m);
void bind_proof(py::module_& m);

}  // namespace overlap::binding
