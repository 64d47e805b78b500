// Communication before computation.
#include <algorithm>
#include <vector>

#include "plan/gather_rounds.h"
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
    prepare_gemms();
    begin(call_.trace, chunks_);
    if (peers_ == nullptr) stage();
    // Over peers one lane sends, and one waits for what arrives, unless the GEMM does.
    if (peers_ != nullptr) lanes_ = ends_in_gemm() ? 1 : 2;
    fork(!carries());
    // The own rows' GEMM starts while the host enqueues the rest.
    if (awaits_) {
      launch_at_once();
    } else {
      compute(0);
    }
    if (peers_ != nullptr) wait_for_slots(side(0));
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (peers_ != nullptr) {
        push(chunk);
      } else {
        gather(chunk);
      }
    }
    for (int chunk = 0; chunk < chunks_ && !awaits_; ++chunk) {
      device_.communicated[chunk].block(stream_);
      if (trace_ != nullptr) trace_->ready[chunk]->record(stream_);
      compute(chunk + 1);
    }
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    if (!carries()) copy_gathered();
    join();
    if (peers_ != nullptr && !ends_in_gemm()) release_slot();
    end(chunks_);
  }

 private:
  void prepare() {
    if (plan::over_peers(plan_)) {
      prepare_peers(plan::peer_slot_bytes(plan_));
      buffer_ = peers_->slot(peer_call_, group_.rank());
      return;
    }
    prepare_communicators();
    buffer_ = static_cast<char*>(call_.buffer != nullptr ? call_.buffer : window());
  }

  // Own rows of the chunk into every peer's memory, by the copy engine.
  void push(int chunk) {
    const Range range(chunk);
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
    // Also to the own GEMM, which else could end the call before.
    const uint32_t self = 1u << group_.rank();
    signal_peers(Peers::Flag::kArrived, peers_->everyone_else() | self, chunk, send);
    if (lanes_ == 1) return;
    wait_peers(Peers::Flag::kArrived, peers_->everyone_else(), chunk, chunk, arrive);
    if (trace_ != nullptr) {
      trace_->finish[chunk]->record(arrive);
      if (awaits_) trace_->ready[chunk]->record(arrive);
    }
    device_.communicated[chunk].record(arrive);
  }

  char* gathered(int part, int64_t row) const {
    return static_cast<char*>(call_.gathered) + (part * part_rows_ + row) * row_bytes_;
  }

  // Own rows into the staging buffer, before anything else: copies within a device are kernels, which
  // take all SMs for a moment, but beside a GEMM those that it leaves, and keep the next launch waiting.
  void stage() {
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Rows rows = plan::chunk_rows(plan_, chunk);
      const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
      copy(place(chunk) + group_.rank() * bytes,
           static_cast<const char*>(call_.input) + rows.begin * row_bytes_, bytes, stream_);
    }
  }

  // Everybody's rows of the chunk into the staging buffer.
  void gather(int chunk) {
    const Range range(chunk);
    const cudaStream_t side = this->side(chunk);
    hold_side(chunk);
    if (trace_ != nullptr) trace_->begin[chunk]->record(side);
    communicators_[chunk]->all_gather_in_place(
        place(chunk), static_cast<size_t>(plan::chunk_extent(plan_, chunk).count),
        plan_.problem.dtype, side);
    if (trace_ != nullptr) trace_->finish[chunk]->record(side);
    device_.communicated[chunk].record(side);
  }

  // What has to be copied into the gathered input when the own rows are there (0), and behind chunk
  // `arrival` - 1: whole rows of each part.
  std::vector<kernels::CopyRun> runs(int arrival) const {
    if (arrival == 0) {
      return {{call_.input, gathered(group_.rank(), 0), part_rows_ * row_bytes_, 0}};
    }
    std::vector<kernels::CopyRun> runs;
    const plan::Rows rows = plan::chunk_rows(plan_, arrival - 1);
    const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
    for (int part = 0; part < parts_; ++part) {
      if (part == group_.rank()) continue;
      runs.push_back(
          {place(arrival - 1) + part * bytes, gathered(part, rows.begin), bytes, arrival});
    }
    return runs;
  }

  // Whether a GEMM does that ...
  bool carries() const { return awaits_ || carrier_ >= 0; }

  // ... and where none does.
  void copy_gathered() {
    for (int arrival = 0; arrival <= chunks_; ++arrival) {
      if (arrival > 0) device_.communicated[arrival - 1].block(device_.copy.get());
      for (const kernels::CopyRun& run : runs(arrival)) {
        copy(run.to, run.from, run.bytes, device_.copy.get());
      }
    }
  }

  // What is launched when the own rows are there (0), and behind chunk `arrival` - 1.
  void compute(int arrival) {
    for (size_t weight = 0; weight < call_.gemms.size(); ++weight) {
      if (call_.gemms[weight].fast) {
        launch(weight, arrival);
      } else if (arrival == 0) {
        const int64_t first = group_.rank() * part_rows_;
        call_.library_gemm(weight, call_.input, {first, first + part_rows_});
      } else {
        compute_library(weight, arrival - 1);
      }
    }
  }

  // The rows that the chunk brought from the peers.
  void compute_library(size_t weight, int chunk) {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
    for (int part = 0; part < parts_; ++part) {
      if (part == group_.rank()) continue;
      call_.library_gemm(weight, place(chunk) + part * bytes,
                         {part * part_rows_ + rows.begin, part * part_rows_ + rows.end});
    }
  }

  void launch(size_t weight, int arrival) {
    const plan::GatherLaunch& range = launches_[weight][static_cast<size_t>(arrival)];
    kernels::GemmParams& gemm = gemms_[weight];
    gemm.first_tile = range.first_tile;
    gemm.end_tile = range.end_tile;
    gemm.ctas = range.at_once;
    if (static_cast<int>(weight) == carrier_) {
      const std::vector<kernels::CopyRun> runs = this->runs(arrival);
      std::copy(runs.begin(), runs.end(), gemm.copies);
      gemm.num_copies = static_cast<int32_t>(runs.size());
    }
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // GEMMs that wait for rows themselves: all own rows' tiles first, those of the last weight in one launch
  // with the others' rows. The last launch ends the call.
  void launch_at_once() {
    const size_t last = gemms_.size() - 1;
    for (size_t weight = 0; weight < last; ++weight) {
      launch_tiles(weight, 0, gemms_[weight].order.chunk_begin[1], false);
    }
    kernels::GemmParams& carrier = gemms_[last];
    for (int arrival = 0; arrival <= chunks_; ++arrival) {
      for (const kernels::CopyRun& run : runs(arrival)) carrier.copies[carrier.num_copies++] = run;
    }
    launch_tiles(last, 0, carrier.order.num_tiles(), last == 0);
    for (size_t weight = 0; weight < last; ++weight) {
      const plan::TileOrder& order = gemms_[weight].order;
      launch_tiles(weight, order.chunk_begin[1], order.num_tiles(), weight + 1 == last);
    }
  }

  // While a timeline is recorded a kernel waits for what arrives, too, and the call ends behind it.
  bool ends_in_gemm() const { return awaits_ && trace_ == nullptr; }

  void launch_tiles(size_t weight, int32_t first_tile, int32_t end_tile, bool ends_call) {
    kernels::GemmParams& gemm = gemms_[weight];
    gemm.first_tile = first_tile;
    gemm.end_tile = end_tile;
    gemm.arrivals = with_deadline(
        peers_->wait_for(peer_call_, Peers::Flag::kArrived, peers_->everyone_else(), 0), 0);
    if (ends_call && ends_in_gemm()) {
      gemm.tiles_taken = peers_->tiles_taken(peer_call_);
      gemm.ending = peers_->ending(peer_call_);
    }
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // Each weight's GEMM over all rows, and what each launch takes of it.
  void prepare_gemms() {
    const int sms = device_.sm_count();
    awaits_ = plan::gathers_in_one_launch(plan_) &&
              std::all_of(call_.gemms.begin(), call_.gemms.end(),
                          [](const ConsumeCall::Gemm& gemm) { return gemm.fast; });
    for (const ConsumeCall::Gemm& gemm : call_.gemms) {
      gemms_.push_back(gemm.params);
      launches_.emplace_back();
      if (!gemm.fast) continue;
      // Something arrives before each launch, so none is empty.
      if (!awaits_ && carrier_ < 0 && kernels::copies_beside(plan_.kernel) &&
          parts_ - 1 <= plan::kMaxCopyRuns) {
        carrier_ = static_cast<int>(gemms_.size()) - 1;
      }
      kernels::GemmParams& params = gemms_.back();
      params.input = buffer_;
      params.own_input = call_.input;
      params.rows.mode = plan::RowMap::Mode::kGather;
      params.rows.part_rows = static_cast<int32_t>(part_rows_);
      params.rows.own_part = group_.rank();
      params.order = plan::gather_order(plan_, params.n);
      if (awaits_) continue;
      launches_.back() = plan::gather_launches(plan::gather_arrivals(plan_, params.order.tiles_n),
                                               plan_.cluster_m, params.ctas, sms);
    }
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
  bool awaits_ = false;  // the GEMMs wait for what arrives, one launch each
  int carrier_ = -1;     // else the weight whose GEMM copies rows into the gathered input, or none
  std::vector<kernels::GemmParams> gemms_;
  // Of each, unless it waits: own rows, then chunk by chunk.
  std::vector<std::vector<plan::GatherLaunch>> launches_;
};

}  // namespace

void run_consume(Group& group, const ConsumeCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  ConsumeLoop(group, call).run();
}

}  // namespace overlap::runtime
