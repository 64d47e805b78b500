// Lists of steps as JSON.
#include <sstream>

#include "steps/list/fields.h"
#include "steps/list/step.h"

namespace overlap::steps {
namespace {

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

std::string to_json(const StepList& list) {
  std::ostringstream out;
  out << "{";
  JsonFields json = {out, true};
  json("chunks", list.chunks);
  json("counters", list.counters);
  json("scratch", list.scratch);
  json("communicators", list.communicators);
  json("over_peers", list.over_peers);
  json("slot_bytes", list.slot_bytes);
  json("takes_slot", list.takes_slot);
  json("hears_all", list.hears_all);
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
