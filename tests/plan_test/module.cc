// Tests ask this of plans, costs and the planner beyond overlap_torch._plan: not shipped.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/python/fields_module.h"
#include "binding/python/steps_module.h"
#include "plan/agreement.h"
#include "plan/gather_rounds.h"
#include "plan/plan.h"
#include "planner/planner.h"
#include "steps/price/costs.h"

namespace overlap::binding {

void bind_proof_tests(py::module_& m);

namespace {

using plan::Machine;
using plan::Plan;
using plan::Problem;

py::list launch_tuples(const std::vector<plan::GatherLaunch>& launches) {
  py::list result;
  for (const plan::GatherLaunch& launch : launches) {
    result.append(py::make_tuple(launch.first_tile, launch.end_tile, launch.at_once));
  }
  return result;
}

void bind_gather(py::module_& m) {
  m.def(
      "gather_launches",
      [](const std::vector<int32_t>& arriving, int32_t cluster_m, int32_t beside, int32_t alone) {
        return launch_tuples(plan::gather_launches(arriving, cluster_m, beside, alone));
      },
      py::arg("arriving"), py::arg("cluster_m"), py::arg("beside"), py::arg("alone"),
      "(first tile, end tile, tiles at a time) of each launch of an all-gather's GEMM; `arriving`: "
      "the tiles that can be computed before each, beyond those before.");
}

void bind_alltoall(py::module_& m) {
  m.def("stores_messages", &steps::stores_messages, py::arg("plan"), py::arg("machine"),
        py::arg("rank"), py::arg("send_rows"),
        "Whether gemm_alltoall over peers, on this rank, launches its GEMM once for each rank's "
        "rows, or, by a plan of one_launch, once for all, and stores them where they go; else the "
        "framework's computes all and a kernel sends them.");
  m.def("computes_apart", &steps::computes_apart, py::arg("plan"), py::arg("machine"),
        py::arg("rank"), py::arg("send_rows"), py::arg("receive_rows"), py::arg("sms_beside"),
        "Whether gemm_alltoall over NCCL, on this one of two ranks, computes the peer's rows first "
        "and its own ones beside the exchange; else the framework's GEMM computes all before it.");
}

void check_chunk(const Plan& plan, int32_t chunk) {
  plan::validate(plan);
  check_index("chunk", chunk, static_cast<int64_t>(plan.chunks.size()));
}

void bind_plan_tests(py::module_& m) {
  m.def(
      "packed_offset",
      [](const Plan& p, int32_t index) {
        plan::validate(p);
        check_index("tile", index, plan::tile_order(p).num_tiles());
        return plan::packed_offset(index, p.tile_m, p.tile_n);
      },
      py::arg("plan"), py::arg("index"),
      "First element of the tile at `index` in a packed buffer.");
  m.def(
      "chunk_extent",
      [](const Plan& p, int32_t chunk) {
        check_chunk(p, chunk);
        const plan::Extent extent = plan::chunk_extent(p, chunk);
        return py::make_tuple(extent.offset, extent.count);
      },
      py::arg("plan"), py::arg("chunk"),
      "(offset, count) of the chunk in the staging buffer, in elements; of several parts, the "
      "first, and the others follow.");
  m.def(
      "chunk_rows",
      [](const Plan& p, int32_t chunk) {
        check_chunk(p, chunk);
        const plan::Rows rows = plan::chunk_rows(p, chunk);
        return py::make_tuple(rows.begin, rows.end);
      },
      py::arg("plan"), py::arg("chunk"),
      "Rows [begin, end) that a row-major chunk covers: of the output, or of each part.");
  m.def(
      "buffer_elements",
      [](const Plan& p) {
        plan::validate(p);
        return plan::buffer_elements(p);
      },
      py::arg("plan"), "Elements of the staging buffer.");
}

void bind_planner_tests(py::module_& m) {
  m.def(
      "agree",
      [](const std::vector<Machine>& machines, const std::vector<int32_t>& nccl_versions,
         const std::vector<uint64_t>& builds, std::vector<int32_t> serials) {
        serials.resize(serials.empty() ? machines.size() : serials.size());
        std::vector<plan::RankFacts> all;
        for (size_t rank = 0; rank < machines.size(); ++rank) {
          all.push_back(plan::facts_of(machines[rank], nccl_versions[rank], builds[rank],
                                       static_cast<plan::Serial>(serials[rank])));
        }
        const plan::Agreement agreed = plan::agree(machines[0], all);
        return py::make_tuple(agreed.machine, agreed.difference, agreed.why_serial);
      },
      py::arg("machines"), py::arg("nccl_versions"), py::arg("builds"),
      py::arg("serials") = std::vector<int32_t>{},
      "(machine, difference, why_serial): what ranks with these machines plan for; which of them "
      "differs in what; and whose kernels run one at a time; \"\" if none. `builds` are hashes of "
      "what they were built from, `serials` what serial_by says.");
  m.def("ranks_of_each_host", &plan::ranks_of_each_host, py::arg("hosts"), py::arg("most"),
        "See plan/agreement.h.");
  m.def("ranks_of_windows", &plan::ranks_of_windows, py::arg("host_ranks"), py::arg("team"),
        py::arg("world_size"), py::arg("most"), "See plan/agreement.h.");
  m.def("why_no_peers", &plan::why_no_peers, py::arg("sources"), "See plan/agreement.h.");
  m.def(
      "serial_by",
      [](const std::optional<std::string>& launch_blocking, const std::string& maps,
         const std::string& tracer) {
        const plan::Serial found =
            plan::serial_by(launch_blocking ? launch_blocking->c_str() : nullptr, maps, tracer);
        return py::make_tuple(static_cast<int32_t>(found), plan::name(found));
      },
      py::arg("launch_blocking"), py::arg("maps"), py::arg("tracer"),
      "(number, name) of what makes kernels run one at a time: by CUDA_LAUNCH_BLOCKING, the text "
      "of /proc/self/maps, and the name of the tracing process.");
  m.def(
      "make_plan_between",
      [](const Problem& problem, const Machine& machine) {
        const auto neighbours = planner::neighbours(problem, machine);
        if (!neighbours) return planner::make_plan(problem, machine);
        return planner::make_plan_between(problem, machine,
                                          planner::best_families((*neighbours)[0], machine),
                                          planner::best_families((*neighbours)[1], machine));
      },
      py::arg("problem"), py::arg("machine"),
      "What a group plans for this M: where the planner weighs all, its choice, and elsewhere the "
      "best of what is best at the two M beside it.");
  m.def(
      "kernel_candidates",
      [](const Problem& problem, const Machine& machine, std::pair<int32_t, int32_t> tile,
         double kernel_us, int32_t comm_sms) {
        return planner::kernel_candidates(problem, machine,
                                          {.tile_m = tile.first,
                                           .tile_n = tile.second,
                                           .kernel_us = kernel_us,
                                           .comm_sms = comm_sms});
      },
      py::arg("problem"), py::arg("machine"), py::arg("tile"), py::arg("kernel_us"),
      py::arg("comm_sms") = 0,
      "The plans that are weighed for a kernel of the caller's: all in one chunk first.");
}

}  // namespace

PYBIND11_MODULE(_plan_test, m) {
  py::module_::import("overlap_torch._plan");  // has the classes
  bind_gather(m);
  bind_alltoall(m);
  bind_plan_tests(m);
  bind_planner_tests(m);
  bind_proof_tests(m);
}

}  // namespace overlap::binding
