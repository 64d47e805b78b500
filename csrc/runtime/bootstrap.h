// How ranks exchange bytes before they have a communicator: the process group's store.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace overlap::runtime {

struct Bootstrap {
  std::function<void(const std::string& key, const std::vector<uint8_t>& value)> set;
  std::function<std::vector<uint8_t>(const std::string& key)> get;  // of a key that is there
  std::function<bool(const std::string& key)> has;
  std::function<void(const std::string& key)> remove;
};

}  // namespace overlap::runtime
