#include "runtime/executor.h"

#include <limits>

#include "kernels/reorder.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

// One CTA per block of work: the few SMs that GEMM and communication leave take some of them, and
// all SMs the rest as soon as the GEMM has ended.
constexpr int32_t kDefaultFinishCtas = std::numeric_limits<int32_t>::max();

// One run of the loop: what its steps share.
class ProduceLoop {
 public:
  ProduceLoop(Group& group, const ProduceCall& call)
      : group_(group),
        device_(group.device()),
        call_(call),
        plan_(*call.plan),
        order_(*call.order),
        chunks_(static_cast<int>(plan_.chunks.size())),
        lanes_(plan_.resources.lanes),
        parts_(plan::buffer_parts(plan_)),
        part_(parts_ > 1 ? group.rank() : 0),
        finish_ctas_(plan_.resources.finish_ctas > 0 ? plan_.resources.finish_ctas
                                                     : kDefaultFinishCtas),
        element_bytes_(plan::element_bytes(plan_.problem.dtype)),
        capture_(capture_id(call.stream)) {}

  void run() {
    prepare();
    device_.chain(call_.stream, capture_);
    if (call_.trace != nullptr && !capture_) trace_ = &call_.trace->add(chunks_);
    if (trace_ != nullptr) trace_->start.record(call_.stream);
    if (call_.signals) {
      produce_with_signals();
    } else {
      produce_by_chunk();
    }
    join();
    if (trace_ != nullptr) trace_->end.record(call_.stream);
    device_.chained(call_.stream, capture_);
    if (capture_) {
      group_.mark_captured();
    } else {
      group_.track(call_.stream, chunks_);
    }
  }

 private:
  // Everything that can fail or has to be made, before anything is launched.
  void prepare() {
    group_.check();
    std::vector<CommunicatorKey> keys;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      keys.push_back(communicator_of(plan_, chunk));
      communicators_.push_back(&group_.communicator(keys.back(), capture_.has_value()));
    }
    buffer_ = call_.buffer;
    if (buffer_ == nullptr) {
      buffer_ =
          group_.staging(plan::buffer_elements(plan_) * element_bytes_, keys, capture_.has_value());
    }
    // A plan without unpacking or bias needs no copy: NCCL writes the result where the caller wants
    // it.
    in_place_ = buffer_ == call_.output;
    finishes_ = !in_place_ || call_.bias != nullptr;
  }

  void produce_with_signals() {
    check_cuda(cudaMemsetAsync(call_.counters, 0, sizeof(int32_t) * static_cast<size_t>(chunks_),
                               call_.stream),
               "cudaMemsetAsync");
    fork();
    kernels::GemmParams gemm = call_.gemm;
    gemm.output = buffer_;
    gemm.parts = parts_;
    gemm.part = part_;
    gemm.order = order_;
    gemm.counters = call_.counters;
    // The producer goes first: what waits for it must never be able to keep it out.
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, call_.stream), "launching the GEMM");
    if (trace_ != nullptr) trace_->gemm_end.record(call_.stream);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (trace_ != nullptr) {
        wait(chunk, device_.observer.get());
        trace_->ready[chunk]->record(device_.observer.get());
      }
      hold_side(chunk);
      wait(chunk, side(chunk));
      communicate(chunk);
    }
  }

  void produce_by_chunk() {
    fork();
    const bool packed = plan_.layout == plan::Layout::kPacked;
    if (packed) call_.library_gemm({0, plan_.problem.m}, call_.library_rows);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (packed) {
        kernels::ReorderParams reorder = reorder_params(chunk);
        reorder.row_major = call_.library_rows;
        reorder.bias = nullptr;
        reorder.part = part_;
        check_cuda(kernels::pack_chunk(reorder, call_.stream), "packing a chunk");
      } else {
        call_.library_gemm(plan::chunk_rows(plan_, chunk), place(chunk));
      }
      device_.produced[chunk].record(call_.stream);
      if (trace_ != nullptr) {
        trace_->ready[chunk]->record(call_.stream);
        if (chunk == chunks_ - 1) trace_->gemm_end.record(call_.stream);
      }
      hold_side(chunk);
      device_.produced[chunk].block(side(chunk));
      mark(chunk);
      communicate(chunk);
    }
  }

  void fork() {
    device_.fork.record(call_.stream);
    for (int lane = 0; lane < lanes_; ++lane) device_.fork.block(device_.side[lane].get());
    if (finishes_) device_.fork.block(device_.copy.get());
    if (trace_ != nullptr) device_.fork.block(device_.observer.get());
  }

  // [A] The chunk's tiles are finished when its counter says so.
  void wait(int chunk, cudaStream_t stream) {
    enqueue_wait(chunk, plan::chunk_tiles(order_, chunk), stream);
  }

  // The chunk was waited for by an event: only says that it is next.
  void mark(int chunk) {
    enqueue_wait(chunk, std::numeric_limits<int32_t>::min(), side(chunk));  // true at once
  }

  void enqueue_wait(int chunk, int32_t expected, cudaStream_t stream) {
    kernels::WaitParams wait;
    wait.counter = call_.counters + chunk;
    wait.expected = expected;
    wait.deadline_ns = std::chrono::nanoseconds(group_.timeout()).count();
    wait.rank = group_.rank();
    wait.chunk = chunk;
    wait.report = group_.report();
    check_cuda(kernels::wait_counter(wait, stream), "launching a wait");
  }

  void communicate(int chunk) {
    const cudaStream_t side = this->side(chunk);
    const plan::Extent extent = plan::chunk_extent(plan_, chunk);
    if (trace_ != nullptr) trace_->begin[chunk]->record(side);
    if (plan_.collective == plan::Collective::kExchange) {
      communicators_[chunk]->all_gather_in_place(place(chunk), static_cast<size_t>(extent.count),
                                                 plan_.problem.dtype, side);
    } else {
      communicators_[chunk]->all_reduce(
          place(chunk), place(chunk), static_cast<size_t>(extent.count), plan_.problem.dtype, side);
    }
    if (trace_ != nullptr) trace_->finish[chunk]->record(side);
    if (!finishes_) return;
    device_.communicated[chunk].record(side);
    device_.communicated[chunk].block(device_.copy.get());
    finish(chunk);
  }

  // Behind the next chunk's communication: back to row-major, parts added up, plus bias.
  void finish(int chunk) {
    const cudaStream_t copy = device_.copy.get();
    if (plan_.layout == plan::Layout::kPacked) {
      check_cuda(kernels::unpack_chunk(reorder_params(chunk), copy), "unpacking a chunk");
      return;
    }
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    char* destination =
        static_cast<char*>(call_.output) + rows.begin * plan_.problem.n * element_bytes_;
    if (call_.bias == nullptr) {
      // The copy engine, which takes no SM from GEMM and communication.
      const plan::Extent extent = plan::chunk_extent(plan_, chunk);
      check_cuda(cudaMemcpyAsync(destination, place(chunk),
                                 static_cast<size_t>(extent.count * element_bytes_),
                                 cudaMemcpyDeviceToDevice, copy),
                 "copying a chunk");
      return;
    }
    kernels::BiasParams params;
    params.rows = rows.end - rows.begin;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = place(chunk);
    params.destination = destination;
    params.bias = call_.bias;
    params.ctas = finish_ctas_;
    check_cuda(kernels::add_bias(params, copy), "adding the bias to a chunk");
  }

  void join() {
    for (int lane = 0; lane < lanes_; ++lane) {
      device_.join[lane].record(device_.side[lane].get());
      device_.join[lane].block(call_.stream);
    }
    if (finishes_) {
      device_.copied.record(device_.copy.get());
      device_.copied.block(call_.stream);
    }
  }

  void hold_side(int chunk) {
    if (call_.delay_us > 0)
      check_cuda(kernels::delay(call_.delay_us, side(chunk)), "launching a delay");
  }

  // Chunks in flight at the same time are on different streams and communicators.
  cudaStream_t side(int chunk) const { return device_.side[lane_of(plan_, chunk)].get(); }

  char* place(int chunk) const {
    return static_cast<char*>(buffer_) + plan::chunk_extent(plan_, chunk).offset * element_bytes_;
  }

  kernels::ReorderParams reorder_params(int chunk) const {
    kernels::ReorderParams params;
    params.m = plan_.problem.m;
    params.n = plan_.problem.n;
    params.tile_m = plan_.tile_m;
    params.tile_n = plan_.tile_n;
    params.dtype = plan_.problem.dtype;
    params.order = order_;
    params.chunk = chunk;
    params.row_major = call_.output;
    params.packed = buffer_;
    params.bias = call_.bias;
    params.ctas = finish_ctas_;
    params.parts = parts_;
    params.part = 0;
    return params;
  }

  Group& group_;
  DeviceState& device_;
  const ProduceCall& call_;
  const plan::Plan& plan_;
  const plan::TileOrder& order_;
  const int chunks_;
  const int lanes_;
  const int parts_;
  const int part_;
  const int finish_ctas_;
  const int64_t element_bytes_;
  const std::optional<unsigned long long> capture_;
  std::vector<Communicator*> communicators_;
  void* buffer_ = nullptr;
  bool in_place_ = false;
  bool finishes_ = false;
  CallTrace* trace_ = nullptr;
};

}  // namespace

bool communicates_in_place(const plan::Plan& plan) {
  return plan.layout == plan::Layout::kRowMajor && !plan.resources.window;
}

void run_all_reduce(Group& group, const ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  ProduceLoop(group, call).run();
}

void run_sequential_all_reduce(Group& group, const plan::Plan& plan,
                               const std::function<void*()>& gemm, cudaStream_t stream,
                               Trace* trace) {
  group.check();
  const std::optional<unsigned long long> capture = capture_id(stream);
  Communicator& communicator = group.communicator(communicator_of(plan, 0), capture.has_value());
  CallTrace* record = trace != nullptr && !capture ? &trace->add(1) : nullptr;
  if (record != nullptr) record->start.record(stream);
  // The GEMM waits for no peer, so it need not be chained: it starts while the host does the rest.
  void* output = gemm();
  if (record != nullptr) record->gemm_end.record(stream);

  DeviceState& device = group.device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.chain(stream, capture);
  if (record != nullptr) {
    record->ready[0]->record(stream);
    record->begin[0]->record(stream);
  }
  communicator.all_reduce(output, output, static_cast<size_t>(plan.problem.m * plan.problem.n),
                          plan.problem.dtype, stream);
  if (record != nullptr) {
    record->finish[0]->record(stream);
    record->end.record(stream);
  }
  device.chained(stream, capture);
  if (capture) {
    group.mark_captured();
  } else {
    group.track(stream, 1);
  }
}

}  // namespace overlap::runtime
