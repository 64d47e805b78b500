#include "runtime/run_state.h"

#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/signal/signal.h"
#include "runtime/error.h"

namespace overlap::runtime {

void wait_for_peers(const RunState& run, kernels::PeerWaitParams wait, int32_t chunk,
                    cudaStream_t on) {
  wait.chunk = chunk;
  check_cuda(kernels::wait_peers_acquire_sys(run.with_deadline(wait), on), "launching a wait");
}

void enqueue(RunState& run, const steps::WaitForSlots&, cudaStream_t on) {
  if (!run.peer_call.slot_may_be_busy) return;
  wait_for_peers(run, run.peers->wait_for_slots(run.peer_call, run.peers->everyone_else()), 0, on);
}
void enqueue(RunState& run, const steps::WaitForPeers& step, cudaStream_t on) {
  wait_for_peers(run, run.arrivals(step.step), step.step, on);
}
void enqueue(RunState& run, const steps::Signal& step, cudaStream_t on) {
  const uint32_t self = step.to_self ? run.peers->self() : 0;
  run.peers->signal(run.peer_call, Peers::Flag::kArrived, run.peers->everyone_else() | self,
                    step.step, on);
  run.told = true;
}
void enqueue(RunState& run, const steps::EndCall&, cudaStream_t on) {
  run.peers->end(run.peer_call, on);
  run.ended = true;
}

void enqueue(RunState& run, const steps::MeetTiles& step, cudaStream_t on) {
  check_cuda(
      kernels::meet_tiles(run.peer_tiles(), step.first_announced, step.announces ? step.tiles : 0,
                          step.first_awaited, step.awaits ? step.tiles : 0, step.distance, on),
      "launching a signal and a wait");
  run.told = run.told || step.announces;
}

void enqueue(RunState& run, const steps::Announce& step, cudaStream_t on) {
  check_cuda(kernels::meet_tiles(run.transfer_flags(), step.flag, 1, 0, 0,
                                 run.distance(run.group.rank(), step.peer), on),
             "launching a signal");
  run.told = true;
}
void enqueue(RunState& run, const steps::Await& step, cudaStream_t on) {
  check_cuda(kernels::meet_tiles(run.transfer_flags(), 0, 0, step.flag, 1,
                                 run.distance(step.peer, run.group.rank()), on),
             "launching a wait");
}
void enqueue(RunState& run, const steps::PeerCollective& step, cudaStream_t on) {
  constexpr int64_t kBytes = kernels::kPeerAccessBytes;
  kernels::PeerCollectiveParams params{run.with_deadline(run.peers->meeting(run.peer_call))};
  params.dtype = plan::moved_dtype(run.plan.problem);
  params.reduces = step.reduces;
  params.by_pairs = plan::adds_by_pairs(run.plan.problem);
  params.gathers = step.gathers;
  params.stride = step.stride / kBytes;
  params.first = step.first / kBytes;
  if (step.reduces) params.row_count = run.plan.problem.n * run.element_bytes / kBytes;
  params.own = run.at(step.own);
  params.output = run.at(step.output);
  params.bias = step.bias ? run.call.bias : nullptr;
  for (size_t rank = 0; rank < step.pieces.size(); ++rank) {
    const steps::Piece& piece = step.pieces[rank];
    params.count[rank] = piece.bytes / kBytes;
    params.send[rank] = run.at(piece.send);
    params.destination[rank] = run.at(piece.destination);
    params.received[rank] = run.at(piece.received);
    params.final_destination[rank] = run.at(piece.final_destination);
    params.final_received[rank] = run.at(piece.final_received);
  }
  check_cuda(kernels::peer_collective(params, on), "launching a collective");
  run.ended = true;
}

void enqueue(RunState& run, const steps::LowLatency& step, cudaStream_t on) {
  constexpr int64_t kWord = 4;
  const kernels::LinePeers peers =
      run.with_deadline(run.peers->low_latency(run.list.communication));
  if (step.finish) {
    kernels::PeerFinishParams params{peers, step.in_pieces, *run.call.finish};
    params.finish.terms = run.at(step.own);
    params.finish.sum = run.at(step.output);
    check_cuda(kernels::peer_finish(params, on), "launching an all-reduce with its norm");
    return;
  }
  kernels::PeerLowLatencyParams params{peers};
  params.dtype = plan::moved_dtype(run.plan.problem);
  params.in_pieces = step.in_pieces;
  params.by_pairs = plan::adds_by_pairs(run.plan.problem);
  params.words = step.bytes / kWord;
  params.own = run.at(step.own);
  params.output = run.at(step.output);
  params.bias = step.bias ? run.call.bias : nullptr;
  params.row_words = run.plan.problem.n * run.element_bytes / kWord;
  check_cuda(kernels::peer_all_reduce_low_latency(params, on), "launching an all-reduce");
}

void enqueue(RunState& run, const steps::PeerExchange& step, cudaStream_t on) {
  constexpr int64_t kBytes = kernels::kPeerAccessBytes;
  kernels::PeerExchangeParams params{run.with_deadline(run.peers->meeting(run.peer_call))};
  params.sends = step.sends;
  for (size_t rank = 0; rank < step.messages.size(); ++rank) {
    const steps::PeerMessages& messages = step.messages[rank];
    params.send_count[rank] = messages.send_bytes / kBytes;
    params.send[rank] = run.at(messages.send);
    params.destination[rank] = run.at(messages.destination);
    params.receive_count[rank] = messages.receive_bytes / kBytes;
    params.received[rank] = run.at(messages.received);
    params.output[rank] = run.at(messages.output);
  }
  check_cuda(kernels::peer_exchange(params, on), "launching an exchange");
  run.ended = true;
}

}  // namespace overlap::runtime
