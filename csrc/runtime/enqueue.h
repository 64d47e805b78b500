// How each kind of step is enqueued. Fork, Join and CallersKernel are the executor's own.
#pragma once

#include "runtime/run_state.h"

namespace overlap::runtime {

// On the observer's stream, too: a timeline's waits of its own.
void wait_for_count(const RunState& run, int32_t chunk, int32_t expected, cudaStream_t on);
void wait_for_peers(const RunState& run, kernels::PeerWaitParams wait, int32_t chunk,
                    cudaStream_t on);

void enqueue(RunState& run, const steps::Delay& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Gemm& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Arrive& step, cudaStream_t on);
void enqueue(RunState& run, const steps::LibraryGemm& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Pack& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Unpack& step, cudaStream_t on);
void enqueue(RunState& run, const steps::AddTerms& step, cudaStream_t on);
void enqueue(RunState& run, const steps::WaitForTiles& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Mark& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Collective& step, cudaStream_t on);
void enqueue(RunState& run, const steps::SendReceive& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Copy& step, cudaStream_t on);
void enqueue(RunState& run, const steps::CopyRows& step, cudaStream_t on);
void enqueue(RunState& run, const steps::WaitForPeers& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Signal& step, cudaStream_t on);
void enqueue(RunState& run, const steps::MeetTiles& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Announce& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Await& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Count& step, cudaStream_t on);
void enqueue(RunState& run, const steps::Interpret& step, cudaStream_t on);
void enqueue(RunState& run, const steps::PeerCollective& step, cudaStream_t on);
void enqueue(RunState& run, const steps::LowLatency& step, cudaStream_t on);
void enqueue(RunState& run, const steps::PeerExchange& step, cudaStream_t on);
void enqueue(RunState& run, const steps::WaitForSlots& step, cudaStream_t on);
void enqueue(RunState& run, const steps::EndCall& step, cudaStream_t on);

}  // namespace overlap::runtime
