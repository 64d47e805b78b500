// JSON as plain data.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace overlap::plan {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool truth = false;
  double number = 0.0;
  std::string text;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;  // in the text's order

  // The member of that name; nullptr if there is none.
  const Json* find(const std::string& name) const;
  // As a message quotes it.
  std::string quoted() const;
};

// Throws std::invalid_argument, which says in which line and column the text is not JSON (RFC 8259), or has a name twice in
// one object.
Json parse_json(const std::string& text);

// The shortest text that reads back to the same number.
std::string json_number(double number);

std::string json_string(const std::string& text);

}  // namespace overlap::plan
