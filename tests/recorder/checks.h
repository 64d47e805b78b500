// Checks on calls made by hand; each gives what does not hold.
#pragma once

#include <string>
#include <vector>

namespace recorder {

// The record finds what it is there to find.
std::vector<std::string> self_check();

// A group finds failures while the driver is busy, and agrees on memory where one rank has none left.
std::vector<std::string> group_check();

}  // namespace recorder
