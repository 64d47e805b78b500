// Messages, said part by part.
#pragma once

#include <chrono>
#include <sstream>
#include <stdexcept>
#include <string>

namespace overlap::plan {

template <typename... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// 600 s, 0.5 s.
inline std::string in_seconds(std::chrono::milliseconds duration) {
  return message(static_cast<double>(duration.count()) / 1000.0, " s");
}

// Throws the message, which is a ValueError in Python.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::invalid_argument(message(parts...));
}

}  // namespace overlap::plan
