// Calls made from their lists of steps, in place of the executors: what must be enqueued is the same.
#pragma once

#include "runtime/executor.h"
#include "steps/step.h"

namespace recorder {

void replay(overlap::runtime::Group& group, const overlap::runtime::ProduceCall& call);
void replay(overlap::runtime::Group& group, const overlap::runtime::SequentialCall& call);

}  // namespace recorder
