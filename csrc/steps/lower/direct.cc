// Reductions over peers in one step, for few rows: partial sums go straight to the ranks that add them up, from the
// GEMM's stores or, where the framework computes, from the kernel that adds.
#include "plan/low_latency.h"
#include "steps/lower/callers.h"
#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

class Direct : Family {
 public:
  explicit Direct(const RankCall& call)
      : Family(call),
        sequential_(plan_.schedule == plan::Schedule::kSequential),
        by_kernel_(!sequential_ && variant_.compute == Compute::kKernel),
        pieces_(plan::direct_in_pieces(plan_)),
        bytes_(plan_.problem.m * row_bytes_),
        piece_bytes_(plan::direct_piece_bytes(plan_)) {}

  StepList lower() {
    const bool in_pieces =
        ranks_ > 2 && low_latency_sent(false) > machine_.profile->peer.one_step_bytes;
    const bool low_latency =
        sequential_ && all_reduces_ && low_latency_sent(in_pieces) <= plan::kLowLatencyBytes;
    list_.add_slot(plan::peer_slot_bytes(plan_));
    list_.made.takes_slot = !low_latency;
    if (!by_kernel_) compute_product();
    if (!sequential_) {
      list_.add(Lane::kCaller, WaitForSlots{});
      if (by_kernel_) {
        compute_and_send();
      } else {
        send();
      }
    }
    list_.communicates = 0;
    if (low_latency) {
      list_.add_held(
          Lane::kCaller,
          LowLatency{
              in_pieces, variant_.bias, bytes_, {Buffer::kProduct}, output(), variant_.finish});
      list_.made.finishes = variant_.finish;
    } else {
      reduce();
    }
    return std::move(list_.made);
  }

 private:
  // The place of rank `from`'s partial sums in rank `to`'s slot.
  Where place(int32_t to, int32_t from) const { return {Buffer::kSlot, from * piece_bytes_, to}; }

  // Rank `part`'s sums in everybody's slot.
  Where final_place(int32_t to, int32_t part) const {
    return {Buffer::kSlot, (ranks_ + part) * piece_bytes_, to};
  }

  int64_t piece_offset(int32_t rank) const { return pieces_ ? rank * piece_bytes_ : 0; }
  Where product(int32_t rank) const { return {Buffer::kProduct, piece_offset(rank)}; }

  // The product of an all-reduce by the framework's GEMM and one kernel becomes the output.
  Where output() const {
    const bool in_place = sequential_ && all_reduces_ && !variant_.finish;
    return {in_place ? Buffer::kProduct : Buffer::kOutput};
  }
  Where own_output() const {
    Where where = output();
    if (all_reduces_) where.offset = piece_offset(rank_);
    return where;
  }

  // The bytes that rank `rank` adds up, in whole accesses.
  int64_t bytes_of(int32_t rank) const {
    const int64_t begin = std::min(piece_offset(rank), bytes_);
    const int64_t bytes = std::min(begin + piece_bytes_, bytes_) - begin;
    return bytes / kPeerAccessBytes * kPeerAccessBytes;
  }

  void compute_product() {
    list_.add_scratch(Buffer::kProduct, bytes_);
    const int64_t rows = plan_.problem.m;
    if (callers_) {
      add_callers_kernel(plan_, rows, list_);
      list_.made.tiles.stores = Buffer::kProduct;
      list_.made.tiles.result = output().buffer;
      return;
    }
    // Neither GEMM waits for a peer.
    if (variant_.compute == Compute::kKernel) {
      Gemm gemm = gemm_of_all(plan::tile_order(plan_));
      gemm.outputs = {{{Buffer::kProduct}}};
      list_.add_unchained(Lane::kCaller, gemm);
      return;
    }
    list_.add_unchained(Lane::kCaller, library_gemm({0, rows}, {Buffer::kProduct}));
  }

  void compute_and_send() {
    Gemm gemm = gemm_of_all(plan::tile_order(plan_));
    gemm.spread_ns = spread_ns(plan_, machine_);
    if (!pieces_) {
      gemm.outputs = {{output()}};
      gemm.mirrors = {place(1 - rank_, rank_)};
    } else {
      gemm.map.mode = plan::RowMap::Mode::kSplit;
      gemm.map.part_tile_rows = plan::tiles_m(plan_) / ranks_;
      gemm.map.part_rows = static_cast<int32_t>(plan::part_rows(plan_));
      gemm.map.first_part = rank_after(1);  // this rank's own part last
      for (int32_t part = 0; part < ranks_; ++part) {
        gemm.outputs.push_back({part == rank_ ? own_output() : place(part, rank_)});
      }
    }
    list_.add(Lane::kCaller, gemm);
  }

  // Sends the framework's product, as the kernel would have stored it.
  void send() {
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t peer = rank_after(distance);
      list_.add(Lane::kCaller, Copy{product(peer), place(peer, rank_), bytes_of(peer)});
    }
  }

  void reduce() {
    PeerCollective reduce;
    reduce.reduces = true;
    reduce.gathers = all_reduces_ && pieces_;
    reduce.bias = variant_.bias;
    reduce.stride = piece_bytes_;
    reduce.first = reduce.gathers ? rank_ * piece_bytes_ : 0;
    reduce.own = by_kernel_ ? own_output() : product(rank_);
    reduce.output = output();
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      Piece piece;
      piece.bytes = bytes_of(rank);
      piece.received = place(rank_, rank);
      if (reduce.gathers) {
        piece.final_destination = final_place(rank, rank_);
        piece.final_received = final_place(rank_, rank);
      }
      if (rank != rank_ && sequential_) {
        piece.send = product(rank);
        piece.destination = place(rank, rank_);
      }
      reduce.pieces.push_back(piece);
    }
    list_.add_held(Lane::kCaller, reduce);
  }

  // Bytes of data that a rank sends, or its terms of the peers' pieces and the sums of its own. Whole runs make a message,
  // or each row that is finished.
  int64_t low_latency_sent(bool in_pieces) const {
    const int64_t parts = variant_.finish ? plan_.problem.m : plan::low_latency_runs(bytes_);
    const int64_t part_runs = variant_.finish ? plan::low_latency_runs(bytes_ / parts) : 1;
    const int64_t sent = in_pieces ? 2 * ((parts + ranks_ - 1) / ranks_) : parts;
    return (ranks_ - 1) * sent * part_runs * plan::kRunBytes;
  }

  const bool sequential_;  // the kernel that adds sends, too
  const bool by_kernel_;   // the plan's computes and stores where the sums are added
  const bool pieces_;      // each rank adds up one piece, not all
  const int64_t bytes_;
  const int64_t piece_bytes_;
};

}  // namespace

StepList lower_direct(const RankCall& call) {
  return Direct(call).lower();
}

}  // namespace overlap::steps
