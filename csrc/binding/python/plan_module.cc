// overlap_torch._plan: the planner's classes for Python. Knows no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "binding/python/fields_module.h"
#include "binding/python/steps_module.h"
#include "plan/plan.h"
#include "plan/plan_fields.h"
#include "plan/profile.h"

namespace overlap::binding {
namespace {

using namespace plan;  // whose types these are

// Functions of a valid plan would read out of bounds with another, and Python can make any.
TileOrder valid_order(const Plan& plan) {
  plan::validate(plan);
  return plan::tile_order(plan);
}

// The same, for a tile that it has.
TileOrder order_of_tile(const Plan& plan, int32_t index) {
  const TileOrder order = valid_order(plan);
  check_index("tile", index, order.num_tiles());
  return order;
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

void bind_enums(py::module_& m) {
  bind_enum<Op>(m);
  bind_enum<DType>(m);
  bind_enum<Recipe>(m);
  bind_enum<Invariance>(m);
  bind_enum<Schedule>(m);
  py::class_<KernelTraits>(m, "KernelTraits", "The abilities of a kernel.")
      .def_readonly("least_arch", &KernelTraits::least_arch,
                    "The least compute capability that it needs: 80, 90; 0: none.")
      .def_readonly("block_bytes", &KernelTraits::block_bytes,
                    "Shared memory of a block, to which a plan may add; 0: it takes no more.")
      .def_property_readonly(
          "takes_fp8", [](const KernelTraits& one) { return one.can(kTakesFp8); },
          "Scaled operands are taken.");
  bind_enum<Kernel>(m).def_property_readonly(
      "traits", [](Kernel kernel) { return traits(kernel); }, "The kernel's abilities.");
  py::class_<TransportTraits>(m, "TransportTraits", "The abilities of a transport.")
      .def_readonly("on_cpu", &TransportTraits::on_cpu, "The host's memory travels.")
      .def_readonly("maps_memory", &TransportTraits::maps_memory,
                    "Ranks store into each other's memory.");
  bind_enum<Transport>(m).def_property_readonly(
      "traits", [](Transport transport) { return traits(transport); },
      "The transport's abilities.");
  bind_enum<Collective>(m);
  bind_enum<Layout>(m);
  bind_enum<Memory>(m);
  bind_enum<Way>(m);
  bind_enum<Engine>(m);
}

void bind_profile(py::module_& m) {
  py::class_<Profile, std::shared_ptr<Profile>>(
      m, "Profile",
      R"(The times and rates of work on a machine: all numbers that are fitted to one, as data. Frozen.

Read from a flat JSON object: names and units are those of the shipped file, overlap_torch/profiles/h200.json, which also
supplies the fields that a profile lacks. Times are in microseconds, rates in GB/s, sizes in bytes.

Attributes:
    name: its own name.
    source: the file that it was read from.
    made_by, made_at, note: how it was made, when, remarks; empty: not known.
    gpu: the GPU that it was measured on; empty: not known.
    missing: names of the fields that it lacks, such as "gemm.start_us".)")
      .def_static(
          "shipped", [] { return in_python(plan::shipped_profile()); },
          "The profile that is shipped, compiled in.")
      .def_static(
          "load",
          [](const py::object& path) {
            const auto text = py::module_::import("os").attr("fspath")(path).cast<std::string>();
            return in_python(plan::load_profile(text));
          },
          py::arg("path"),
          "The profile in a JSON file. ValueError names file and field, and says what is allowed.")
      .def_static(
          "parse",
          [](const std::string& text, const std::string& source) {
            return in_python(plan::parse_profile(text, source));
          },
          py::arg("text"), py::arg("source") = "<text>",
          "The same from JSON text; `source` names it in messages.")
      .def_static(
          "fields",
          [] {
            py::dict result;
            for (const plan::ProfileField& field : plan::profile_fields()) {
              result[py::str(field.name)] = field.allowed();
            }
            return result;
          },
          "{name: allowed values} of all fields, in the shipped file's order.")
      .def_readonly("name", &Profile::name)
      .def_readonly("source", &Profile::source)
      .def_property_readonly("made_by", [](const Profile& p) { return p.made.by; })
      .def_property_readonly("made_at", [](const Profile& p) { return p.made.at; })
      .def_property_readonly("note", [](const Profile& p) { return p.made.note; })
      .def_property_readonly("gpu", [](const Profile& p) { return p.machine.gpu; })
      .def_property_readonly("missing", [](const Profile& p) { return as_tuple(p.missing); })
      .def("to_json", &Profile::to_json,
           "The text of a file with the same fields, which reads back to the same numbers.")
      .def(
          "__eq__", [](const Profile& a, const Profile& b) { return a.to_json() == b.to_json(); },
          py::is_operator())
      .def("__hash__", [](const Profile& p) { return py::hash(py::str(p.to_json())); })
      .def("__repr__", [](const Profile& p) { return "Profile '" + p.name + "' of " + p.source; })
      .def(py::pickle([](const Profile& p) { return py::make_tuple(p.to_json(), p.source); },
                      [](const py::tuple& state) {
                        check_members(state, 2);
                        return in_python(plan::parse_profile(state[0].cast<std::string>(),
                                                             state[1].cast<std::string>()));
                      }));
}

Problem problem_of(int64_t rows, int64_t columns, int64_t inner, const py::object& dtype,
                   int32_t world_size, const py::object& op, const py::object& recipe,
                   const py::object& output_dtype, bool fast_accum, const py::object& invariance) {
  if (world_size < 1) {
    plan::fail("problem has world_size = ", world_size,
               ", allowed are 1 or more: take the process group's size");
  }
  Problem problem{member<Op>(op),
                  rows,
                  columns,
                  inner,
                  member<DType>(dtype),
                  world_size,
                  member<Recipe>(recipe),
                  DType::kBFloat16,
                  fast_accum,
                  member<Invariance>(invariance)};
  if (!output_dtype.is_none()) {
    problem.output_dtype = member<DType>(output_dtype);
  } else if (problem.recipe == Recipe::kNone) {
    problem.output_dtype = problem.dtype;
  }
  return problem;
}

void bind_parts(py::module_& m) {
  py::class_<OpTraits>(m, "OpTraits", "The rows that an op moves before or after its GEMM.")
      .def_property_readonly("gathers", &OpTraits::gathers, "Rows of the input are gathered.")
      .def_property_readonly("all_reduces", &OpTraits::all_reduces, "Products are all-reduced.")
      .def_property_readonly("scatters", &OpTraits::scatters, "Products are reduce-scattered.")
      .def_property_readonly("sums", &OpTraits::sums, "Products are added between ranks.")
      .def_readonly("parts_of_ranks", &OpTraits::parts_of_ranks,
                    "The ranks have equal parts of the input's or the output's rows.")
      .def_readonly("rows_by_rank", &OpTraits::rows_by_rank,
                    "The ranks have any numbers of rows, which each call says.");

  auto problem = bind_fields<Problem>(m);
  problem
      .def(py::init(&problem_of), py::arg("m"), py::arg("n"), py::arg("k"),
           py::arg("dtype") = DType::kBFloat16, py::arg("world_size") = 1,
           py::arg("op") = Op::kGemmAllReduce, py::arg("recipe") = Recipe::kNone,
           py::arg("output_dtype") = py::none(), py::arg("fast_accum") = false,
           py::arg("invariance") = Invariance::kNone)
      .def_property_readonly(
          "row_parts", [](const Problem& p) { return plan::op_row_parts(p); },
          "Parts of the rows, one for each rank, that a chunk holds equal tile rows of; else 1.")
      .def_property_readonly("traits", &Problem::traits, "The rows that the op moves, and whose.")
      .def("__repr__", &Problem::to_string);
  def_equality(problem);
  def_pickle(problem);

  auto machine = bind_fields<Machine>(m);
  def_init(machine);
  machine.def("__repr__", &Machine::to_string);
  def_pickle(machine);

  auto chunk = bind_fields<Chunk, true>(m);
  auto run = bind_fields<BandRun, true>(m);
  auto resources = bind_fields<Resources>(m);
  const auto plain = [](auto& bound) {
    def_init(bound);
    def_equality(bound);
    def_repr(bound);
    def_pickle(bound);
  };
  plain(chunk);
  plain(run);
  plain(resources);
  def_hash(chunk);
  def_hash(run);

  auto rectangle = bind_fields<Rectangle, true>(m);
  auto region = bind_fields<Region, true>(m);
  auto transfer = bind_fields<Transfer, true>(m);
  auto program = bind_fields<Program>(m);
  plain(rectangle);
  plain(region);
  plain(transfer);
  plain(program);
  def_hash(rectangle);
  def_hash(region);
  def_hash(transfer);
}

void bind_plan(py::module_& m) {
  auto bound = bind_fields<Plan>(m);
  def_equality(bound);
  bound.def(py::init<>())
      .def_property_readonly(
          "tiles_m", [](const Plan& p) { return valid_order(p).tiles_m; },
          "Tile rows of all parts, rounded up so that clusters come out even.")
      .def_property_readonly(
          "tiles_n", [](const Plan& p) { return valid_order(p).tiles_n; }, "Tile columns.")
      .def(
          "tile_coord",
          [](const Plan& p, int32_t index) {
            const TileCoord coord = plan::tile_coord(order_of_tile(p, index), index);
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
            return plan::tile_chunk(order_of_tile(p, index), index);
          },
          py::arg("index"), "Chunk of the tile at `index` in tile order.")
      .def("validate", &validate_with_steps,
           "Raises ValueError if the plan cannot run, as the function does.")
      .def("encode", &plan::encode, "The plan as a flat list of integers.")
      .def(
          "copy", [](const Plan& p) { return Plan(p); }, "A copy that changes apart.")
      .def("__repr__", &Plan::to_string)
      .def(py::pickle([](const Plan& p) { return py::make_tuple(plan::encode(p)); },
                      [](const py::tuple& state) {
                        return plan::decode(state[0].cast<std::vector<int64_t>>());
                      }));
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Problems, plans, the planner, and the steps of plans.";
  bind_enums(m);
  bind_profile(m);
  bind_parts(m);
  bind_plan(m);
  bind_planner(m);
  bind_steps(m);
  bind_proof(m);
}

}  // namespace overlap::binding
