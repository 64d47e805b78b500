// The planner and what makes plans, for Python, in overlap_torch._plan. Knows no torch.
#include "planner/planner.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>

#include "binding/python/fields_module.h"
#include "binding/python/steps_module.h"
#include "plan/gather_rounds.h"
#include "plan/message.h"
#include "plan/plan.h"
#include "plan/ring_order.h"
#include "plan/templates.h"

namespace overlap::binding {
namespace {

using namespace plan;  // whose types these are

void check_gather(const Plan& plan) {
  if (!plan.problem.traits().gathers() || plan.schedule != plan::Schedule::kOverlapped) {
    plan::fail("the launches are those of overlapped plans of allgather_gemm, not of ",
               plan.to_string());
  }
}

void bind_orders(py::module_& m) {
  m.def(
      "gather_rows",
      [](const Plan& plan, int64_t columns, int32_t rank) {
        plan::validate(plan);
        check_gather(plan);
        check_index("rank", rank, plan.problem.world_size);
        const TileOrder order = plan::gather_order(plan, columns);
        plan::RowMap map;
        map.mode = plan::RowMap::Mode::kGather;
        map.part_rows = static_cast<int32_t>(plan::part_rows(plan));
        map.own_part = rank;
        py::list rows;
        for (int32_t index = 0; index < order.num_tiles(); ++index) {
          const TileCoord coord = plan::tile_coord(order, index);
          const plan::TileRowPlace place = plan::tile_row_place(order, map, plan.tile_m, coord.row);
          rows.append(py::make_tuple(plan::tile_chunk(order, index), coord.column, place.own_input,
                                     place.input_row, place.output_part, place.output_row));
        }
        return rows;
      },
      py::arg("plan"), py::arg("columns"), py::arg("rank"),
      "(arrival, column, whether of the rank's own input, input row, output part, tile row in it) "
      "of each tile of a weight with these columns, in the order of the rank's GEMM.");
  m.def(
      "ring_tiles",
      [](int32_t parts, int32_t part_tile_rows, int32_t tiles_n, int32_t round_rows) {
        if (parts < 2 || parts > plan::kMaxPeers || tiles_n < 1 || round_rows < 1 ||
            part_tile_rows < 1 || part_tile_rows % round_rows != 0) {
          plan::fail("a ring of ", parts, " parts of ", part_tile_rows, " x ", tiles_n,
                     " tiles in rounds of ", round_rows, " tile rows: allowed are 2 to ",
                     plan::kMaxPeers, " parts, of one tile or more and of whole rounds");
        }
        const TileOrder order = plan::ring_order(parts, part_tile_rows, tiles_n, round_rows);
        plan::RowMap map;
        map.mode = plan::RowMap::Mode::kSplit;
        map.part_tile_rows = part_tile_rows;
        map.round_tile_rows = round_rows;
        py::list tiles;
        for (int32_t index = 0; index < order.num_tiles(); ++index) {
          const TileCoord coord = plan::tile_coord(order, index);
          const plan::SplitRow row = plan::split_row(order, map, coord.row);
          tiles.append(py::make_tuple(row.phase, row.row, coord.column));
        }
        return tiles;
      },
      py::arg("parts"), py::arg("part_tile_rows"), py::arg("tiles_n"), py::arg("round_rows"),
      "(turn, tile row of its part, column) of each tile, in the order of a ring's GEMM.");
}

// Plans for kernels of the caller's.
void bind_kernel_planner(py::module_& m) {
  m.def(
      "make_kernel_plan",
      [](const Problem& problem, const Machine& machine, std::pair<int32_t, int32_t> tile,
         double kernel_us, int32_t comm_sms, int32_t chunks, bool stripes) {
        return planner::make_kernel_plan(problem, machine,
                                         {.tile_m = tile.first,
                                          .tile_n = tile.second,
                                          .kernel_us = kernel_us,
                                          .comm_sms = comm_sms,
                                          .chunks = chunks,
                                          .stripes = stripes});
      },
      py::arg("problem"), py::arg("machine"), py::arg("tile"), py::arg("kernel_us"),
      py::arg("comm_sms") = 0, py::arg("chunks") = 0, py::arg("stripes") = true,
      "The plan of the smallest expected time for a kernel of the caller's, which takes "
      "`kernel_us` by itself on all SMs and leaves `comm_sms` of them to communication. `chunks`: "
      "their number; 0: any number, or, of a reduction over peers, stores into the ranks' memory "
      "(the collective stripes; not if `stripes` is False): one chunk unless another plan is "
      "expected to gain clearly.");
  m.def(
      "price_kernel",
      [](const Plan& plan, const Machine& machine, double kernel_us) {
        plan::validate(plan);
        return planner::price_kernel(plan, machine, kernel_us);
      },
      py::arg("plan"), py::arg("machine"), py::arg("kernel_us"),
      "The Price of the steps of a job by this plan, whose kernel takes that time by itself.");
}

}  // namespace

void bind_planner(py::module_& m) {
  py::class_<KernelShape>(m, "KernelShape", "Tile shape and cluster of a kernel.")
      .def(py::init([](int32_t tile_m, int32_t tile_n, int32_t cluster_m) {
             return KernelShape{tile_m, tile_n, cluster_m};
           }),
           py::arg("tile_m") = 0, py::arg("tile_n") = 0, py::arg("cluster_m") = 1)
      .def_readonly("tile_m", &KernelShape::tile_m)
      .def_readonly("tile_n", &KernelShape::tile_n)
      .def_readonly("cluster_m", &KernelShape::cluster_m)
      .def("__repr__", [](const KernelShape& s) {
        return py::str("KernelShape(tile_m={}, tile_n={}, cluster_m={})")
            .format(s.tile_m, s.tile_n, s.cluster_m);
      });
  m.attr("MAX_PEERS") = plan::kMaxPeers;
  m.attr("MAX_CHUNKS") = plan::kMaxChunks;
  m.attr("MAX_TRANSFERS") = plan::kMaxTransfers;
  m.attr("BAND_ROWS") = plan::kBandRows;
  m.attr("MAX_BAND_RUNS") = plan::kMaxBandRuns;
  m.def("kernel_shape", &plan::kernel_shape, py::arg("kernel"), py::arg("on_cpu") = false,
        "Tile and cluster of a kernel.");
  m.def("encode", &plan::encode, py::arg("plan"),
        "The plan as a flat list of integers, the form in which the op library takes it.");
  m.def("decode", &plan::decode, py::arg("code"),
        "The plan that encode made a list of. Raises ValueError on any other list.");
  m.def("candidates", &planner::candidates, py::arg("problem"), py::arg("machine"),
        py::arg("all") = false,
        "The plans that the planner weighs, the sequence first; with `all`, also those that nobody "
        "has measured on such a machine: it weighs them only where its profile is of other "
        "machines.");
  bind_kernel_planner(m);
  m.def("make_plan", &planner::make_plan, py::arg("problem"), py::arg("machine"),
        "The planner's choice: the candidate of the smallest predicted time; the sequence unless "
        "another is expected to gain clearly.");
  m.def(
      "needed_gain",
      [](const Plan& plan, const Machine& machine) {
        const planner::NeededGain needed = planner::needed_gain(plan, machine);
        return py::make_tuple(needed.share, needed.us);
      },
      py::arg("plan"), py::arg("machine"),
      "(share, us): the planner takes the plan only where it is expected to need less than this "
      "share of the sequence's time, less these microseconds.");
  m.def("make_sequential", &plan::make_sequential, py::arg("problem"), py::arg("machine"),
        "The sequence: one GEMM, and one collective before or after it.");
  m.def("make_at_once", &plan::make_at_once, py::arg("problem"), py::arg("kernel"),
        py::arg("schedule") = py::none(), "As overlap_torch.plan.templates.at_once.");
  m.def("make_all_to_all", &plan::make_all_to_all, py::arg("problem"), py::arg("kernel"),
        py::arg("resources") = Resources{}, py::arg("max_ctas") = 0,
        py::arg("transport") = Transport::kNccl,
        "A plan of gemm_alltoall, for any numbers of rows. `transport`: nccl, peer (2 to 8 ranks, "
        "rows of whole 16-byte accesses; `max_ctas` is then that of long messages, which NCCL "
        "takes) or gloo.");
  bind_orders(m);
  m.def("make_row_panels", &plan::make_row_panels, py::arg("problem"), py::arg("kernel"),
        py::arg("chunk_rows_of_tiles"), py::arg("band_rows"), py::arg("resources") = Resources{},
        py::arg("max_ctas") = 0, py::arg("transport") = Transport::kNccl,
        py::arg("shape") = KernelShape{}, py::arg("collective") = py::none(), py::arg("clique") = 0,
        "As overlap_torch.plan.templates.row_panels.");
  m.def("make_packed", &plan::make_packed, py::arg("problem"), py::arg("kernel"),
        py::arg("chunk_tiles"), py::arg("band_rows"), py::arg("resources") = Resources{},
        py::arg("max_ctas") = 0, py::arg("transport") = Transport::kNccl,
        py::arg("shape") = KernelShape{}, "As overlap_torch.plan.templates.packed.");
}

}  // namespace overlap::binding
