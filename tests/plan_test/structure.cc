// A list's structure, by which tests tell lists apart.
#include <algorithm>
#include <cstring>

#include "mutate.h"
#include "steps/list/fields.h"

namespace overlap::steps {
namespace {

// A hash over what is not a size.
struct StructureFields {
  uint64_t hash = 14695981039346656037u;

  void put(const void* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
    }
  }
  void put(const char* text) { put(text, std::strlen(text) + 1); }
  void put(bool value) { put(&value, sizeof(value)); }
  void put(int32_t value) { put(&value, sizeof(value)); }
  // Bytes, elements, rows, tiles: only whether there are any.
  void put(int64_t value) { put(value != 0); }
  void put(const Where& where) {
    put(static_cast<int32_t>(where.buffer));
    put(where.index);
  }
  template <typename Item>
  void put(const std::vector<Item>& items) {
    put(static_cast<int32_t>(items.size()));
    for (const Item& item : items) put(item);
  }
  template <typename Struct>
  void put(const Struct& value) {
    fields(value, *this);
  }
  static bool is_size(const char* field) {
    constexpr const char* kSizes[] = {
        "tiles",     "ctas",           "spread_ns",       "max_ctas", "first_tile",    "end_tile",
        "part_rows", "part_tile_rows", "round_tile_rows", "us",       "order",         "offset",
        "first",     "stride",         "first_announced", "begin",    "first_awaited", "begins"};
    return std::any_of(std::begin(kSizes), std::end(kSizes),
                       [field](const char* size) { return std::strcmp(field, size) == 0; });
  }
  template <typename Value>
  void operator()(const char* field, const Value& value) {
    put(field);
    if (!is_size(field)) put(value);
  }
};

}  // namespace

uint64_t structure(const StepList& list) {
  StructureFields fields;
  fields.put(list.scratch);
  fields.put(static_cast<int32_t>(list.communicators.size()));
  fields.put(list.takes_slot);
  fields.put(list.hears_all);
  for (const Step& step : list.steps) {
    fields.put(static_cast<int32_t>(step.lane));
    fields.put(step.after);
    fields.put(step.unchained);
    std::visit(
        [&](const auto& what) {
          fields.put(name(what));
          steps::fields(what, fields);
        },
        step.what);
  }
  return fields.hash;
}

}  // namespace overlap::steps
