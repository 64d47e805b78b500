// The steps of a plan for Python, in overlap_torch._plan. Knows no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "binding/python/steps_module.h"
#include "plan/message.h"
#include "steps/list/step.h"
#include "steps/price/price.h"

namespace overlap::binding {
namespace {

using plan::Machine;
using plan::Op;
using plan::Plan;

void check_rows(const Plan& plan, const char* name, const std::vector<int64_t>& rows) {
  const bool wanted = plan.problem.traits().rows_by_rank;
  const auto world = static_cast<size_t>(plan.problem.world_size);
  const bool negative = std::any_of(rows.begin(), rows.end(), [](int64_t n) { return n < 0; });
  if (rows.size() == (wanted ? world : 0) && !negative) return;
  plan::fail(name, " has ", rows.size(), " counts", negative ? ", some below 0" : "",
             "; the plan's op takes ",
             wanted ? plan::message("one of 0 or more for each of ", world, " ranks") : "none");
}

// A valid plan, one of its ranks, and rows as its op takes them.
void check_call(const Plan& plan, int32_t rank, const std::vector<int64_t>& send_rows,
                const std::vector<int64_t>& receive_rows) {
  plan::validate(plan);
  if (rank < 0 || rank >= plan.problem.world_size) {
    const int32_t world = plan.problem.world_size;
    plan::fail("rank ", rank, " is not one of the plan's ", world, " ranks, 0 to ", world - 1);
  }
  check_rows(plan, "send_rows", send_rows);
  check_rows(plan, "receive_rows", receive_rows);
}

void check_weights(const Plan& plan, const Weights& weights) {
  if (weights.empty()) return;
  if (!plan.problem.traits().gathers()) {
    plan::fail("weights are for plans of allgather_gemm, not for ", plan.to_string());
  }
  int64_t columns = 0;
  for (const auto& [count, takes] : weights) {
    if (count < 0) plan::fail("a weight has ", count, " columns, allowed are 0 and more");
    columns += count;
  }
  if (columns == plan.problem.n) return;
  plan::fail("the weights have ", columns, " columns together, and the plan's n is ",
             plan.problem.n);
}

// Binds a function of a rank's steps; it refuses arguments that do not fit the plan.
template <typename Print>
void def_steps(py::module_& m, const char* name, Print print, const char* doc) {
  m.def(
      name,
      [print](const Plan& plan, int32_t rank, const Machine& machine, bool kernel_takes, bool bias,
              bool captured, const Weights& weights, const std::vector<int64_t>& send_rows,
              const std::vector<int64_t>& receive_rows, int64_t longest_message) {
        check_call(plan, rank, send_rows, receive_rows);
        check_weights(plan, weights);
        const bool has_kernel = steps::takes_by_default(plan);
        steps::Variant variant = {.compute = steps::kernel_if(kernel_takes && has_kernel),
                                  .bias = bias,
                                  .captured = captured,
                                  .send_rows = send_rows,
                                  .receive_rows = receive_rows,
                                  .longest_message = longest_message};
        for (const auto& [columns, takes] : weights) {
          variant.weights.push_back({columns, takes && has_kernel && columns > 0});
        }
        if (plan.problem.traits().rows_by_rank && longest_message == 0) {
          variant.longest_message = steps::longest_message(plan, rank, send_rows, receive_rows);
        }
        return print(steps::lower(plan, rank, machine, variant), plan, rank, machine);
      },
      py::arg("plan"), py::arg("rank"), py::arg("machine"), py::arg("kernel_takes") = true,
      py::arg("bias") = false, py::arg("captured") = false, py::arg("weights") = Weights{},
      py::arg("send_rows") = std::vector<int64_t>{},
      py::arg("receive_rows") = std::vector<int64_t>{}, py::arg("longest_message") = 0, doc);
}

}  // namespace

void bind_steps(py::module_& m) {
  const auto to_json = [](const steps::StepList& list, const Plan&, int32_t, const Machine&) {
    return steps::to_json(list);
  };
  m.def(
      "kernel_steps_json",
      [](const Plan& plan, int32_t rank, const Machine& machine, bool awaits,
         const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
         int32_t pieces) {
        check_call(plan, rank, send_rows, receive_rows);
        if (plan.problem.traits().rows_by_rank && (pieces < 1 || pieces >= plan::kMaxChunks)) {
          plan::fail("pieces is ", pieces, ", allowed are 1 to ", plan::kMaxChunks - 1);
        }
        const steps::StepList list = steps::lower(plan, rank, machine,
                                                  {.compute = steps::Compute::kCallers,
                                                   .send_rows = send_rows,
                                                   .receive_rows = receive_rows,
                                                   .awaits = awaits,
                                                   .pieces = pieces});
        return std::make_tuple(steps::to_json(list), list.tiles.chunks, list.tiles.columns);
      },
      py::arg("plan"), py::arg("rank"), py::arg("machine"), py::arg("awaits") = false,
      py::arg("send_rows") = std::vector<int64_t>{},
      py::arg("receive_rows") = std::vector<int64_t>{}, py::arg("pieces") = 1,
      "The steps of a plan whose GEMM is a kernel of the caller's, each tile's chunk, and how "
      "many tiles a row of tiles has.");
  def_steps(m, "steps_json", to_json,
            R"(What a rank enqueues for a call of the plan: a JSON object with a list of steps.

`kernel_takes`: whether the plan's kernel takes the operands; of an all-gather so for each of `weights`,
(columns, takes), by default one of all columns. `captured`: the call is part of a CUDA graph. `send_rows`,
`receive_rows`: of gemm_alltoall, for each rank; `longest_message`: bytes of the longest one of any rank, as
far as the ranks have told each other; by default of this rank's. Raises ValueError where these do not fit
the plan.)");

  py::class_<steps::Prediction>(m, "Prediction", R"(The cost model's expectation of a plan.

Attributes:
    gemm_us: the GEMM beside communication, microseconds.
    communication_us: the sum of the communication calls, microseconds.
    total_us: the whole op, microseconds.)")
      .def_readonly("gemm_us", &steps::Prediction::gemm_us)
      .def_readonly("communication_us", &steps::Prediction::communication_us)
      .def_readonly("total_us", &steps::Prediction::total_us)
      .def("__repr__", [](const steps::Prediction& p) {
        return py::str("Prediction(gemm_us={:f}, communication_us={:f}, total_us={:f})")
            .format(p.gemm_us, p.communication_us, p.total_us);
      });
  py::class_<steps::Price>(m, "Price", R"(The cost model's expectation of a list of steps.

Attributes:
    expected: a Prediction for the whole call.
    steps: (begin, end) of each step, microseconds from the call's start.
    computed_us: when each chunk's tiles are finished, of a GEMM that counts them; else empty.)")
      .def_readonly("expected", &steps::Price::expected)
      .def_property_readonly("steps",
                             [](const steps::Price& price) {
                               py::list spans;
                               for (const steps::Span& span : price.steps) {
                                 spans.append(py::make_tuple(span.begin_us, span.end_us));
                               }
                               return spans;
                             })
      .def_readonly("computed_us", &steps::Price::computed_us);
  const auto price = [](const steps::StepList& list, const Plan& plan, int32_t rank,
                        const Machine& machine) { return steps::price(list, plan, rank, machine); };
  def_steps(m, "price_steps", price,
            "The Price of the steps that steps_json shows. Raises ValueError as it does.");
  m.def(
      "predict",
      [](const Plan& plan, const Machine& machine) {
        plan::validate(plan);
        return steps::predict(plan, machine);
      },
      py::arg("plan"), py::arg("machine"),
      "What the cost model expects of the plan. Raises ValueError if it cannot run.");
}

}  // namespace overlap::binding
