// The fields of a profile's file: their names, places and ranges.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "plan/profile.h"

namespace overlap::plan {

// The numbers that a field takes.
struct Range {
  double least;
  double most;
};
inline constexpr Range kCtas = {1.0, 64.0};  // NCCL has no more channels

template <typename Value>
using PlaceOf = std::function<Value&(Profile&)>;

struct ProfileEntry {
  std::string name;  // "gemm.start_us"
  std::variant<PlaceOf<double>, PlaceOf<int64_t>, PlaceOf<Profile::Lists>> place;
  Range range;    // of a number
  bool has_ways;  // lists of [CTAs, lanes]; other lists are of chunks' shares
};

// All of them, in the file's order.
const std::vector<ProfileEntry>& profile_entries();

}  // namespace overlap::plan
