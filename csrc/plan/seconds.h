// How messages name a duration.
#pragma once

#include <chrono>
#include <sstream>
#include <string>

namespace overlap::plan {

// 600 s, 0.5 s.
inline std::string in_seconds(std::chrono::milliseconds duration) {
  std::ostringstream out;
  out << static_cast<double>(duration.count()) / 1000.0 << " s";
  return out.str();
}

}  // namespace overlap::plan
