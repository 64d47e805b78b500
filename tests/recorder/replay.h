// Calls made from their lists of steps, in place of the executors: what must be enqueued is the same.
#pragma once

#include "runtime/executor.h"
#include "steps/step.h"

namespace recorder {

// Of an all-reduce or a reduce-scatter, whichever way it goes.
void replay(overlap::runtime::Group& group, const overlap::runtime::ProduceCall& call);
void replay(overlap::runtime::Group& group, const overlap::runtime::ConsumeCall& call);
void replay(overlap::runtime::Group& group, const overlap::runtime::AllToAllCall& call);
void replay(overlap::runtime::Group& group, const overlap::runtime::SequentialCall& call);

// Of the last call that was replayed.
const overlap::steps::StepList& last_list();

}  // namespace recorder
