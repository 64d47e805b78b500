// Rows that go to the ranks that own them, by NCCL. Each pair of ranks cuts its rows into pieces by
// their number, which both know; a rank computes and sends the first pieces for all peers, then the
// second ones, and so on; what is left for all peers goes last, together. Its own rows, which do not
// travel, are computed while that happens.
//
//   caller | fork | GEMM: pieces 0 | GEMM: pieces 1 | GEMM: rests | GEMM: own rows | join |
//   side   |      |                | exchange 0     | exchange 1  | exchange rests | ^
//
// Two ranks do not cut: each computes the other's rows on all SMs, as nothing is communicated yet, and
// its own beside the one exchange. A launch per piece would have an idle last round each.
//
//   caller | fork | GEMM: the peer's rows | GEMM: own rows | more of them, on all SMs | join |
//   side   |      |                       | exchange       |                          | ^
//
// Where that gains nothing, as with few rows, it is the sequence: the framework's GEMM computes everything,
// and one exchange follows. Each of two ranks chooses for itself, as there is one exchange either way.
#include <algorithm>

#include "plan/planner.h"
#include "runtime/executor_all_to_all.h"

namespace overlap::runtime {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;  // smaller messages do not fill the link
constexpr int kMaxPieces = 4;                      // of a pair, the last one included
// Two ranks' rows that are worth a GEMM of the framework's of their own.
constexpr int64_t kLibraryApartBytes = 2 * kPieceBytes;

class AllToAllLoop : AllToAllRows {
 public:
  AllToAllLoop(Group& group, const AllToAllCall& call) : AllToAllRows(group, call) {}

  void run() {
    prepare_communicators();
    int steps = 1;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      steps = std::max({steps, pieces(call_.send_rows[peer]), pieces(call_.receive_rows[peer])});
    }
    if (steps > 1 || computes_apart()) {
      compute_beside(steps);
    } else {
      in_turn();
    }
    end(steps);
  }

 private:
  void in_turn() {
    begin_with_all();
    if (trace_ != nullptr) {
      trace_->gemm_end.record(stream_);
      trace_->ready[0]->record(stream_);
    }
    hold(stream_);
    exchange(0, true, stream_, true);
  }

  void compute_beside(int steps) {
    product_ = static_cast<char*>(call_.product());
    begin(call_.trace, steps);
    fork(false);
    for (int step = 0; step + 1 < steps; ++step) {
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer != rank_ && takes_part(call_.send_rows[peer], step, false)) {
          compute_piece(peer, step);
        }
      }
      exchange_beside(step, false);
    }
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) compute_piece(peer, pieces(call_.send_rows[peer]) - 1);
    }
    exchange_beside(steps - 1, true);
    compute_own();
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    join();
  }

  // Both ranks of a pair come to the same number, whatever operands they have.
  int pieces(int64_t rows) const {
    if (ranks_ == 2) return 1;
    return static_cast<int>(std::clamp<int64_t>(rows * row_bytes_ / kPieceBytes, 1, kMaxPieces));
  }

  plan::Rows piece(int64_t rows, int index) const {
    const int count = pieces(rows);
    // Whole clusters of tiles, but for the last piece.
    const int64_t grain = int64_t{plan_.tile_m} * plan_.cluster_m;
    const int64_t each = std::max<int64_t>(1, (rows / count + grain / 2) / grain) * grain;
    const int64_t begin = std::min(rows, each * index);
    return {begin, index + 1 == count ? rows : std::min(rows, each * (index + 1))};
  }

  // A pair's piece `step`, or its last one, if it takes part in this step.
  bool takes_part(int64_t rows, int step, bool last) const {
    return rows > 0 && (last || step + 1 < pieces(rows));
  }

  // Of two ranks: whether the peer's rows are computed before the own ones.
  bool computes_apart() const {
    if (ranks_ != 2) return false;
    if (!call_.fast) return call_.send_rows[1 - rank_] * row_bytes_ >= kLibraryApartBytes;
    return plan::computes_apart(plan_, group_.machine(), rank_, call_.send_rows, call_.receive_rows,
                                call_.gemm.ctas);
  }

  void compute_piece(int peer, int index) {
    const plan::Rows range = piece(call_.send_rows[peer], index);
    const int64_t begin = send_begin_[peer] + range.begin;
    compute({begin, send_begin_[peer] + range.end}, product_row(begin),
            ranks_ == 2 ? device_.sm_count() : call_.gemm.ctas);
  }

  void compute(plan::Rows rows, void* destination, int ctas) {
    if (rows.begin == rows.end) return;
    if (!call_.fast) {
      call_.library_gemm(rows, destination);
      return;
    }
    launch(rows, destination, ctas);
  }

  // Sends on the side stream what has been computed on the caller's so far.
  void exchange_beside(int step, bool last) {
    const cudaStream_t side = device_.side[0].get();
    device_.produced[step].record(stream_);
    hold_side(0);
    device_.produced[step].block(side);
    if (call_.fast) let_gemm_start(side);
    if (trace_ != nullptr) trace_->ready[step]->record(stream_);
    exchange(step, last, side, false);
  }

  // `own`: the rows that stay as well, which NCCL moves beside the others.
  void exchange(int step, bool last, cudaStream_t stream, bool own) {
    const Range range(step);
    std::vector<Communicator::Message> sends;
    std::vector<Communicator::Message> receives;
    if (const plan::Rows rows = rows_for(rank_); own && rows.begin < rows.end) {
      const auto bytes = static_cast<size_t>((rows.end - rows.begin) * row_bytes_);
      sends.push_back({rank_, product_row(rows.begin), bytes});
      receives.push_back({rank_, output_row(receive_begin_[rank_]), bytes});
    }
    for (int distance = 1; distance < ranks_; ++distance) {
      const int to = (rank_ + distance) % ranks_;
      const int from = (rank_ + ranks_ - distance) % ranks_;
      add(sends, to, product_row(send_begin_[to]), call_.send_rows[to], step, last);
      add(receives, from, output_row(receive_begin_[from]), call_.receive_rows[from], step, last);
    }
    if (trace_ != nullptr) trace_->begin[step]->record(stream);
    if (!sends.empty() || !receives.empty()) communicators_[0]->exchange(sends, receives, stream);
    if (trace_ != nullptr) trace_->finish[step]->record(stream);
  }

  // `first`: where the peer's rows begin.
  void add(std::vector<Communicator::Message>& messages, int peer, char* first, int64_t rows,
           int step, bool last) const {
    if (!takes_part(rows, step, last)) return;
    const plan::Rows range = piece(rows, last ? pieces(rows) - 1 : step);
    if (range.begin == range.end) return;
    messages.push_back({peer, first + range.begin * row_bytes_,
                        static_cast<size_t>((range.end - range.begin) * row_bytes_)});
  }

  // Those that are computed while rows are exchanged; of two ranks the others come behind that, on all SMs.
  int64_t own_rows_beside(int64_t rows) const {
    if (ranks_ != 2 || !call_.fast) return rows;
    return plan::rows_beside_exchange(plan_, group_.machine(), rank_, call_.send_rows,
                                      call_.receive_rows, call_.gemm.ctas);
  }

  // The rows that stay, computed where they belong.
  void compute_own() {
    const plan::Rows rows = rows_for(rank_);
    const int64_t beside = own_rows_beside(rows.end - rows.begin);
    compute({rows.begin, rows.begin + beside}, output_row(receive_begin_[rank_]), call_.gemm.ctas);
    compute({rows.begin + beside, rows.end}, output_row(receive_begin_[rank_] + beside),
            device_.sm_count());
  }
};

}  // namespace

void run_all_to_all(Group& group, const AllToAllCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  AllToAllLoop(group, call).run();
}

}  // namespace overlap::runtime
