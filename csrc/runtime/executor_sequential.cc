// One after the other, on the caller's stream: what nothing overlaps on.
#include "runtime/error.h"
#include "runtime/executor.h"

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

}  // namespace

void run_sequential(Group& group, const SequentialCall& call) {
  group.check();
  const cudaStream_t stream = call.stream;
  const std::optional<unsigned long long> capture = capture_id(stream);
  Communicator& communicator =
      group.communicator(communicator_of(*call.plan, 0), capture.has_value());
  CallTrace* trace = call.trace != nullptr && !capture ? &call.trace->add(1) : nullptr;
  if (trace != nullptr) trace->start.record(stream);
  // A GEMM that comes first waits for no peer, so it need not be chained: it starts while the host
  // does the rest.
  const bool gathers = call.plan->problem.op == plan::Op::kAllGatherGemm;
  void* product = gathers ? nullptr : call.gemm();
  if (trace != nullptr && !gathers) trace->gemm_end.record(stream);

  DeviceState& device = group.device();
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.chain(stream, capture);
    if (trace != nullptr) {
      trace->ready[0]->record(stream);
      trace->begin[0]->record(stream);
    }
    communicate(communicator, call, product);
    if (trace != nullptr) trace->finish[0]->record(stream);
    device.chained(stream, capture);
  }
  if (gathers) {
    (void)call.gemm();
    if (trace != nullptr) trace->gemm_end.record(stream);
  }
  if (trace != nullptr) trace->end.record(stream);
  if (capture) {
    group.mark_captured();
  } else {
    group.track(stream, 1);
  }
}

}  // namespace overlap::runtime
