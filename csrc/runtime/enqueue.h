// How each kind of step is enqueued. Fork, Join and CallersKernel are the executor's own.
#pragma once

#include "runtime/run_state.h"

namespace overlap::runtime {

// On the observer's stream, too: a timeline's waits of its own.
void wait_for_count(const RunState& run, int32_t chunk, int32_t expected, cudaStream_t on);
void wait_for_peers(const RunState& run, kernels::PeerWaitParams wait, int32_t chunk,
                    cudaStream_t on);

#define OVERLAP_ENQUEUE(Kind) void enqueue(RunState& run, const steps::Kind& step, cudaStream_t on);
OVERLAP_STEP_KINDS(OVERLAP_ENQUEUE, OVERLAP_ENQUEUE)
#undef OVERLAP_ENQUEUE

}  // namespace overlap::runtime
