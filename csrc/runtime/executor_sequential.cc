// One after the other, on the caller's stream: what nothing overlaps on.
#include "kernels/peer_collective.h"
#include "runtime/error.h"
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {
namespace {

void communicate(Communicator& communicator, const SequentialCall& call, void* product) {
  const plan::Problem& problem = call.plan->problem;
  const auto count = static_cast<size_t>(plan::part_rows(*call.plan));
  const auto n = static_cast<size_t>(problem.n);
  switch (problem.op) {
    case plan::Op::kGemmReduceScatter:
      communicator.reduce_scatter(product, call.output, count * n, problem.dtype, call.stream);
      return;
    case plan::Op::kAllGatherGemm:
      communicator.all_gather(call.input, call.output, count * static_cast<size_t>(problem.k),
                              problem.dtype, call.stream);
      return;
    default:
      communicator.all_reduce(product, product, count * n, problem.dtype, call.stream);
  }
}

// An all-gather over peers in one kernel, then the GEMM.
class GatherLoop : ExecutorLoop {
 public:
  GatherLoop(Group& group, const SequentialCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, 0), call_(call) {}

  void run() {
    prepare_peers(plan::peer_slot_bytes(plan_));
    begin(call_.trace, 1);
    if (trace_ != nullptr) {
      trace_->ready[0]->record(stream_);
      trace_->begin[0]->record(stream_);
    }
    gather();
    if (trace_ != nullptr) trace_->finish[0]->record(stream_);
    (void)call_.gemm();
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    end(1);
  }

 private:
  void gather() {
    const int64_t bytes = plan::part_rows(plan_) * plan_.problem.k * element_bytes_;
    kernels::PeerCollectiveParams params = collective();
    params.gathers = true;
    params.own = call_.input;
    params.output = call_.output;
    params.stride = bytes / kernels::kPeerAccessBytes;
    for (int rank = 0; rank < group_.world_size(); ++rank) {
      params.count[rank] = params.stride;
      params.received[rank] = peers_->slot(peer_call_, group_.rank()) + rank * bytes;
      if (rank == group_.rank()) continue;
      params.send[rank] = call_.input;
      params.destination[rank] = peers_->slot(peer_call_, rank) + group_.rank() * bytes;
    }
    check_cuda(kernels::peer_collective(params, stream_), "launching an all-gather");
  }

  const SequentialCall& call_;
};

}  // namespace

void run_sequential(Group& group, const SequentialCall& call) {
  if (plan::over_peers(*call.plan)) {
    const std::lock_guard<std::mutex> lock(group.device().mutex);
    GatherLoop(group, call).run();
    return;
  }
  const Range range(call.plan->problem);
  group.check();
  const cudaStream_t stream = call.stream;
  const CommunicatorKey key = communicator_of(*call.plan, 0);
  Communicator* communicator = group.find_communicator(key);
  if (communicator == nullptr) {
    // Made, or refused in a capture, before anything is launched.
    communicator = &group.communicator(key, capture_id(stream).has_value());
  }
  std::shared_ptr<CallTrace> trace;
  if (call.trace != nullptr && !capture_id(stream)) {
    trace = call.trace->add(call.plan->problem, group.name(), group.device().device(), 1);
  }
  if (trace != nullptr) trace->start.record(stream);
  // A GEMM that comes first waits for no peer, so it need not be chained: it starts while the host
  // does the rest.
  const bool gathers = call.plan->problem.op == plan::Op::kAllGatherGemm;
  void* product = gathers ? nullptr : call.gemm();
  if (trace != nullptr && !gathers) trace->gemm_end.record(stream);

  const std::optional<unsigned long long> capture = capture_id(stream);
  DeviceState& device = group.device();
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.chain(stream, capture);
    if (trace != nullptr) {
      trace->ready[0]->record(stream);
      trace->begin[0]->record(stream);
    }
    communicate(*communicator, call, product);
    if (trace != nullptr) trace->finish[0]->record(stream);
    device.chained(stream, capture);
  }
  if (gathers) {
    (void)call.gemm();
    if (trace != nullptr) trace->gemm_end.record(stream);
  }
  if (trace != nullptr) {
    trace->end.record(stream);
    trace->ended = true;
  }
  if (capture) {
    group.mark_captured();
  } else {
    group.track(stream, 1);
  }
}

}  // namespace overlap::runtime
