#include "runtime/executor.h"

#include <algorithm>

#include "kernels/reorder.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

constexpr int kFinishCtas = 32;  // of the copy stream's kernels: enough for bandwidth, few beside a GEMM

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
      group_.track(call_.stream);
    }
  }

 private:
  // Everything that can fail or has to be made, before anything is launched.
  void prepare() {
    group_.check();
    std::vector<int> limits;
    for (const plan::Chunk& chunk : plan_.chunks) {
      communicators_.push_back(&group_.communicator(chunk.max_ctas, capture_.has_value()));
      if (std::find(limits.begin(), limits.end(), chunk.max_ctas) == limits.end()) {
        limits.push_back(chunk.max_ctas);
      }
    }
    buffer_ = call_.buffer;
    if (buffer_ == nullptr) {
      buffer_ = group_.staging(plan::buffer_elements(plan_) * element_bytes_, limits, capture_.has_value());
    }
    // A plan without unpacking or bias needs no copy: NCCL writes the result where the caller wants it.
    in_place_ = buffer_ == call_.output;
    finishes_ = !in_place_ || call_.bias != nullptr;
  }

  void produce_with_signals() {
    check_cuda(cudaMemsetAsync(call_.counters, 0, sizeof(int32_t) * static_cast<size_t>(chunks_), call_.stream),
               "cudaMemsetAsync");
    fork();
    kernels::GemmParams gemm = call_.gemm;
    gemm.output = buffer_;
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
      hold_side();
      wait(chunk, device_.side.get());
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
        check_cuda(kernels::pack_chunk(reorder, call_.stream), "packing a chunk");
      } else {
        call_.library_gemm(plan::chunk_rows(plan_, chunk), place(chunk));
      }
      device_.produced[chunk].record(call_.stream);
      if (trace_ != nullptr) {
        trace_->ready[chunk]->record(call_.stream);
        if (chunk == chunks_ - 1) trace_->gemm_end.record(call_.stream);
      }
      hold_side();
      device_.produced[chunk].block(device_.side.get());
      communicate(chunk);
    }
  }

  void fork() {
    device_.fork.record(call_.stream);
    device_.fork.block(device_.side.get());
    if (finishes_) device_.fork.block(device_.copy.get());
    if (trace_ != nullptr) device_.fork.block(device_.observer.get());
  }

  void wait(int chunk, cudaStream_t stream) {
    kernels::WaitParams wait;
    wait.counter = call_.counters + chunk;
    wait.expected = plan::chunk_tiles(order_, chunk);
    wait.deadline_ns = std::chrono::nanoseconds(group_.timeout()).count();
    wait.rank = group_.rank();
    wait.chunk = chunk;
    wait.report = group_.report();
    check_cuda(kernels::wait_counter(wait, stream), "launching a wait");
  }

  void communicate(int chunk) {
    const cudaStream_t side = device_.side.get();
    const plan::Extent extent = plan::chunk_extent(plan_, chunk);
    if (trace_ != nullptr) trace_->begin[chunk]->record(side);
    communicators_[chunk]->all_reduce(place(chunk), place(chunk), static_cast<size_t>(extent.count),
                                      plan_.problem.dtype, side);
    if (trace_ != nullptr) trace_->finish[chunk]->record(side);
    if (!finishes_) return;
    device_.communicated[chunk].record(side);
    device_.communicated[chunk].block(device_.copy.get());
    finish(chunk);
  }

  // Behind the next chunk's communication: back to row-major, plus bias.
  void finish(int chunk) {
    const cudaStream_t copy = device_.copy.get();
    if (plan_.layout == plan::Layout::kPacked) {
      check_cuda(kernels::unpack_chunk(reorder_params(chunk), copy), "unpacking a chunk");
      return;
    }
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    kernels::BiasParams params;
    params.rows = rows.end - rows.begin;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = place(chunk);
    params.destination =
        static_cast<char*>(call_.output) + rows.begin * plan_.problem.n * element_bytes_;
    params.bias = call_.bias;
    params.ctas = kFinishCtas;
    check_cuda(kernels::add_bias(params, copy), "adding the bias to a chunk");
  }

  void join() {
    device_.join.record(device_.side.get());
    device_.join.block(call_.stream);
    if (finishes_) {
      device_.copied.record(device_.copy.get());
      device_.copied.block(call_.stream);
    }
  }

  void hold_side() {
    if (call_.delay_us > 0) check_cuda(kernels::delay(call_.delay_us, device_.side.get()), "launching a delay");
  }

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
    params.ctas = kFinishCtas;
    return params;
  }

  Group& group_;
  DeviceState& device_;
  const ProduceCall& call_;
  const plan::Plan& plan_;
  const plan::TileOrder& order_;
  const int chunks_;
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

void run_sequential_all_reduce(Group& group, const plan::Plan& plan, void* output,
                               const std::function<void()>& gemm, cudaStream_t stream, Trace* trace) {
  DeviceState& device = group.device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  group.check();
  const std::optional<unsigned long long> capture = capture_id(stream);
  Communicator& communicator = group.communicator(plan.chunks.front().max_ctas, capture.has_value());
  device.chain(stream, capture);
  CallTrace* record = trace != nullptr && !capture ? &trace->add(1) : nullptr;
  if (record != nullptr) record->start.record(stream);
  gemm();
  if (record != nullptr) {
    record->gemm_end.record(stream);
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
    group.track(stream);
  }
}

}  // namespace overlap::runtime
