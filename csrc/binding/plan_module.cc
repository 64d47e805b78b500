// overlap_torch._plan: the planner's classes for Python. Knows no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "binding/steps_module.h"
#include "plan/gather_rounds.h"
#include "plan/plan.h"
#include "plan/ring_order.h"
#include "plan/templates.h"
#include "planner/planner.h"
#include "steps/costs.h"

namespace py = pybind11;

namespace overlap::binding {
namespace {

using plan::BandRun;
using plan::Chunk;
using plan::Collective;
using plan::DType;
using plan::Extent;
using plan::Kernel;
using plan::KernelShape;
using plan::Layout;
using plan::Machine;
using plan::Op;
using plan::Plan;
using plan::Problem;
using plan::Resources;
using plan::Rows;
using plan::Schedule;
using plan::TileCoord;
using plan::TileOrder;
using plan::Transport;

// Functions of a valid plan would read out of bounds with another, and Python can make any.
TileOrder valid_order(const Plan& plan) {
  plan::validate(plan);
  return plan::tile_order(plan);
}

void check_index(const char* what, int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    throw py::index_error(std::string(what) + " " + std::to_string(index) +
                          " is out of range, the plan has " + std::to_string(size));
  }
}

void check_chunk(const Plan& plan, int32_t chunk) {
  plan::validate(plan);
  check_index("chunk", chunk, static_cast<int64_t>(plan.chunks.size()));
}

// Python has no references to list elements, so a sequence crosses as a tuple of frozen items: what
// cannot take effect raises, as in plan.chunks.append(...).
template <typename T>
py::tuple as_tuple(const std::vector<T>& items) {
  py::tuple result(items.size());
  for (size_t i = 0; i < items.size(); ++i) result[i] = py::cast(items[i]);
  return result;
}

// A member of the enumeration, given itself, its name in lower case, or the torch.dtype of that name. This module knows no
// torch, but every torch.dtype calls itself torch.<name>.
template <typename Enum>
Enum member(const py::object& given) {
  if (py::isinstance<Enum>(given)) return given.cast<Enum>();
  const py::object type = py::type::of(py::cast(Enum{}));
  std::string text = py::str(given);
  const std::string torch = "torch.";
  if (!py::isinstance<py::str>(given) && text.rfind(torch, 0) == 0) text.erase(0, torch.size());
  std::string allowed;
  for (const auto item : type.attr("__members__").cast<py::dict>()) {
    const auto name = py::str(item.first).attr("lower")().cast<std::string>();
    if (name == text) return item.second.cast<Enum>();
    allowed += (allowed.empty() ? "" : ", ") + name;
  }
  throw py::value_error(type.attr("__name__").cast<std::string>() + " is " +
                        py::repr(given).cast<std::string>() + ", allowed are " + allowed);
}

// Pickled, and so copied by the module copy, member by member.
template <typename Item, typename... Members>
auto pickled(Members Item::*... members) {
  return py::pickle([=](const Item& item) { return py::make_tuple(item.*members...); },
                    [=](const py::tuple& state) {
                      if (state.size() != sizeof...(members)) {
                        throw py::value_error("pickled by another release: it has " +
                                              std::to_string(state.size()) + " members, not " +
                                              std::to_string(sizeof...(members)));
                      }
                      Item item{};
                      size_t next = 0;
                      ((item.*members = state[next++].template cast<Members>()), ...);
                      return item;
                    });
}

void bind_enums(py::module_& m) {
  py::enum_<Op>(m, "Op", "The op that a problem is of.")
      .value("GEMM_ALLREDUCE", Op::kGemmAllReduce)
      .value("GEMM_REDUCESCATTER", Op::kGemmReduceScatter)
      .value("ALLGATHER_GEMM", Op::kAllGatherGemm)
      .value("GEMM_ALLTOALL", Op::kGemmAllToAll);
  py::enum_<DType>(m, "DType", "Element type of operands and result.")
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16)
      .value("FLOAT32", DType::kFloat32)
      .value("FLOAT64", DType::kFloat64);
  py::enum_<Schedule>(m, "Schedule", "When an op communicates.")
      .value("SEQUENTIAL", Schedule::kSequential, "one GEMM, and one collective before or after it")
      .value("OVERLAPPED", Schedule::kOverlapped,
             "beside the GEMM: chunk by chunk, or, over peers, by its own stores");
  py::enum_<Kernel>(m, "Kernel", "Which GEMM computes the tiles.")
      .value("LIBRARY", Kernel::kLibrary,
             "the framework's, a call for each chunk; takes every dtype, stride and alignment")
      .value("SM80", Kernel::kSm80,
             "128 x 128, bfloat16 and float16, compute capability 8.0 and newer")
      .value("SM90_PINGPONG", Kernel::kSm90Pingpong, "128 x 128, bfloat16 and float16, Hopper")
      .value("SM90_COOPERATIVE", Kernel::kSm90Cooperative,
             "128 x 256, bfloat16 and float16, Hopper")
      .value("SM90_PINGPONG_WIDE", Kernel::kSm90PingpongWide,
             "128 x 192, bfloat16 and float16, Hopper");
  py::enum_<Transport>(m, "Transport", "How chunks travel.")
      .value("NCCL", Transport::kNccl, "CUDA tensors, any ranks")
      .value("GLOO", Transport::kGloo, "tensors on CPU")
      .value("PEER", Transport::kPeer,
             "memory that 2 to 8 ranks of one host map into each other: stores of the GEMM, and "
             "copy engines");
  py::enum_<Collective>(m, "Collective", "What communicates a chunk.")
      .value("ALL_REDUCE", Collective::kAllReduce, "of gemm_allreduce")
      .value("EXCHANGE", Collective::kExchange,
             "of gemm_allreduce between two ranks: an all-gather of both chunks, then a sum")
      .value("REDUCE_SCATTER", Collective::kReduceScatter, "of gemm_reducescatter")
      .value("ALL_GATHER", Collective::kAllGather, "of allgather_gemm")
      .value("ALL_TO_ALL", Collective::kAllToAll, "of gemm_alltoall")
      .value("RING", Collective::kRing,
             "of reductions over peers: partial sums go from rank to rank, each adding its own")
      .value("DIRECT", Collective::kDirect,
             "of reductions over peers: partial sums go to the ranks that need them, which add "
             "them up");
  py::enum_<Layout>(m, "Layout", "Where finished tiles are stored until their chunk has arrived.")
      .value("ROW_MAJOR", Layout::kRowMajor, "chunks are whole row panels of the output")
      .value("PACKED", Layout::kPacked,
             "one after the other in tile order: chunks end after any tile");
}

void bind_parts(py::module_& m) {
  py::class_<Problem>(m, "Problem",
                      R"(What all ranks of a call share, so that each makes the same plan.

Attributes:
    op: the op; the constructor takes its name as well.
    m: rows of the GEMM; of all ranks together for allgather_gemm, 0 for gemm_alltoall, whose rows differ by rank.
    n: columns of the output, of all weights together.
    k: inner dimension on one rank.
    dtype: of operands and result; the constructor takes its name or a torch.dtype as well.
    world_size: number of ranks.)")
      .def(py::init([](int64_t rows, int64_t columns, int64_t inner, const py::object& dtype,
                       int32_t world_size, const py::object& op) {
             return Problem{member<Op>(op), rows, columns, inner, member<DType>(dtype), world_size};
           }),
           py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype") = DType::kBFloat16,
           py::arg("world_size") = 1, py::arg("op") = Op::kGemmAllReduce)
      .def_readwrite("op", &Problem::op)
      .def_readwrite("m", &Problem::m)
      .def_readwrite("n", &Problem::n)
      .def_readwrite("k", &Problem::k)
      .def_readwrite("dtype", &Problem::dtype)
      .def_readwrite("world_size", &Problem::world_size)
      .def_property_readonly(
          "row_parts", [](const Problem& p) { return plan::row_parts(p); },
          "Parts of the rows, one for each rank, that a chunk holds equal tile rows of; else 1.")
      .def(
          "__eq__", [](const Problem& a, const Problem& b) { return a == b; }, py::is_operator())
      .def("__repr__", &Problem::to_string)
      .def(pickled(&Problem::op, &Problem::m, &Problem::n, &Problem::k, &Problem::dtype,
                   &Problem::world_size));

  py::class_<Machine>(
      m, "Machine",
      R"(The device and the link that a plan is made for; overlap_torch.plan.machine() measures them.

Attributes:
    arch: compute capability, 80, 89, 90 ...; 0: the CPU.
    sm_count: SMs of the device.
    sm_gflops: sustained 16-bit tensor-core rate of one SM, GFLOP/s.
    has_sm80_kernels, has_sm90_kernels: what this build and this device can run.
    link_latency_us: fixed time of one all-reduce, microseconds.
    link_gbps: all-reduced message bytes in a second, GB/s.
    windows: whether NCCL's symmetric windows work in the group.
    peer_gbps: copies into a peer's memory, GB/s; 0: the ranks do not map each other's.)")
      .def(
          py::init([](int32_t arch, int32_t sm_count, double sm_gflops, bool has_sm80_kernels,
                      bool has_sm90_kernels, double link_latency_us, double link_gbps, bool windows,
                      double peer_gbps) {
            return Machine{
                arch,      sm_count, sm_gflops, has_sm80_kernels, has_sm90_kernels, link_latency_us,
                link_gbps, windows,  peer_gbps};
          }),
          py::arg("arch") = 0, py::arg("sm_count") = 0, py::arg("sm_gflops") = 0.0,
          py::arg("has_sm80_kernels") = false, py::arg("has_sm90_kernels") = false,
          py::arg("link_latency_us") = 0.0, py::arg("link_gbps") = 0.0, py::arg("windows") = false,
          py::arg("peer_gbps") = 0.0)
      .def_readwrite("peer_gbps", &Machine::peer_gbps)
      .def_readwrite("arch", &Machine::arch)
      .def_readwrite("sm_count", &Machine::sm_count)
      .def_readwrite("sm_gflops", &Machine::sm_gflops)
      .def_readwrite("has_sm80_kernels", &Machine::has_sm80_kernels)
      .def_readwrite("has_sm90_kernels", &Machine::has_sm90_kernels)
      .def_readwrite("link_latency_us", &Machine::link_latency_us)
      .def_readwrite("link_gbps", &Machine::link_gbps)
      .def_readwrite("windows", &Machine::windows)
      .def("__repr__", &Machine::to_string)
      .def(pickled(&Machine::arch, &Machine::sm_count, &Machine::sm_gflops,
                   &Machine::has_sm80_kernels, &Machine::has_sm90_kernels,
                   &Machine::link_latency_us, &Machine::link_gbps, &Machine::windows,
                   &Machine::peer_gbps));

  py::class_<Chunk>(
      m, "Chunk",
      R"(A run of tiles in tile order, communicated as one unit. Frozen: assign plan.chunks a new sequence.

Attributes:
    tiles: number of tiles; 0 in plans of gemm_alltoall, and of problems that have none.
    transport: how it travels, the same for all chunks of a plan.
    max_ctas: CTA limit of the communicator that carries it; 0: NCCL's own choice.)")
      .def(py::init([](int32_t tiles, Transport transport, int32_t max_ctas) {
             return Chunk{tiles, transport, max_ctas};
           }),
           py::arg("tiles"), py::arg("transport") = Transport::kNccl, py::arg("max_ctas") = 0)
      .def_readonly("tiles", &Chunk::tiles)
      .def_readonly("transport", &Chunk::transport)
      .def_readonly("max_ctas", &Chunk::max_ctas)
      .def(
          "__eq__", [](const Chunk& a, const Chunk& b) { return a == b; }, py::is_operator())
      .def("__hash__",
           [](const Chunk& c) {
             return py::hash(py::make_tuple(c.tiles, static_cast<int>(c.transport), c.max_ctas));
           })
      .def("__repr__",
           [](const Chunk& c) {
             return py::str("Chunk(tiles={}, transport={}, max_ctas={})")
                 .format(c.tiles, plan::name(c.transport), c.max_ctas);
           })
      .def(pickled(&Chunk::tiles, &Chunk::transport, &Chunk::max_ctas));

  py::class_<BandRun>(m, "BandRun",
                      "`count` bands of `tile_rows` tile rows each. Frozen: assign plan.bands a "
                      "new sequence.")
      .def(py::init([](int32_t tile_rows, int32_t count) { return BandRun{tile_rows, count}; }),
           py::arg("tile_rows"), py::arg("count"))
      .def_readonly("tile_rows", &BandRun::tile_rows)
      .def_readonly("count", &BandRun::count)
      .def(
          "__eq__", [](const BandRun& a, const BandRun& b) { return a == b; }, py::is_operator())
      .def("__hash__",
           [](const BandRun& r) { return py::hash(py::make_tuple(r.tile_rows, r.count)); })
      .def("__repr__",
           [](const BandRun& r) {
             return py::str("BandRun(tile_rows={}, count={})").format(r.tile_rows, r.count);
           })
      .def(pickled(&BandRun::tile_rows, &BandRun::count));

  py::class_<Resources>(m, "Resources", R"(What the GEMM leaves to communication (arXiv 2606.09200).

Attributes:
    comm_sms: SMs that the GEMM leaves free.
    smem_pad_bytes: shared memory added to each GEMM block, bytes.
    window: whether chunks are staged in an NCCL symmetric window.
    finish_ctas: CTAs that put chunks in place behind their communication; 0: a default.
    lanes: chunks in flight at a time, each on a stream and a communicator of its own.)")
      .def(py::init([](int32_t comm_sms, int32_t smem_pad_bytes, bool window, int32_t finish_ctas,
                       int32_t lanes) {
             return Resources{comm_sms, smem_pad_bytes, window, finish_ctas, lanes};
           }),
           py::arg("comm_sms") = 0, py::arg("smem_pad_bytes") = 0, py::arg("window") = false,
           py::arg("finish_ctas") = 0, py::arg("lanes") = 1)
      .def_readwrite("comm_sms", &Resources::comm_sms)
      .def_readwrite("smem_pad_bytes", &Resources::smem_pad_bytes)
      .def_readwrite("window", &Resources::window)
      .def_readwrite("finish_ctas", &Resources::finish_ctas)
      .def_readwrite("lanes", &Resources::lanes)
      .def(
          "__eq__", [](const Resources& a, const Resources& b) { return a == b; },
          py::is_operator())
      .def("__repr__",
           [](const Resources& r) {
             return py::str(
                        "Resources(comm_sms={}, smem_pad_bytes={}, window={}, finish_ctas={}, "
                        "lanes={})")
                 .format(r.comm_sms, r.smem_pad_bytes, r.window, r.finish_ctas, r.lanes);
           })
      .def(pickled(&Resources::comm_sms, &Resources::smem_pad_bytes, &Resources::window,
                   &Resources::finish_ctas, &Resources::lanes));
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan",
                   R"(How one problem runs. Plain data; validate() says whether it can run.

Attributes:
    problem: what it is a plan for.
    schedule, kernel, layout, collective: see the enumerations.
    tile_m, tile_n: the kernel's tile, elements.
    cluster_m: tile rows that a cluster computes together.
    bands: BandRuns, the tile order: band after band, within each column after column.
    chunks: Chunks, in tile order; their tiles sum up to the grid's.
    resources: what the GEMM leaves to communication.)")
      .def(py::init<>())
      .def_readwrite("problem", &Plan::problem)
      .def_readwrite("schedule", &Plan::schedule)
      .def_readwrite("kernel", &Plan::kernel)
      .def_readwrite("tile_m", &Plan::tile_m)
      .def_readwrite("tile_n", &Plan::tile_n)
      .def_readwrite("cluster_m", &Plan::cluster_m)
      .def_readwrite("layout", &Plan::layout)
      .def_readwrite("collective", &Plan::collective)
      .def_readwrite("resources", &Plan::resources)
      .def_property(
          "bands", [](const Plan& p) { return as_tuple(p.bands); },
          [](Plan& p, std::vector<BandRun> bands) { p.bands = std::move(bands); })
      .def_property(
          "chunks", [](const Plan& p) { return as_tuple(p.chunks); },
          [](Plan& p, std::vector<Chunk> chunks) { p.chunks = std::move(chunks); })
      .def_property_readonly(
          "tiles_m", [](const Plan& p) { return valid_order(p).tiles_m; },
          "Tile rows of all parts, rounded up so that clusters come out even.")
      .def_property_readonly(
          "tiles_n", [](const Plan& p) { return valid_order(p).tiles_n; }, "Tile columns.")
      .def(
          "tile_coord",
          [](const Plan& p, int32_t index) {
            const TileOrder order = valid_order(p);
            check_index("tile", index, order.num_tiles());
            const TileCoord coord = plan::tile_coord(order, index);
            return py::make_tuple(coord.row, coord.column);
          },
          py::arg("index"), "(row, column) of the tile at `index` in tile order.")
      .def(
          "tile_index",
          [](const Plan& p, int32_t row, int32_t column) {
            const TileOrder order = valid_order(p);
            check_index("tile row", row, order.tiles_m);
            check_index("tile column", column, order.tiles_n);
            return plan::tile_index(order, {row, column});
          },
          py::arg("row"), py::arg("column"), "Position in tile order of the tile (row, column).")
      .def(
          "part_row",
          [](const Plan& p, int32_t tile_row) {
            const TileOrder order = valid_order(p);
            check_index("tile row", tile_row, order.tiles_m);
            const plan::PartRow place = plan::part_row(order, tile_row);
            return py::make_tuple(place.part, place.row);
          },
          py::arg("tile_row"), "(part, tile row in the part) of a tile row of the grid.")
      .def(
          "tile_chunk",
          [](const Plan& p, int32_t index) {
            const TileOrder order = valid_order(p);
            check_index("tile", index, order.num_tiles());
            return plan::tile_chunk(order, index);
          },
          py::arg("index"), "Chunk of the tile at `index` in tile order.")
      .def(
          "packed_offset",
          [](const Plan& p, int32_t index) {
            const TileOrder order = valid_order(p);
            check_index("tile", index, order.num_tiles());
            return plan::packed_offset(index, p.tile_m, p.tile_n);
          },
          py::arg("index"), "First element of the tile at `index` in a packed buffer.")
      .def(
          "chunk_extent",
          [](const Plan& p, int32_t chunk) {
            check_chunk(p, chunk);
            const Extent extent = plan::chunk_extent(p, chunk);
            return py::make_tuple(extent.offset, extent.count);
          },
          py::arg("chunk"),
          "(offset, count) of the chunk in the staging buffer, in elements; of several parts, the "
          "first, and the others follow.")
      .def(
          "chunk_rows",
          [](const Plan& p, int32_t chunk) {
            check_chunk(p, chunk);
            if (p.layout != Layout::kRowMajor) {
              throw py::value_error(
                  "chunk_rows is for the layout row_major, the plan has packed: "
                  "take chunk_extent");
            }
            const Rows rows = plan::chunk_rows(p, chunk);
            return py::make_tuple(rows.begin, rows.end);
          },
          py::arg("chunk"),
          "Rows [begin, end) that a row-major chunk covers: of the output, or of each part.")
      .def(
          "buffer_elements",
          [](const Plan& p) {
            plan::validate(p);
            return plan::buffer_elements(p);
          },
          "Elements of the staging buffer.")
      .def("validate", &validate_with_steps,
           "Raises ValueError if the plan cannot run, as the function does.")
      .def("encode", &plan::encode, "The plan as a flat list of integers.")
      .def(
          "copy", [](const Plan& p) { return Plan(p); }, "A copy that changes apart.")
      .def(
          "__eq__", [](const Plan& a, const Plan& b) { return a == b; }, py::is_operator())
      .def("__repr__", &Plan::to_string)
      .def(py::pickle([](const Plan& p) { return py::make_tuple(plan::encode(p)); },
                      [](const py::tuple& state) {
                        return plan::decode(state[0].cast<std::vector<int64_t>>());
                      }));
}

py::list launch_tuples(const std::vector<plan::GatherLaunch>& launches) {
  py::list result;
  for (const plan::GatherLaunch& launch : launches) {
    result.append(py::make_tuple(launch.first_tile, launch.end_tile, launch.at_once));
  }
  return result;
}

void check_gather(const Plan& plan) {
  plan::validate(plan);
  if (plan.problem.op != Op::kAllGatherGemm || plan.schedule != Schedule::kOverlapped) {
    throw py::value_error("the launches are those of overlapped plans of allgather_gemm, not of " +
                          plan.to_string());
  }
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
  m.def(
      "plan_gather_launches",
      [](const Plan& plan, int32_t sm_count) {
        check_gather(plan);
        return launch_tuples(plan::gather_launches(plan, sm_count));
      },
      py::arg("plan"), py::arg("sm_count"), "The same of a plan.");
  m.def(
      "gather_rows",
      [](const Plan& plan, int64_t columns, int32_t rank) {
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
      "(arrival, column, whether of the own input, input row, output part, tile row in it) of each "
      "tile of a weight of so many columns, in the order of the rank's GEMM.");
}

void bind_ring(py::module_& m) {
  m.def(
      "ring_tiles",
      [](int32_t parts, int32_t part_tile_rows, int32_t tiles_n, int32_t round_rows) {
        if (parts < 2 || parts > plan::kMaxPeerRanks || tiles_n < 1 || round_rows < 1 ||
            part_tile_rows < 1 || part_tile_rows % round_rows != 0) {
          throw py::value_error("a ring of " + std::to_string(parts) + " parts of " +
                                std::to_string(part_tile_rows) + " x " + std::to_string(tiles_n) +
                                " tiles in rounds of " + std::to_string(round_rows) +
                                " tile rows: allowed are 2 to " +
                                std::to_string(plan::kMaxPeerRanks) +
                                " parts, of one tile or more and of whole rounds");
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
          tiles.append(py::make_tuple(row.turn, row.row, coord.column));
        }
        return tiles;
      },
      py::arg("parts"), py::arg("part_tile_rows"), py::arg("tiles_n"), py::arg("round_rows"),
      "(turn, tile row of its part, column) of each tile, in the order of a ring's GEMM.");
  m.def(
      "store_spread_us",
      [](const Plan& plan, const Machine& machine) {
        plan::validate(plan);
        if (plan.collective != plan::Collective::kRing &&
            plan.collective != plan::Collective::kDirect) {
          throw py::value_error("only rings and direct plans store into peers' memory, not " +
                                plan.to_string());
        }
        return steps::store_spread_us(plan, machine);
      },
      py::arg("plan"), py::arg("machine"),
      "Microseconds over which a round of tiles leaves for the peers.");
}

void check_counts(const Plan& plan, int32_t rank, const std::vector<int64_t>& rows) {
  const auto world = static_cast<size_t>(plan.problem.world_size);
  if (rows.size() != world || rank < 0 || static_cast<size_t>(rank) >= world) {
    throw py::value_error("rank " + std::to_string(rank) + " with " + std::to_string(rows.size()) +
                          " counts of rows, allowed are ranks below " + std::to_string(world) +
                          " and one count for each");
  }
}

// What one of two ranks asks of its all-to-all over NCCL.
template <auto kFunction>
void def_pair(py::module_& m, const char* name, const char* doc) {
  m.def(
      name,
      [name](const Plan& plan, const Machine& machine, int32_t rank,
             const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
             int32_t sms_beside) {
        plan::validate(plan);
        if (plan.problem.op != Op::kGemmAllToAll || plan.problem.world_size != 2 ||
            plan::over_peers(plan)) {
          throw py::value_error(
              std::string(name) +
              " is for plans of gemm_alltoall between two ranks over nccl, not for " +
              plan.to_string());
        }
        check_counts(plan, rank, send_rows);
        check_counts(plan, rank, receive_rows);
        if (sms_beside < 1) {
          throw py::value_error("sms_beside is " + std::to_string(sms_beside) +
                                ", allowed are 1 and more");
        }
        return kFunction(plan, machine, rank, send_rows, receive_rows, sms_beside);
      },
      py::arg("plan"), py::arg("machine"), py::arg("rank"), py::arg("send_rows"),
      py::arg("receive_rows"), py::arg("sms_beside"), doc);
}

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
  m.attr("MAX_CHUNKS") = plan::kMaxChunks;
  m.attr("BAND_ROWS") = plan::kBandRows;
  m.attr("MAX_BAND_RUNS") = plan::kMaxBandRuns;
  m.def("kernel_shape", &plan::kernel_shape, py::arg("kernel"), py::arg("on_cpu") = false,
        "Tile and cluster of a kernel.");
  m.def("encode", &plan::encode, py::arg("plan"),
        "The plan as a flat list of integers, the form in which the op library takes it.");
  m.def("decode", &plan::decode, py::arg("code"),
        "The plan that encode made a list of. Raises ValueError on any other list.");
  m.def("candidates", &planner::candidates, py::arg("problem"), py::arg("machine"),
        "All plans that the planner weighs, the sequence first.");
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
      "share of the sequence's time less so many microseconds.");
  m.def("make_sequential", &plan::make_sequential, py::arg("problem"), py::arg("machine"),
        "The sequence: one GEMM, and one collective before or after it.");
  m.def("make_direct", &plan::make_direct, py::arg("problem"), py::arg("kernel"),
        "As overlap_torch.plan.direct.");
  m.def("make_all_to_all", &plan::make_all_to_all, py::arg("problem"), py::arg("kernel"),
        py::arg("resources") = Resources{}, py::arg("max_ctas") = 0,
        py::arg("transport") = Transport::kNccl,
        "A plan of gemm_alltoall, for any numbers of rows. `transport`: nccl, peer (2 to 8 ranks, "
        "rows "
        "of whole 16-byte accesses; `max_ctas` is then that of long messages, which NCCL takes) or "
        "gloo.");
  m.def(
      "stores_messages",
      [](const Plan& plan, const Machine& machine, int32_t rank,
         const std::vector<int64_t>& send_rows) {
        plan::validate(plan);
        if (plan.problem.op != Op::kGemmAllToAll || !plan::over_peers(plan)) {
          throw py::value_error(
              "stores_messages is for plans of gemm_alltoall over peers, not for " +
              plan.to_string());
        }
        check_counts(plan, rank, send_rows);
        return steps::stores_messages(plan, machine, rank, send_rows);
      },
      py::arg("plan"), py::arg("machine"), py::arg("rank"), py::arg("send_rows"),
      "Whether gemm_alltoall over peers, on this rank, launches its GEMM once for each rank's rows "
      "and "
      "stores them where they go; else the framework's computes all and a kernel sends them.");
  def_pair<&steps::rows_beside_exchange>(
      m, "rows_beside_exchange",
      "How many of this rank's own rows gemm_alltoall computes beside NCCL's exchange, on so many "
      "SMs; the others come behind it, on all.");
  def_pair<&steps::computes_apart>(
      m, "computes_apart",
      "Whether gemm_alltoall, on this rank, computes the peer's rows first and its own ones beside "
      "NCCL's exchange; else the framework's GEMM computes all before it.");
  bind_gather(m);
  bind_ring(m);
  m.def("make_row_panels", &plan::make_row_panels, py::arg("problem"), py::arg("kernel"),
        py::arg("chunk_rows_of_tiles"), py::arg("band_rows"), py::arg("resources") = Resources{},
        py::arg("max_ctas") = 0, py::arg("transport") = Transport::kNccl,
        py::arg("shape") = KernelShape{}, "As overlap_torch.plan.row_panels.");
  m.def("make_packed", &plan::make_packed, py::arg("problem"), py::arg("kernel"),
        py::arg("chunk_tiles"), py::arg("band_rows"), py::arg("resources") = Resources{},
        py::arg("max_ctas") = 0, py::arg("transport") = Transport::kNccl,
        py::arg("shape") = KernelShape{}, "As overlap_torch.plan.packed.");
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Problems, plans, the planner, and the steps of plans.";
  bind_enums(m);
  bind_parts(m);
  bind_plan(m);
  bind_planner(m);
  bind_steps(m);
  bind_proof(m);
}

}  // namespace overlap::binding
