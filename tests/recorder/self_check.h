// The record finds the faults that it is there to find, on calls made by hand.
#pragma once

#include <string>
#include <vector>

namespace recorder {

// The checks that do not hold.
std::vector<std::string> self_check();

}  // namespace recorder
