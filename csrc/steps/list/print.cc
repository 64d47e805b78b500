// Lists of steps as text and as JSON.
#include <sstream>

#include "steps/list/fields.h"
#include "steps/list/step.h"

namespace overlap::steps {
namespace {

// " name=value" for each field; structs as {name=value name=value}, vectors as [value value].
struct TextFields {
  std::ostringstream& out;
  bool first = false;  // no space before the next one

  template <typename Value>
  void operator()(const char* field, const Value& value) {
    out << (first ? "" : " ") << field << "=";
    first = false;
    put(value);
  }

  void put(const char* text) { out << text; }
  void put(bool value) { out << value; }
  void put(int32_t value) { out << value; }
  void put(int64_t value) { out << value; }
  void put(const Where& where) {
    out << name(where.buffer);
    if (where.index != 0 || where.buffer == Buffer::kSlot) out << "@" << where.index;
    out << "+" << where.offset;
  }
  template <typename Item>
  void put(const std::vector<Item>& items) {
    out << "[";
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out << " ";
      put(items[i]);
    }
    out << "]";
  }
  template <typename Struct>
  void put(const Struct& value) {
    out << "{";
    TextFields inner = {out, true};
    fields(value, inner);
    out << "}";
  }
};

// ", "name": value" for each field.
struct JsonFields {
  std::ostringstream& out;
  bool first = false;

  template <typename Value>
  void operator()(const char* field, const Value& value) {
    out << (first ? "\"" : ", \"") << field << "\": ";
    first = false;
    put(value);
  }

  void put(const char* text) { out << "\"" << text << "\""; }
  void put(bool value) { out << (value ? "true" : "false"); }
  void put(int32_t value) { out << value; }
  void put(int64_t value) { out << value; }
  void put(const Where& where) {
    out << "{\"buffer\": \"" << name(where.buffer) << "\", \"index\": " << where.index
        << ", \"offset\": " << where.offset << "}";
  }
  template <typename Item>
  void put(const std::vector<Item>& items) {
    out << "[";
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out << ", ";
      put(items[i]);
    }
    out << "]";
  }
  template <typename Struct>
  void put(const Struct& value) {
    out << "{";
    JsonFields inner = {out, true};
    fields(value, inner);
    out << "}";
  }
};

// The memory and communicators made before the first step, and their sizes.
template <typename Visit>
void head_fields(const StepList& list, Visit& visit) {
  visit("chunks", list.chunks);
  visit("counters", list.counters);
  visit("scratch", list.scratch);
  visit("communicators", list.communicators);
  visit("over_peers", list.over_peers);
  visit("slot_bytes", list.slot_bytes);
  visit("takes_slot", list.takes_slot);
  visit("hears_all", list.hears_all);
}

}  // namespace

const char* name(Buffer buffer) {
  constexpr const char* kNames[] = {"input",   "output",  "gathered", "staging", "window",
                                    "product", "partial", "stripes",  "indices", "slot"};
  return kNames[static_cast<size_t>(buffer)];
}

const char* name(Lane lane) {
  constexpr const char* kNames[] = {"caller", "side0", "side1", "side2", "side3", "copy"};
  return kNames[static_cast<size_t>(lane)];
}

std::string to_string(const StepList& list) {
  std::ostringstream out;
  TextFields text = {out, true};
  head_fields(list, text);
  out << "\n";
  for (size_t i = 0; i < list.orders.size(); ++i) {
    out << "order " << i << ":";
    text.first = false;
    fields(list.orders[i], text);
    out << "\n";
  }
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    out << "#" << i << " " << name(step.lane) << " ";
    std::visit(
        [&](const auto& what) {
          out << name(what);
          fields(what, text);
        },
        step.what);
    if (step.unchained) out << " unchained";
    for (const StepId id : step.after) out << " after #" << id;
    out << "\n";
  }
  return out.str();
}

std::string to_json(const StepList& list) {
  std::ostringstream out;
  out << "{";
  JsonFields json = {out, true};
  head_fields(list, json);
  json("orders", list.orders);
  out << ", \"steps\": [";
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    out << (i == 0 ? "" : ", ") << "{";
    json.first = true;
    std::visit([&](const auto& what) { json("step", name(what)); }, step.what);
    json("lane", name(step.lane));
    json("after", step.after);
    json("unchained", step.unchained);
    json("held", step.held);
    json("communicates", step.communicates);
    std::visit([&](const auto& what) { fields(what, json); }, step.what);
    out << "}";
  }
  out << "]}";
  return out.str();
}

}  // namespace overlap::steps
