// Whether the record finds what it is there to find, on calls made by hand.
#pragma once

#include <string>
#include <vector>

namespace recorder {

// What does not hold.
std::vector<std::string> self_check();

}  // namespace recorder
