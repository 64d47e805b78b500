// A group's behaviour where something fails: failures are found, and communicators aborted, while
// the driver keeps whoever calls it; memory that one rank has not, none takes.
#pragma once

#include <string>
#include <vector>

namespace recorder {

std::vector<std::string> group_check();  // what does not hold

}  // namespace recorder
