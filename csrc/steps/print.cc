// Lists of steps as text and as JSON: both walk the one list of each step's fields.
#include <sstream>

#include "steps/step.h"

namespace overlap::steps {
namespace {

const char* name(const Fork&) {
  return "fork";
}
const char* name(const Join&) {
  return "join";
}
const char* name(const Gemm&) {
  return "gemm";
}
const char* name(const LibraryGemm&) {
  return "library_gemm";
}
const char* name(const WaitForTiles&) {
  return "wait_for_tiles";
}
const char* name(const Mark&) {
  return "mark";
}
const char* name(const Collective&) {
  return "collective";
}
const char* name(const Copy&) {
  return "copy";
}
const char* name(const Pack&) {
  return "pack";
}
const char* name(const Unpack&) {
  return "unpack";
}
const char* name(const AddBias&) {
  return "add_bias";
}

template <typename Visit>
void fields(const Fork& step, Visit visit) {
  visit("side_lanes", step.side_lanes);
  visit("copies", step.copies);
}
template <typename Visit>
void fields(const Join&, Visit) {}
template <typename Visit>
void fields(const Gemm& step, Visit visit) {
  visit("output", step.output);
  visit("part", step.part);
  visit("parts", step.parts);
  visit("scattered_rows", step.scattered_rows);
}
template <typename Visit>
void fields(const LibraryGemm& step, Visit visit) {
  visit("begin", step.rows.begin);
  visit("end", step.rows.end);
  visit("output", step.output);
}
template <typename Visit>
void fields(const WaitForTiles& step, Visit visit) {
  visit("chunk", step.chunk);
  visit("tiles", step.tiles);
}
template <typename Visit>
void fields(const Mark& step, Visit visit) {
  visit("chunk", step.chunk);
}
template <typename Visit>
void fields(const Collective& step, Visit visit) {
  visit("kind", plan::name(step.kind));
  visit("max_ctas", step.max_ctas);
  visit("communicator_lane", step.lane);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("count", step.count);
}
template <typename Visit>
void fields(const Copy& step, Visit visit) {
  visit("source", step.source);
  visit("destination", step.destination);
  visit("bytes", step.bytes);
}
template <typename Visit>
void fields(const Pack& step, Visit visit) {
  visit("chunk", step.chunk);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("part", step.part);
  visit("parts", step.parts);
}
template <typename Visit>
void fields(const Unpack& step, Visit visit) {
  visit("chunk", step.chunk);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("parts", step.parts);
  visit("bias", step.bias);
}
template <typename Visit>
void fields(const AddBias& step, Visit visit) {
  visit("source", step.source);
  visit("destination", step.destination);
  visit("rows", step.rows);
}

struct TextField {
  std::ostringstream& out;
  void operator()(const char* field, const Where& where) const {
    out << " " << field << "=" << steps::name(where.buffer) << "+" << where.offset;
  }
  template <typename Value>
  void operator()(const char* field, const Value& value) const {
    out << " " << field << "=" << value;
  }
};

struct JsonField {
  std::ostringstream& out;
  void operator()(const char* field, const Where& where) const {
    out << ", \"" << field << "\": {\"buffer\": \"" << steps::name(where.buffer)
        << "\", \"offset\": " << where.offset << "}";
  }
  void operator()(const char* field, const char* value) const {
    out << ", \"" << field << "\": \"" << value << "\"";
  }
  void operator()(const char* field, bool value) const {
    out << ", \"" << field << "\": " << (value ? "true" : "false");
  }
  void operator()(const char* field, int64_t value) const {
    out << ", \"" << field << "\": " << value;
  }
  void operator()(const char* field, int32_t value) const { (*this)(field, int64_t{value}); }
};

}  // namespace

const char* name(Buffer buffer) {
  switch (buffer) {
    case Buffer::kInput:
      return "input";
    case Buffer::kOutput:
      return "output";
    case Buffer::kGathered:
      return "gathered";
    case Buffer::kStaging:
      return "staging";
    case Buffer::kWindow:
      return "window";
    case Buffer::kProduct:
      return "product";
  }
  return "unknown buffer";
}

const char* name(Lane lane) {
  switch (lane) {
    case Lane::kCaller:
      return "caller";
    case Lane::kSide0:
      return "side0";
    case Lane::kSide1:
      return "side1";
    case Lane::kSide2:
      return "side2";
    case Lane::kSide3:
      return "side3";
    case Lane::kCopy:
      return "copy";
  }
  return "unknown lane";
}

std::string to_string(const StepList& list) {
  std::ostringstream out;
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    out << "#" << i << " " << name(step.lane) << " ";
    std::visit(
        [&](const auto& what) {
          out << name(what);
          fields(what, TextField{out});
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
  out << "{\"counters\": " << list.counters << ", \"steps\": [";
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    out << (i == 0 ? "" : ", ") << "{\"step\": \"";
    std::visit([&](const auto& what) { out << name(what); }, step.what);
    out << "\", \"lane\": \"" << name(step.lane) << "\", \"after\": [";
    for (size_t j = 0; j < step.after.size(); ++j) out << (j == 0 ? "" : ", ") << step.after[j];
    out << "], \"unchained\": " << (step.unchained ? "true" : "false");
    std::visit([&](const auto& what) { fields(what, JsonField{out}); }, step.what);
    out << "}";
  }
  out << "]}";
  return out.str();
}

}  // namespace overlap::steps
