// Plans with a program on CPU.
#pragma once

#include <vector>

#include "binding/op_call.h"

namespace overlap::binding {

// Runs the program's steps on this rank: a thread for each lane, gloo's messages between ranks. `outputs`: of each weight;
// `gathered`: of an all-gather. Blocks until all has ended; every wait has the group's deadline.
void run_program(const OpCall& call, const PlanEntry& entry, std::vector<at::Tensor> outputs,
                 const at::Tensor& gathered = {});

}  // namespace overlap::binding
