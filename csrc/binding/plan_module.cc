// overlap_torch._plan: the planner's classes for Python. Knows no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/steps_module.h"
#include "plan/agreement.h"
#include "plan/gather_rounds.h"
#include "plan/plan.h"
#include "plan/plan_fields.h"
#include "plan/profile.h"
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
using plan::Engine;
using plan::Extent;
using plan::Kernel;
using plan::KernelShape;
using plan::Layout;
using plan::Machine;
using plan::Memory;
using plan::Op;
using plan::Plan;
using plan::Problem;
using plan::Profile;
using plan::Program;
using plan::Recipe;
using plan::Rectangle;
using plan::Region;
using plan::Resources;
using plan::Rows;
using plan::Schedule;
using plan::TileCoord;
using plan::TileOrder;
using plan::Transfer;
using plan::Transport;
using plan::Way;

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

// In Python's capitals.
std::string capitals(std::string name) {
  for (char& letter : name) letter = static_cast<char>(std::toupper(letter));
  return name;
}

template <typename Enum>
void bind_enum(py::module_& m) {
  using plan::Enumeration;
  py::enum_<Enum> bound(m, Enumeration<Enum>::kName, Enumeration<Enum>::kDoc);
  for (const plan::Member<Enum>& one : Enumeration<Enum>::kMembers) {
    bound.value(capitals(one.name).c_str(), one.value, *one.doc == '\0' ? nullptr : one.doc);
  }
}

// A profile is shared and never changes; pybind11 holds it by a pointer that could, and has no names that do.
template <typename Value>
inline constexpr bool kIsProfile = std::is_same_v<Value, plan::SharedProfile>;
template <typename Value>
using InPython = std::conditional_t<kIsProfile<Value>, std::shared_ptr<Profile>, Value>;

template <typename Value>
InPython<Value> in_python(const Value& value) {
  if constexpr (kIsProfile<Value>) {
    return std::const_pointer_cast<Profile>(value);
  } else {
    return value;
  }
}

// In Python: an item's class, (an item's class,) for a sequence, a number's type.
template <typename Value>
py::object python_type() {
  if constexpr (plan::kIsSequence<Value>) {
    return py::make_tuple(python_type<typename Value::value_type>());
  } else if constexpr (kIsProfile<Value>) {
    return py::type::of<Profile>();
  } else {
    return py::type::of(py::cast(Value{}));
  }
}

template <typename Item>
std::string class_doc() {
  std::string doc = std::string(plan::Fields<Item>::kDoc) + "\n\nAttributes:";
  plan::for_each_field<Item>(
      [&](const auto& field) { doc += std::string("\n    ") + field.name + ": " + field.doc; });
  return doc;
}

// All that follows from a struct's fields alone but its constructor. Items of sequences are frozen.
template <typename Item, bool kFrozen = false>
py::class_<Item> bind_fields(py::module_& m) {
  py::class_<Item> bound(m, plan::Fields<Item>::kName, class_doc<Item>().c_str());
  py::dict types;
  plan::for_each_field<Item>([&](const auto& field) {
    using Value = typename std::decay_t<decltype(field)>::Type;
    const auto member = field.member;
    types[field.name] = python_type<Value>();
    if constexpr (kFrozen && plan::kIsSequence<Value>) {
      bound.def_property_readonly(field.name,
                                  [member](const Item& item) { return as_tuple(item.*member); });
    } else if constexpr (kFrozen) {
      bound.def_readonly(field.name, member);
    } else if constexpr (kIsProfile<Value>) {
      bound.def_property(
          field.name, [member](const Item& item) { return in_python(item.*member); },
          [member, name = field.name](Item& item, const InPython<Value>& given) {
            if (given == nullptr) {
              throw py::value_error(std::string(name) + " is None, allowed is a Profile");
            }
            item.*member = given;
          });
    } else if constexpr (plan::kIsSequence<Value>) {
      bound.def_property(
          field.name, [member](const Item& item) { return as_tuple(item.*member); },
          [member](Item& item, Value given) { item.*member = std::move(given); });
    } else {
      bound.def_readwrite(field.name, member);
    }
  });
  bound.attr("__fields__") = types;
  return bound;
}

template <typename Item>
py::tuple field_values(const Item& item) {
  const auto value = [](const auto& one) -> py::object {
    if constexpr (plan::kIsSequence<std::decay_t<decltype(one)>>) {
      return as_tuple(one);
    } else {
      return py::cast(in_python(one));
    }
  };
  return std::apply(
      [&](const auto&... field) { return py::make_tuple(value(item.*field.member)...); },
      plan::Fields<Item>::kAll);
}

template <typename Item, size_t I>
auto argument() {
  constexpr auto kField = std::get<I>(plan::Fields<Item>::kAll);
  if constexpr (I < plan::Fields<Item>::kRequired) {
    return py::arg(kField.name);
  } else {
    return py::arg(kField.name).none(false) = in_python(Item{}.*kField.member);
  }
}

// A constructor that takes all fields in order.
template <typename Item>
void def_init(py::class_<Item>& bound) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    bound.def(
        py::init([](InPython<typename std::tuple_element_t<
                        I, std::decay_t<decltype(plan::Fields<Item>::kAll)>>::Type>... values) {
          Item item{};
          ((item.*std::get<I>(plan::Fields<Item>::kAll).member = values), ...);
          return item;
        }),
        argument<Item, I>()...);
  }(std::make_index_sequence<plan::kFieldCount<Item>>());
}

template <typename Item>
void def_equality(py::class_<Item>& bound) {
  bound.def("__eq__", [](const Item& a, const Item& b) { return a == b; }, py::is_operator());
}

template <typename Item>
void def_hash(py::class_<Item>& bound) {
  bound.def("__hash__", [](const Item& item) { return py::hash(field_values(item)); });
}

// Class(name=value, ...), enumerations by their members' names.
template <typename Item>
void def_repr(py::class_<Item>& bound) {
  bound.def("__repr__", [](const Item& item) {
    std::string text;
    plan::for_each_field<Item>([&](const auto& field) {
      const auto& value = item.*field.member;
      text += (text.empty() ? "" : ", ") + std::string(field.name) + "=";
      if constexpr (std::is_enum_v<std::decay_t<decltype(value)>>) {
        text += plan::member_name(value);
      } else {
        text += py::str(py::cast(value)).template cast<std::string>();
      }
    });
    return plan::Fields<Item>::kName + ("(" + text + ")");
  });
}

void check_members(const py::tuple& state, size_t count) {
  if (state.size() == count) return;
  throw py::value_error("pickled by another release: it has " + std::to_string(state.size()) +
                        " members, not " + std::to_string(count));
}

// Pickled, and so copied by the module copy, field by field.
template <typename Item>
void def_pickle(py::class_<Item>& bound) {
  bound.def(py::pickle([](const Item& item) { return field_values(item); },
                       [](const py::tuple& state) {
                         check_members(state, plan::kFieldCount<Item>);
                         Item item{};
                         size_t next = 0;
                         plan::for_each_field<Item>([&](const auto& field) {
                           using Value = typename std::decay_t<decltype(field)>::Type;
                           item.*field.member = state[next++].template cast<InPython<Value>>();
                         });
                         return item;
                       }));
}

void bind_enums(py::module_& m) {
  bind_enum<Op>(m);
  bind_enum<DType>(m);
  bind_enum<Recipe>(m);
  bind_enum<Schedule>(m);
  bind_enum<Kernel>(m);
  bind_enum<Transport>(m);
  bind_enum<Collective>(m);
  bind_enum<Layout>(m);
  bind_enum<Memory>(m);
  bind_enum<Way>(m);
  bind_enum<Engine>(m);
}

void bind_profile(py::module_& m) {
  py::class_<Profile, std::shared_ptr<Profile>>(
      m, "Profile",
      R"(What work takes on a machine: all numbers that are fitted to one, as data. Frozen.

Read from JSON: names and units are those of the shipped file, overlap_torch/profiles/h200.json; what a profile lacks is
taken from it. Times are in microseconds, rates in GB/s, sizes in bytes.

Attributes:
    name: what it calls itself.
    source: the file that it was read from.
    made_by, made_at, note: how it was made, when (YYYY-MM-DD, with a time or without), remarks; empty: not known.
    gpu: what it was measured on; empty: not known.
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
              result[py::str(field.name)] = field.allowed;
            }
            return result;
          },
          "{name: what is allowed} of all fields, in the shipped file's order.")
      .def_readonly("name", &Profile::name)
      .def_readonly("source", &Profile::source)
      .def_readonly("made_by", &Profile::made_by)
      .def_readonly("made_at", &Profile::made_at)
      .def_readonly("note", &Profile::note)
      .def_readonly("gpu", &Profile::gpu)
      .def_property_readonly("missing", [](const Profile& p) { return as_tuple(p.missing); })
      .def("to_json", &Profile::to_json,
           "The file's text again: what it holds, and reads back to the same numbers.")
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

void bind_parts(py::module_& m) {
  auto problem = bind_fields<Problem>(m);
  problem
      .def(py::init([](int64_t rows, int64_t columns, int64_t inner, const py::object& dtype,
                       int32_t world_size, const py::object& op, const py::object& recipe,
                       const py::object& output_dtype, bool fast_accum) {
             Problem problem{member<Op>(op),
                             rows,
                             columns,
                             inner,
                             member<DType>(dtype),
                             world_size,
                             member<Recipe>(recipe),
                             DType::kBFloat16,
                             fast_accum};
             if (!output_dtype.is_none()) {
               problem.output_dtype = member<DType>(output_dtype);
             } else if (problem.recipe == Recipe::kNone) {
               problem.output_dtype = problem.dtype;
             }
             return problem;
           }),
           py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype") = DType::kBFloat16,
           py::arg("world_size") = 1, py::arg("op") = Op::kGemmAllReduce,
           py::arg("recipe") = Recipe::kNone, py::arg("output_dtype") = py::none(),
           py::arg("fast_accum") = false)
      .def_property_readonly(
          "row_parts", [](const Problem& p) { return plan::op_row_parts(p); },
          "Parts of the rows, one for each rank, that a chunk holds equal tile rows of; else 1.")
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
          tiles.append(py::make_tuple(row.phase, row.row, coord.column));
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

// Plans for kernels of the caller's.
void bind_kernel_planner(py::module_& m) {
  const auto def = [&](const char* name, auto function, const char* doc) {
    m.def(
        name,
        [function](const Problem& problem, const Machine& machine, std::pair<int32_t, int32_t> tile,
                   double kernel_us, int32_t comm_sms, int32_t chunks) {
          return function(problem, machine,
                          planner::KernelRequest{.tile_m = tile.first,
                                                 .tile_n = tile.second,
                                                 .kernel_us = kernel_us,
                                                 .comm_sms = comm_sms,
                                                 .chunks = chunks});
        },
        py::arg("problem"), py::arg("machine"), py::arg("tile"), py::arg("kernel_us"),
        py::arg("comm_sms") = 0, py::arg("chunks") = 0, doc);
  };
  def("kernel_candidates", &planner::kernel_candidates,
      "The plans that are weighed for a kernel of the caller's of that time, on all SMs and by "
      "itself, which leaves so many SMs to communication: all in one chunk first. `chunks`: of "
      "that "
      "number alone; 0: of any.");
  def("make_kernel_plan", &planner::make_kernel_plan,
      "The one of the smallest expected time; of any number of chunks, one chunk unless another is "
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
  m.attr("MAX_TRANSFERS") = plan::kMaxTransfers;
  m.attr("BAND_ROWS") = plan::kBandRows;
  m.attr("MAX_BAND_RUNS") = plan::kMaxBandRuns;
  m.def("kernel_shape", &plan::kernel_shape, py::arg("kernel"), py::arg("on_cpu") = false,
        "Tile and cluster of a kernel.");
  m.def("encode", &plan::encode, py::arg("plan"),
        "The plan as a flat list of integers, the form in which the op library takes it.");
  m.def("decode", &plan::decode, py::arg("code"),
        "The plan that encode made a list of. Raises ValueError on any other list.");
  m.def(
      "agree",
      [](const std::vector<Machine>& machines, const std::vector<int32_t>& nccl_versions,
         const std::vector<uint64_t>& builds, std::vector<int32_t> serials) {
        serials.resize(serials.empty() ? machines.size() : serials.size());
        if (machines.empty() || nccl_versions.size() != machines.size() ||
            builds.size() != machines.size() || serials.size() != machines.size()) {
          throw py::value_error("agree takes lists of one length, 1 or more");
        }
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
      "differs "
      "in what; and whose kernels run one at a time; \"\" if none. `builds` are hashes of what "
      "they "
      "were built from, `serials` what serial_by says.");
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
      "of /proc/self/maps, and "
      "the name of the tracing process.");
  m.def("candidates", &planner::candidates, py::arg("problem"), py::arg("machine"),
        py::arg("all") = false,
        "The plans that the planner weighs, the sequence first; with `all`, also those that nobody "
        "has measured on such a machine: it weighs them only where its profile is of other "
        "machines.");
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
      "planning_us",
      [](const Problem& problem, const Machine& machine, int repeats) {
        const auto neighbours = planner::neighbours(problem, machine);
        std::vector<planner::Family> low, high;
        if (neighbours) {
          low = planner::best_families((*neighbours)[0], machine);
          high = planner::best_families((*neighbours)[1], machine);
        }
        std::vector<double> us;
        for (int repeat = 0; repeat < repeats; ++repeat) {
          const auto begin = std::chrono::steady_clock::now();
          const Plan plan = neighbours ? planner::make_plan_between(problem, machine, low, high)
                                       : planner::make_plan(problem, machine);
          const auto end = std::chrono::steady_clock::now();
          us.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
        }
        std::nth_element(us.begin(), us.begin() + repeats / 2, us.end());
        return us.at(static_cast<size_t>(repeats / 2));
      },
      py::arg("problem"), py::arg("machine"), py::arg("repeats"),
      "What planning a new M takes once its neighbours are known: the median in microseconds.");
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
      "share of the sequence's time less so many microseconds.");
  m.def("make_sequential", &plan::make_sequential, py::arg("problem"), py::arg("machine"),
        "The sequence: one GEMM, and one collective before or after it.");
  m.def("make_at_once", &plan::make_at_once, py::arg("problem"), py::arg("kernel"),
        "As overlap_torch.plan.at_once.");
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
      "Whether gemm_alltoall over peers, on this rank, launches its GEMM once for each rank's "
      "rows, "
      "or, by a plan of one_launch, once for all, and stores them where they go; else the "
      "framework's "
      "computes all and a kernel sends them.");
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
  bind_profile(m);
  bind_parts(m);
  bind_plan(m);
  bind_planner(m);
  bind_steps(m);
  bind_proof(m);
}

}  // namespace overlap::binding
