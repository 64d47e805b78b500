// The cases: what executors are asked to do, over plans, ranks, operands and modes.
#pragma once

#include <functional>

#include "session.h"

namespace recorder {

// Visits every case, the cases of a family one after the other. A plan that is not valid makes no case.
void visit_grid(const std::function<void(const Case&)>& visit);

// Calls whose host time is measured.
void visit_timed(const std::function<void(const Case&)>& visit);

}  // namespace recorder
