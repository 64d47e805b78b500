// The simulation of all ranks' steps for tests: what it finds, and which mutations it notices.
#include "steps/proof/proof.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/python/steps_module.h"
#include "mutate.h"

namespace overlap::binding {
namespace {

using plan::Machine;
using plan::Plan;

using Rows = std::vector<std::vector<int64_t>>;

steps::Ranks ranks_of(const Plan& plan, const Machine& machine,
                      const std::vector<bool>& kernel_takes, bool bias, const Weights& weights,
                      const Rows& rows, int64_t longest_message, bool finish,
                      std::optional<bool> awaits = {}, int32_t pieces = 1) {
  plan::validate(plan);
  const bool has_kernel = steps::takes_by_default(plan);
  steps::Ranks ranks{plan, machine, {}};
  for (size_t rank = 0; rank < kernel_takes.size(); ++rank) {
    steps::Variant variant;
    const bool kernel = kernel_takes[rank] && has_kernel;
    variant.compute = awaits ? steps::Compute::kCallers : steps::kernel_if(kernel);
    variant.awaits = awaits.value_or(false);
    variant.pieces = pieces;
    variant.bias = bias;
    variant.finish = finish;
    for (const auto& [columns, takes] : weights) {
      variant.weights.push_back({columns, takes && kernel && columns > 0});
    }
    for (size_t peer = 0; peer < rows.size(); ++peer) {
      variant.send_rows.push_back(rows[rank][peer]);
      variant.receive_rows.push_back(rows[peer][rank]);
    }
    variant.longest_message = longest_message;
    ranks.variants.push_back(variant);
  }
  return ranks;
}

std::string text(const std::optional<steps::Fault>& fault) {
  return fault ? fault->what : "";
}

// A function of what the ranks of a call can differ in, and of arguments of its own.
template <typename... Own, typename Function, typename... Names>
void def_of_ranks(py::module_& m, const char* name, Function function, const char* doc,
                  const Names&... names) {
  m.def(
      name,
      [function](const Plan& plan, const Machine& machine, const std::vector<bool>& kernel_takes,
                 Own... own, bool bias, const Weights& weights, const Rows& rows,
                 int64_t longest_message, bool finish, std::optional<bool> awaits, int32_t pieces) {
        return function(ranks_of(plan, machine, kernel_takes, bias, weights, rows, longest_message,
                                 finish, awaits, pieces),
                        own...);
      },
      py::arg("plan"), py::arg("machine"), py::arg("kernel_takes"), names...,
      py::arg("bias") = false, py::arg("weights") = Weights{}, py::arg("rows") = Rows{},
      py::arg("longest_message") = 0, py::arg("finish") = false, py::arg("awaits") = std::nullopt,
      py::arg("pieces") = 1, doc);
}

}  // namespace

void bind_proof_tests(py::module_& m) {
  def_of_ranks(
      m, "find_fault", [](const steps::Ranks& ranks) { return text(steps::find_fault(ranks)); },
      R"(What is wrong with the steps of all ranks, or nothing.

`kernel_takes`: for each rank whether the plan's kernel takes its operands. `weights`: of an all-gather, (columns, takes).
`rows[a][b]`: of gemm_alltoall, what rank a sends to rank b; `longest_message`: bytes of the longest one, as far as the
ranks have told each other. `finish`: the rows of an all-reduce get a residual and a norm. `awaits`: a kernel of the caller's
computes, which waits for chunks or not; `pieces`: chunks of what it sends to each rank.)");
  def_of_ranks(
      m, "structures",
      [](const steps::Ranks& ranks) {
        const std::vector<steps::StepList> plain = steps::lower_all(ranks, false);
        const std::vector<steps::StepList> captured = steps::lower_all(ranks, true);
        std::vector<std::pair<uint64_t, uint64_t>> hashes;
        for (size_t rank = 0; rank < plain.size(); ++rank) {
          hashes.emplace_back(steps::structure(plain[rank]), steps::structure(captured[rank]));
        }
        return hashes;
      },
      "Of each rank a hash of its steps without their sizes, of plain calls and of captured ones.");
  def_of_ranks(
      m, "communication",
      [](const steps::Ranks& ranks) {
        std::vector<std::string> texts;
        for (const steps::StepList& list : steps::lower_all(ranks, false)) {
          texts.push_back(steps::communication(list));
        }
        return texts;
      },
      "What each rank must do as all others do, as text.");
  def_of_ranks<int32_t, bool>(
      m, "unnoticed",
      [](const steps::Ranks& ranks, int32_t rank, bool work) {
        const auto change = work ? steps::Change::kWork : steps::Change::kOrder;
        int64_t tried = 0;
        std::vector<std::tuple<int32_t, std::string, bool>> found;
        for (const steps::Unnoticed& one : steps::unnoticed(ranks, rank, change, tried)) {
          found.emplace_back(one.step, one.what, one.captured);
        }
        return std::pair(tried, found);
      },
      R"(Which single waits, dependencies, signals and joins can be taken out of a rank's steps without a fault.

`work`: instead, which steps' work can be left out, and which places shifted. Returns how many were tried, and of each
that was not found: step, what was changed, and whether in the steps of captured calls.)",
      py::arg("rank"), py::arg("work") = false);
  m.def(
      "find_fault_in_a_row",
      [](const std::vector<Plan>& plans, const Machine& machine,
         const std::vector<bool>& kernel_takes) {
        std::vector<steps::Ranks> calls;
        for (const Plan& plan : plans) {
          calls.push_back(ranks_of(plan, machine, kernel_takes, false, {}, {}, 0, false));
        }
        return text(steps::find_fault(calls));
      },
      py::arg("plans"), py::arg("machine"), py::arg("kernel_takes"),
      "The same of calls of several plans, one after the other.");
}

}  // namespace overlap::binding
