// Computation before communication.
#include <limits>

#include "kernels/reorder.h"
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {
namespace {

// One CTA per block of work: the few SMs that GEMM and communication leave take some of them, and
// all SMs the rest as soon as the GEMM has ended.
constexpr int32_t kDefaultFinishCtas = std::numeric_limits<int32_t>::max();

class ProduceLoop : ExecutorLoop {
 public:
  ProduceLoop(Group& group, const ProduceCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us),
        call_(call),
        order_(*call.order),
        chunks_(static_cast<int>(plan_.chunks.size())),
        row_parts_(plan::row_parts(plan_)),
        exchanges_(plan_.collective == plan::Collective::kExchange),
        finish_ctas_(plan_.resources.finish_ctas > 0 ? plan_.resources.finish_ctas
                                                     : kDefaultFinishCtas) {}

  void run() {
    prepare();
    begin(call_.trace, chunks_);
    counters_ = zeroed_counters(call_.counters, chunks_);
    if (call_.signals) {
      produce_with_signals();
    } else {
      produce_by_chunk();
    }
    join();
    end(chunks_);
  }

 private:
  void prepare() {
    prepare_communicators();
    buffer_ = call_.buffer != nullptr ? call_.buffer : window();
    for (int chunk = 0; chunk < chunks_; ++chunk) finishes_ = finishes_ || finishes(chunk);
  }

  void produce_with_signals() {
    fork(finishes_);
    kernels::GemmParams gemm = call_.gemm;
    gemm.output = buffer_;
    gemm.parts = exchanges_ ? plan::buffer_parts(plan_) : 1;
    gemm.part = exchanges_ ? group_.rank() : 0;
    gemm.order = order_;
    gemm.counters = counters_;
    if (row_parts_ > 1) {
      gemm.rows.mode = plan::RowMap::Mode::kScatter;
      gemm.rows.part_rows = static_cast<int32_t>(plan::part_rows(plan_));
    }
    // The producer goes first: what waits for it must never be able to keep it out.
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (trace_ != nullptr) {
        wait(chunk, device_.observer.get());
        trace_->ready[chunk]->record(device_.observer.get());
      }
      hold_side(chunk);
      wait(chunk, side(chunk));
      communicate(chunk);
    }
    if (trace_ != nullptr) trace_->ready[chunks_ - 1]->block(stream_);  // its wait reads counters
  }

  void produce_by_chunk() {
    fork(finishes_);
    const bool packed = plan_.layout == plan::Layout::kPacked;
    if (packed) call_.library_gemm({0, plan_.problem.m}, call_.library_rows);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (packed) {
        kernels::ReorderParams reorder = reorder_params(chunk);
        reorder.row_major = call_.library_rows;
        reorder.bias = nullptr;
        reorder.part = exchanges_ ? group_.rank() : 0;
        check_cuda(kernels::pack_chunk(reorder, stream_), "packing a chunk");
      } else {
        compute_panels(chunk);
      }
      device_.produced[chunk].record(stream_);
      if (trace_ != nullptr) {
        trace_->ready[chunk]->record(stream_);
        if (chunk == chunks_ - 1) trace_->gemm_end.record(stream_);
      }
      hold_side(chunk);
      device_.produced[chunk].block(side(chunk));
      mark(chunk);
      communicate(chunk);
    }
  }

  // The chunk's rows of each part, by the framework's GEMM.
  void compute_panels(int chunk) {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t part_rows = plan::part_rows(plan_);
    for (int part = 0; part < row_parts_; ++part) {
      call_.library_gemm({part * part_rows + rows.begin, part * part_rows + rows.end},
                         place(chunk, part));
    }
  }

  // [A] The chunk's tiles are finished when its counter says so.
  void wait(int chunk, cudaStream_t stream) {
    enqueue_wait(counters_ + chunk, plan::chunk_tiles(order_, chunk), chunk, stream);
  }

  // The chunk was waited for by an event: only says that it is next.
  void mark(int chunk) {
    enqueue_wait(counters_ + chunk, std::numeric_limits<int32_t>::min(), chunk,
                 side(chunk));  // true at once
  }

  void communicate(int chunk) {
    const Range range(chunk);
    const cudaStream_t side = this->side(chunk);
    const plan::DType dtype = plan_.problem.dtype;
    const auto count = static_cast<size_t>(plan::chunk_extent(plan_, chunk).count);
    if (trace_ != nullptr) trace_->begin[chunk]->record(side);
    if (exchanges_) {
      communicators_[chunk]->all_gather_in_place(place(chunk), count, dtype, side);
    } else if (row_parts_ > 1) {
      communicators_[chunk]->reduce_scatter(place(chunk), result(chunk), count, dtype, side);
    } else {
      communicators_[chunk]->all_reduce(place(chunk), place(chunk), count, dtype, side);
    }
    if (trace_ != nullptr) trace_->finish[chunk]->record(side);
    if (!finishes(chunk)) return;
    device_.communicated[chunk].record(side);
    device_.communicated[chunk].block(device_.copy.get());
    finish(chunk);
  }

  // Whether something is left to do once the chunk has been communicated.
  bool finishes(int chunk) const {
    return plan_.layout == plan::Layout::kPacked || call_.bias != nullptr ||
           result(chunk) != destination(chunk);
  }

  // Behind the next chunk's communication: back to row-major, parts added up, plus bias.
  void finish(int chunk) {
    const cudaStream_t copies = device_.copy.get();
    if (plan_.layout == plan::Layout::kPacked) {
      check_cuda(kernels::unpack_chunk(reorder_params(chunk), copies), "unpacking a chunk");
      return;
    }
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    if (call_.bias == nullptr) {
      // The copy engine, which takes no SM from GEMM and communication.
      copy(destination(chunk), result(chunk), (rows.end - rows.begin) * row_bytes(), copies);
      return;
    }
    kernels::BiasParams params;
    params.rows = rows.end - rows.begin;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = result(chunk);
    params.destination = destination(chunk);
    params.bias = call_.bias;
    params.ctas = finish_ctas_;
    check_cuda(kernels::add_bias(params, copies), "adding the bias to a chunk");
  }

  int64_t row_bytes() const { return plan_.problem.n * element_bytes_; }

  // Where a chunk, or one part of it, lies in the staging buffer.
  char* place(int chunk, int part = 0) const {
    const plan::Extent extent = plan::chunk_extent(plan_, chunk);
    return static_cast<char*>(buffer_) + (extent.offset + part * extent.count) * element_bytes_;
  }

  char* destination(int chunk) const {
    return static_cast<char*>(call_.output) + plan::chunk_rows(plan_, chunk).begin * row_bytes();
  }

  // Where the communicated rows of a row-major chunk lie. A reduce-scatter puts them where the caller
  // wants them, unless NCCL should take its window kernels, or the last tile is larger than what is
  // left of the output.
  char* result(int chunk) const {
    if (row_parts_ == 1) return place(chunk);
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const bool whole =
        plan::chunk_extent(plan_, chunk).count == (rows.end - rows.begin) * plan_.problem.n;
    if (whole && call_.buffer != nullptr) return destination(chunk);
    return place(chunk, group_.rank());
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
    params.parts = exchanges_ ? plan::buffer_parts(plan_) : 1;
    params.part = 0;
    return params;
  }

  const ProduceCall& call_;
  const plan::TileOrder& order_;
  const int chunks_;
  const int row_parts_;
  const bool exchanges_;
  const int finish_ctas_;
  void* buffer_ = nullptr;
  int32_t* counters_ = nullptr;
  bool finishes_ = false;
};

}  // namespace

bool communicates_in_place(const plan::Plan& plan) {
  return plan.problem.op == plan::Op::kGemmAllReduce && plan.layout == plan::Layout::kRowMajor &&
         !plan.resources.window;
}

void run_produce(Group& group, const ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  ProduceLoop(group, call).run();
}

}  // namespace overlap::runtime
