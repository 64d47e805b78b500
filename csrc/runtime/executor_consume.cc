// Communication before computation.
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {
namespace {

class ConsumeLoop : ExecutorLoop {
 public:
  ConsumeLoop(Group& group, const ConsumeCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us),
        call_(call),
        chunks_(static_cast<int>(plan_.chunks.size())),
        parts_(plan::row_parts(plan_)),
        part_rows_(plan::part_rows(plan_)),
        row_bytes_(plan_.problem.k * element_bytes_) {}

  void run() {
    prepare();
    begin(call_.trace, chunks_);
    fork(true);
    // The own rows' GEMM starts while the host enqueues the rest.
    compute_own();
    if (peers_ != nullptr) {
      wait_for_slots(side(0));
      copy(gathered(group_.rank(), 0), call_.input, part_rows_ * row_bytes_, device_.copy.get());
    }
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (peers_ != nullptr) {
        push(chunk);
      } else {
        gather(chunk);
      }
    }
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      device_.communicated[chunk].block(stream_);
      if (trace_ != nullptr) trace_->ready[chunk]->record(stream_);
      compute(chunk);
    }
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    join();
    if (peers_ != nullptr) release_slot();
    end(chunks_);
  }

 private:
  void prepare() {
    if (plan::over_peers(plan_)) {
      prepare_peers(plan::peer_slot_bytes(plan_));
      buffer_ = peers_->slot(peer_call_, group_.rank());
      lanes_ = 2;  // one sends, one waits for what arrives
      return;
    }
    prepare_communicators();
    buffer_ = static_cast<char*>(call_.buffer != nullptr ? call_.buffer : window());
  }

  // Own rows of the chunk into every peer's memory, by the copy engine; and, once the peers' are
  // here, on into the gathered input.
  void push(int chunk) {
    const cudaStream_t send = device_.side[0].get();
    const cudaStream_t arrive = device_.side[1].get();
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
    const int64_t offset = place(chunk) - buffer_;
    hold_side(chunk);
    if (trace_ != nullptr) trace_->begin[chunk]->record(send);
    for (int distance = 1; distance < parts_; ++distance) {
      const int peer = (group_.rank() + distance) % parts_;
      copy(peers_->slot(peer_call_, peer) + offset + group_.rank() * bytes,
           static_cast<const char*>(call_.input) + rows.begin * row_bytes_, bytes, send);
    }
    signal_peers(Peers::Flag::kArrived, peers_->everyone_else(), chunk, send);
    wait_peers(Peers::Flag::kArrived, peers_->everyone_else(), chunk, chunk, arrive);
    if (trace_ != nullptr) trace_->finish[chunk]->record(arrive);
    device_.communicated[chunk].record(arrive);
    device_.communicated[chunk].block(device_.copy.get());
    for (int part = 0; part < parts_; ++part) {
      if (part == group_.rank()) continue;
      copy(gathered(part, rows.begin), place(chunk) + part * bytes, bytes, device_.copy.get());
    }
  }

  char* gathered(int part, int64_t row) const {
    return static_cast<char*>(call_.gathered) + (part * part_rows_ + row) * row_bytes_;
  }

  // Own rows of the chunk into the staging buffer, everybody's rows there, and all of them on into
  // the gathered input. All copies are the copy engine's, which takes no SM.
  void gather(int chunk) {
    const cudaStream_t copies = device_.copy.get();
    const cudaStream_t side = this->side(chunk);
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
    hold_side(chunk);
    copy(place(chunk) + group_.rank() * bytes,
         static_cast<const char*>(call_.input) + rows.begin * row_bytes_, bytes, side);
    if (trace_ != nullptr) trace_->begin[chunk]->record(side);
    communicators_[chunk]->all_gather_in_place(
        place(chunk), static_cast<size_t>(plan::chunk_extent(plan_, chunk).count),
        plan_.problem.dtype, side);
    if (trace_ != nullptr) trace_->finish[chunk]->record(side);
    device_.communicated[chunk].record(side);
    device_.communicated[chunk].block(copies);
    check_cuda(
        cudaMemcpy2DAsync(gathered(0, rows.begin), static_cast<size_t>(part_rows_ * row_bytes_),
                          place(chunk), static_cast<size_t>(bytes), static_cast<size_t>(bytes),
                          static_cast<size_t>(parts_), cudaMemcpyDeviceToDevice, copies),
        "copying rows");
  }

  void compute_own() {
    const int64_t first = group_.rank() * part_rows_;
    for (size_t weight = 0; weight < call_.gemms.size(); ++weight) {
      if (!call_.gemms[weight].fast) {
        call_.library_gemm(weight, call_.input, {first, first + part_rows_});
        continue;
      }
      kernels::GemmParams gemm = call_.gemms[weight].params;
      gemm.m = part_rows_;
      gemm.input = call_.input;
      gemm.output = static_cast<char*>(gemm.output) + first * gemm.output_stride * element_bytes_;
      gemm.order = launch_order(gemm.n, plan::tiles_m(plan_) / parts_, 1);
      launch(gemm);
    }
  }

  // The rows that the chunk brought from the peers.
  void compute(int chunk) {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t chunk_rows = rows.end - rows.begin;
    for (size_t weight = 0; weight < call_.gemms.size(); ++weight) {
      if (!call_.gemms[weight].fast) {
        for (int part = 0; part < parts_; ++part) {
          if (part == group_.rank()) continue;
          call_.library_gemm(weight, place(chunk) + part * chunk_rows * row_bytes_,
                             {part * part_rows_ + rows.begin, part * part_rows_ + rows.end});
        }
        continue;
      }
      const int64_t tile_rows = (chunk_rows + plan_.tile_m - 1) / plan_.tile_m;
      kernels::GemmParams gemm = call_.gemms[weight].params;
      gemm.m = parts_ * chunk_rows;
      gemm.input = place(chunk);
      gemm.rows.mode = plan::RowMap::Mode::kGather;
      gemm.rows.part_rows = static_cast<int32_t>(part_rows_);
      gemm.rows.chunk_rows = static_cast<int32_t>(chunk_rows);
      gemm.rows.first_row = static_cast<int32_t>(rows.begin / plan_.tile_m);
      gemm.rows.output_parts = parts_;
      gemm.rows.skip = group_.rank();
      gemm.order = launch_order(gemm.n, tile_rows, parts_ - 1);
      launch(gemm);
    }
  }

  void launch(const kernels::GemmParams& gemm) {
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  char* place(int chunk) const {
    return buffer_ + plan::chunk_extent(plan_, chunk).offset * element_bytes_;
  }

  const ConsumeCall& call_;
  const int chunks_;
  const int parts_;
  const int64_t part_rows_;
  const int64_t row_bytes_;
  char* buffer_ = nullptr;
};

}  // namespace

void run_consume(Group& group, const ConsumeCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  ConsumeLoop(group, call).run();
}

}  // namespace overlap::runtime
