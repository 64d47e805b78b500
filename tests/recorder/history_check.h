// Ranks that make other calls find that out: their histories over a store in memory.
#pragma once

#include <string>
#include <vector>

namespace recorder {

std::vector<std::string> history_check();  // what does not hold

}  // namespace recorder
