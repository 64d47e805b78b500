// A plan's proof for Python, in overlap_torch._plan. Knows no torch.
#include "steps/proof/proof.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "binding/python/steps_module.h"
#include "plan/agreement.h"
#include "plan/message.h"

namespace overlap::binding {
namespace {

using plan::Machine;
using plan::Plan;

void refuse_faults(const Plan& plan, const std::optional<Machine>& machine) {
  plan::validate(plan);
  if (machine) plan::check_serial(plan, *machine);
  const auto fault = steps::find_fault(plan, machine ? *machine : steps::usual_machine(plan));
  if (fault) plan::fail(plan.to_string(), ": ", fault->what);
}

}  // namespace

void validate_with_steps(const Plan& plan) {
  refuse_faults(plan, std::nullopt);
}

void bind_proof(py::module_& m) {
  m.def("validate", &refuse_faults, py::arg("plan"), py::arg("machine") = std::nullopt,
        R"(Raises ValueError if the plan cannot run: what is wrong, what is allowed, what to do.

A plan for 2 to 16 ranks is also proved: the steps of all ranks, several calls in a row, end whatever SMs are held, read and
write nothing too early, and give the op's results. The message names rank and step.
`machine`: the machine with the SMs; by default a Hopper of 132.)");
  m.def("usual_machine", &steps::usual_machine, py::arg("plan"),
        "The machine that `validate` assumes for a plan if none is given.");
}

}  // namespace overlap::binding
