// Reductions in one step: every rank's partial sums go straight to the ranks that add them up, from
// the GEMM's epilogue or, where the framework computes, from the kernel that adds.
#include <algorithm>

#include "kernels/peer_collective.h"
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {
namespace {

class DirectLoop : ExecutorLoop {
 public:
  DirectLoop(Group& group, const ProduceCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us),
        call_(call),
        ranks_(group.world_size()),
        rank_(group.rank()),
        all_reduces_(plan_.problem.op == plan::Op::kGemmAllReduce),
        sequential_(plan_.schedule == plan::Schedule::kSequential),
        pieces_(plan::direct_in_pieces(plan_)),
        bytes_(plan_.problem.m * plan_.problem.n * element_bytes_),
        piece_bytes_(plan::direct_piece_bytes(plan_)) {}

  void run() {
    const bool low_latency = sequential_ && all_reduces_ &&
                             low_latency_sent(low_latency_pieces()) <= Peers::kLowLatencyBytes;
    prepare_peers(plan::peer_slot_bytes(plan_), true, !low_latency);
    // The framework's GEMM waits for no peer: it need not be chained, and starts while the host does
    // the rest.
    if (!call_.signals) product_ = static_cast<char*>(call_.library_product());
    begin(call_.trace, 1);
    if (!sequential_) {
      wait_for_slots(stream_);
      if (call_.signals) {
        compute_and_send();
      } else {
        send();
      }
    }
    if (trace_ != nullptr) {
      trace_->gemm_end.record(stream_);
      trace_->ready[0]->record(stream_);
      trace_->begin[0]->record(stream_);
    }
    hold(stream_);
    if (low_latency) {
      all_reduce_low_latency();
    } else {
      reduce();
    }
    if (trace_ != nullptr) trace_->finish[0]->record(stream_);
    end(1);
  }

 private:
  // The place of rank `from`'s partial sums in rank `to`'s slot.
  char* place(int to, int from) const { return peers_->slot(peer_call_, to) + from * piece_bytes_; }

  // Rank `part`'s sums in everybody's slot.
  char* final_place(int to, int part) const {
    return peers_->slot(peer_call_, to) + (ranks_ + part) * piece_bytes_;
  }

  // Of an all-reduce, the framework's GEMM makes the output.
  char* output() const {
    return static_cast<char*>(call_.output != nullptr ? call_.output : product_);
  }

  // This rank's piece of the output.
  char* own_output() const { return output() + (all_reduces_ ? piece_offset(rank_) : 0); }

  int64_t accesses(int rank) const {
    const int64_t begin = pieces_ ? std::min(rank * piece_bytes_, bytes_) : 0;
    const int64_t end = std::min(begin + piece_bytes_, bytes_);
    return (end - begin) / kernels::kPeerAccessBytes;
  }

  void compute_and_send() {
    kernels::GemmParams gemm = call_.gemm;
    gemm.order = *call_.order;
    gemm.tiles_taken = peers_->tiles_taken(peer_call_);
    gemm.spread_ns = spread_ns();
    if (!pieces_) {
      gemm.output = output();
      gemm.mirrors[gemm.num_mirrors++] = place(1 - rank_, rank_);
      check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
      return;
    }
    gemm.num_more_outputs = ranks_ - 1;
    gemm.rows.mode = plan::RowMap::Mode::kSplit;
    gemm.rows.part_tile_rows = plan::tiles_m(plan_) / ranks_;
    gemm.rows.part_rows = static_cast<int32_t>(plan::part_rows(plan_));
    gemm.rows.first_part = (rank_ + 1) % ranks_;  // the own part last
    for (int part = 0; part < ranks_; ++part) {
      void* output = part == rank_ ? own_output() : place(part, rank_);
      (part == 0 ? gemm.output : gemm.more_outputs[part - 1]) = output;
    }
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // What the framework computed, as the GEMM's epilogue would have sent it.
  void send() {
    for (int distance = 1; distance < ranks_; ++distance) {
      const int peer = (rank_ + distance) % ranks_;
      copy(place(peer, rank_), product_ + piece_offset(peer),
           accesses(peer) * kernels::kPeerAccessBytes, stream_);
    }
  }

  int64_t piece_offset(int rank) const { return pieces_ ? rank * piece_bytes_ : 0; }

  void reduce() {
    kernels::PeerCollectiveParams params = collective();
    params.reduces = true;
    params.gathers = all_reduces_ && pieces_;
    params.stride = piece_bytes_ / kernels::kPeerAccessBytes;
    params.row_count = plan_.problem.n * element_bytes_ / kernels::kPeerAccessBytes;
    params.first = params.gathers ? rank_ * params.stride : 0;
    params.own = product_ == nullptr ? own_output() : product_ + piece_offset(rank_);
    params.output = output();
    params.bias = call_.bias;
    for (int rank = 0; rank < ranks_; ++rank) {
      params.count[rank] = accesses(rank);
      params.received[rank] = place(rank_, rank);
      if (params.gathers) {
        params.final_destination[rank] = final_place(rank, rank_);
        params.final_received[rank] = final_place(rank_, rank);
      }
      if (rank == rank_ || !sequential_) continue;
      params.send[rank] = product_ + piece_offset(rank);
      params.destination[rank] = place(rank, rank_);
    }
    check_cuda(kernels::peer_collective(params, stream_), "launching a reduction");
  }

  int64_t low_latency_sent(bool in_pieces) const {
    return (ranks_ - 1) * kernels::low_latency_message(bytes_, ranks_, in_pieces);
  }

  // Sums that are sent on come a step later; between two ranks nothing is saved.
  bool low_latency_pieces() const {
    constexpr int64_t kOneStepBytes = int64_t{5} << 18;
    return ranks_ > 2 && low_latency_sent(false) > kOneStepBytes;
  }

  void all_reduce_low_latency() {
    constexpr int64_t kWord = 4;
    kernels::PeerLowLatencyParams params = peers_->low_latency(plan::communication_hash(plan_));
    params.dtype = plan_.problem.dtype;
    params.in_pieces = low_latency_pieces();
    params.words = bytes_ / kWord;
    params.own = product_;
    params.output = output();
    params.bias = call_.bias;
    params.row_words = plan_.problem.n * element_bytes_ / kWord;
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    check_cuda(kernels::peer_all_reduce_low_latency(params, stream_), "launching an all-reduce");
  }

  const ProduceCall& call_;
  const int ranks_;
  const int rank_;
  const bool all_reduces_;
  const bool sequential_;  // the kernel that adds sends, too
  const bool pieces_;      // each rank adds up one piece, not all
  const int64_t bytes_;
  const int64_t piece_bytes_;
  char* product_ = nullptr;  // partial sums of everything, where the framework computes them
};

}  // namespace

void run_direct(Group& group, const ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  DirectLoop(group, call).run();
}

}  // namespace overlap::runtime
