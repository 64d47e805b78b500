#include "replay.h"

#include <limits>

#include "kernels/reorder.h"
#include "record.h"
#include "runtime/executor_loop.h"

namespace recorder {
namespace {

namespace kernels = overlap::kernels;
namespace plan = overlap::plan;
namespace runtime = overlap::runtime;
namespace steps = overlap::steps;

// Walks a list. What a call has that the other kind has not is null.
class Replay : runtime::ExecutorLoop {
 public:
  Replay(runtime::Group& group, const runtime::ProduceCall& call, const steps::StepList& list)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us), list_(list), produce_(&call) {}
  Replay(runtime::Group& group, const runtime::SequentialCall& call, const steps::StepList& list)
      : ExecutorLoop(group, *call.plan, call.stream, 0), list_(list), sequential_(&call) {}

  void run() {
    prepare_communicators();
    if (produce_ != nullptr && produce_->buffer == nullptr) window_ = window();
    const std::vector<steps::Step>& all = list_.steps;
    size_t first = 0;
    while (first < all.size() && all[first].unchained) ++first;
    size_t end = all.size();
    while (end > first && all[end - 1].unchained) --end;
    events_.resize(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (i == first) {
        chain();
        if (list_.counters > 0) counters_ = zeroed_counters(produce_->counters, list_.counters);
      }
      enqueue(i);
      if (i + 1 == end) device_.chained(stream_, capture_);
    }
    // Its destructor would join, as after an exception.
    if (forked_) record().violation("the list forks and does not join");
    // As ExecutorLoop::end, which takes all steps for chained ones.
    if (capture_) {
      group_.mark_captured();
    } else {
      group_.track(stream_, static_cast<int>(plan_.chunks.size()));
    }
  }

 private:
  cudaStream_t stream(steps::Lane lane) const {
    if (lane == steps::Lane::kCaller) return stream_;
    if (lane == steps::Lane::kCopy) return device_.copy.get();
    return device_.side[static_cast<size_t>(lane) - static_cast<size_t>(steps::Lane::kSide0)].get();
  }

  char* at(const steps::Where& where) const {
    return static_cast<char*>(base(where)) + where.offset;
  }

  void* base(const steps::Where& where) const {
    switch (where.buffer) {
      case steps::Buffer::kInput:
        return const_cast<void*>(sequential_->input);
      case steps::Buffer::kOutput:
        return produce_ != nullptr ? produce_->output : sequential_->output;
      case steps::Buffer::kGathered:
        return sequential_->output;
      case steps::Buffer::kStaging:
        return produce_->buffer;
      case steps::Buffer::kWindow:
        return window_;
      case steps::Buffer::kProduct:
        return produce_ != nullptr ? produce_->library_rows : product_;
    }
    return nullptr;
  }

  void enqueue(size_t index) {
    const steps::Step& step = list_.steps[index];
    const cudaStream_t on = stream(step.lane);
    // Tests hold a side stream in front of each chunk.
    const bool begins_chunk = std::holds_alternative<steps::WaitForTiles>(step.what) ||
                              std::holds_alternative<steps::Mark>(step.what);
    if (begins_chunk) hold(on);
    for (const steps::StepId id : step.after) events_[static_cast<size_t>(id)].value().block(on);
    std::visit([&](const auto& what) { this->enqueue(what, on); }, step.what);
    // An event for what another lane waits for.
    for (size_t later = index + 1; later < list_.steps.size(); ++later) {
      const std::vector<steps::StepId>& after = list_.steps[later].after;
      if (std::find(after.begin(), after.end(), static_cast<steps::StepId>(index)) == after.end()) {
        continue;
      }
      events_[index].emplace().record(on);
      break;
    }
  }

  void enqueue(const steps::Fork& step, cudaStream_t) {
    lanes_ = step.side_lanes;
    fork(step.copies);
  }
  void enqueue(const steps::Join&, cudaStream_t) { join(); }

  void enqueue(const steps::Gemm& step, cudaStream_t on) {
    kernels::GemmParams gemm = produce_->gemm;
    gemm.output = at(step.output);
    gemm.part = step.part;
    gemm.parts = step.parts;
    gemm.order = *produce_->order;
    gemm.counters = counters_;
    if (step.scattered_rows > 0) {
      gemm.rows.mode = plan::RowMap::Mode::kScatter;
      gemm.rows.part_rows = static_cast<int32_t>(step.scattered_rows);
    }
    runtime::check_cuda(kernels::launch_gemm(plan_.kernel, gemm, on), "launching the GEMM");
  }

  void enqueue(const steps::LibraryGemm& step, cudaStream_t) {
    if (produce_ != nullptr) {
      produce_->library_gemm(step.rows, at(step.output));
    } else {
      product_ = sequential_->gemm();
    }
  }

  void enqueue(const steps::WaitForTiles& step, cudaStream_t on) {
    enqueue_wait(counters_ + step.chunk, step.tiles, step.chunk, on);
  }
  void enqueue(const steps::Mark& step, cudaStream_t on) {
    enqueue_wait(counters_ + step.chunk, std::numeric_limits<int32_t>::min(), step.chunk, on);
  }

  void enqueue(const steps::Collective& step, cudaStream_t on) {
    runtime::Communicator& to = group_.communicator({step.max_ctas, step.lane}, false);
    const auto count = static_cast<size_t>(step.count);
    const plan::DType dtype = plan_.problem.dtype;
    switch (step.kind) {
      case plan::Collective::kReduceScatter:
        to.reduce_scatter(at(step.source), at(step.destination), count, dtype, on);
        return;
      case plan::Collective::kAllReduce:
        to.all_reduce(at(step.source), at(step.destination), count, dtype, on);
        return;
      default:
        to.all_gather(at(step.source), at(step.destination), count, dtype, on);
    }
  }

  void enqueue(const steps::Copy& step, cudaStream_t on) {
    copy(at(step.destination), at(step.source), step.bytes, on);
  }

  kernels::ReorderParams reorder(int32_t chunk) const {
    kernels::ReorderParams params;
    params.m = plan_.problem.m;
    params.n = plan_.problem.n;
    params.tile_m = plan_.tile_m;
    params.tile_n = plan_.tile_n;
    params.dtype = plan_.problem.dtype;
    params.order = *produce_->order;
    params.chunk = chunk;
    params.ctas = finish_ctas();
    return params;
  }

  int32_t finish_ctas() const {
    const int32_t ctas = plan_.resources.finish_ctas;
    return ctas > 0 ? ctas : std::numeric_limits<int32_t>::max();
  }

  void enqueue(const steps::Pack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step.chunk);
    params.row_major = at(step.source);
    params.packed = at(step.destination);
    params.part = step.part;
    params.parts = step.parts;
    runtime::check_cuda(kernels::pack_chunk(params, on), "packing a chunk");
  }

  void enqueue(const steps::Unpack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step.chunk);
    params.packed = at(step.source);
    params.row_major = at(step.destination);
    params.parts = step.parts;
    params.bias = step.bias ? produce_->bias : nullptr;
    runtime::check_cuda(kernels::unpack_chunk(params, on), "unpacking a chunk");
  }

  void enqueue(const steps::AddBias& step, cudaStream_t on) {
    kernels::BiasParams params;
    params.rows = step.rows;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = at(step.source);
    params.destination = at(step.destination);
    params.bias = produce_->bias;
    params.ctas = finish_ctas();
    runtime::check_cuda(kernels::add_bias(params, on), "adding the bias to a chunk");
  }

  const steps::StepList& list_;
  const runtime::ProduceCall* produce_ = nullptr;
  const runtime::SequentialCall* sequential_ = nullptr;
  int32_t* counters_ = nullptr;
  void* window_ = nullptr;
  void* product_ = nullptr;
  std::vector<std::optional<runtime::Event>> events_;
};

}  // namespace

void replay(runtime::Group& group, const runtime::ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  const steps::StepList list = steps::lower(*call.plan, group.rank(),
                                            {.kernel_takes = call.signals,
                                             .bias = call.bias != nullptr,
                                             .in_window = call.buffer == nullptr});
  Replay(group, call, list).run();
}

void replay(runtime::Group& group, const runtime::SequentialCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  const steps::StepList list = steps::lower(*call.plan, group.rank(), {});
  Replay(group, call, list).run();
}

}  // namespace recorder
