// Binds structs and enumerations by their lists of fields and members. Knows no torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cctype>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/message.h"
#include "plan/plan_fields.h"
#include "plan/profile.h"

namespace overlap::binding {

namespace py = pybind11;

inline void check_index(const char* what, int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    throw py::index_error(plan::message(what, " ", index, " is out of range, the plan has ", size));
  }
}

// Python has no references to list elements, so a sequence crosses as a tuple of frozen items: what
// cannot take effect raises, as in plan.chunks.append(...).
template <typename T>
py::tuple as_tuple(const std::vector<T>& items) {
  py::tuple result(items.size());
  for (size_t i = 0; i < items.size(); ++i) result[i] = py::cast(items[i]);
  return result;
}

// In Python's capitals.
inline std::string capitals(std::string name) {
  for (char& letter : name) letter = static_cast<char>(std::toupper(letter));
  return name;
}

template <typename Enum>
py::enum_<Enum> bind_enum(py::module_& m) {
  using plan::Enumeration;
  py::enum_<Enum> bound(m, Enumeration<Enum>::kName, Enumeration<Enum>::kDoc);
  for (const plan::Member<Enum>& one : Enumeration<Enum>::kMembers) {
    bound.value(capitals(one.name).c_str(), one.value, *one.doc == '\0' ? nullptr : one.doc);
  }
  return bound;
}

// A profile is shared and never changes; pybind11 holds it by a pointer that could, and has no names that do.
template <typename Value>
inline constexpr bool kIsProfile = std::is_same_v<Value, plan::SharedProfile>;
template <typename Value>
using InPython = std::conditional_t<kIsProfile<Value>, std::shared_ptr<plan::Profile>, Value>;

template <typename Value>
InPython<Value> in_python(const Value& value) {
  if constexpr (kIsProfile<Value>) {
    return std::const_pointer_cast<plan::Profile>(value);
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
    return py::type::of<plan::Profile>();
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

// All that follows from a struct's fields, except its constructor. Items of sequences are frozen.
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
              plan::fail(name, " is None, allowed is a Profile");
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

inline void check_members(const py::tuple& state, size_t count) {
  if (state.size() == count) return;
  plan::fail("pickled by another release: it has ", state.size(), " members, not ", count);
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

}  // namespace overlap::binding
