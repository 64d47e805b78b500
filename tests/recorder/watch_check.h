// Whether failures are found, and communicators aborted, while the driver keeps whoever calls it.
#pragma once

#include <string>
#include <vector>

namespace recorder {

std::vector<std::string> watch_check();  // what does not hold

}  // namespace recorder
