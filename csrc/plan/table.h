// Lookups that the tables of ops, collectives, kernels and transports share.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace overlap::plan {

// The row of a member of an enumeration; a number that is no member's, which validate refuses, has the first row.
template <typename Row, size_t kRows, typename Enum>
constexpr const Row& row_of(const std::array<Row, kRows>& table, Enum member) {
  const auto row = static_cast<size_t>(member);
  return table[row < kRows ? row : 0];
}

// The names of the rows that take() is true of, for people.
template <typename Row, size_t kRows, typename Take>
std::string names_of(const std::array<Row, kRows>& table, const char* between, const Take& take) {
  std::string text;
  for (const Row& row : table) {
    if (take(row)) text += (text.empty() ? "" : between) + std::string(row.name);
  }
  return text;
}

}  // namespace overlap::plan
