// Rows that go to the ranks that own them, by NCCL. Each pair of ranks cuts its rows into pieces by their number, which
// both know; a rank computes and sends the first pieces for all peers, then the second ones, and so on; what is left
// for all peers goes last, together. Its own rows, which do not travel, are computed while that happens.
//
// Two ranks do not cut: each computes the other's rows on all SMs, as nothing is communicated yet, and its own beside
// the one exchange. A launch per piece would have an idle last round each.
//
// Where that gains nothing, as with few rows, it is the sequence: the framework's GEMM computes everything, and one
// exchange follows. Each of two ranks chooses for itself, as there is one exchange either way.
//
// On CPU all receives are posted first, so that no order of ranks can block, and each piece leaves as it is computed, the
// next rank's first.
#include "steps/lower/all_to_all.h"

#include "steps/lower/callers.h"

namespace overlap::steps {
namespace {

constexpr int64_t kMaxPieces = 4;  // of a pair, the last one included

class AllToAll : AllToAllSteps {
 public:
  explicit AllToAll(const RankCall& call)
      : AllToAllSteps(call),
        on_cpu_(on_cpu(machine_)),
        message_bytes_(on_cpu_ ? machine_.profile->cpu.message_bytes
                               : machine_.profile->all_to_all.message_bytes),
        cuts_(plan_.schedule == plan::Schedule::kOverlapped && (ranks_ > 2 || on_cpu_)),
        ctas_beside_(ctas_beside(plan_, machine_)) {}

  StepList lower() {
    int32_t rounds = 1;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      rounds = std::max({rounds, pieces(send_rows(peer)), pieces(receive_rows(peer))});
    }
    list_.made.chunks = rounds;
    list_.add_communicators(plan_);
    add_product();
    if (callers_) {
      communicate_beside_callers(rounds);
    } else if (on_cpu_) {
      lower_on_cpu();
    } else if (rounds > 1 || computes_apart()) {
      compute_beside(rounds);
    } else {
      begin_with_all();
      list_.hold(list_.add_of_chunk(0, Lane::kCaller, send_receive(0, true, true)));
    }
    return std::move(list_.made);
  }

 private:
  void lower_on_cpu() {
    list_.add(Lane::kCaller, Fork{2, false});
    SendReceive receives = no_messages();
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t from = rank_before(distance);
      for (int32_t number = 0; number < pieces(receive_rows(from)); ++number) {
        add_piece(receives.receives, from, output_of(from), receive_rows(from), number);
      }
    }
    list_.add(Lane::kSide1, std::move(receives));
    // One GEMM for few rows: several small ones take longer than their messages.
    const plan::Rows all = {0, rows_for(ranks_ - 1).end};
    const bool at_once =
        plan_.schedule == plan::Schedule::kSequential || all.end * row_bytes_ <= message_bytes_;
    if (at_once) compute(all, product_row(0), 0);
    int32_t sent = 0;
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t to = rank_after(distance);
      for (int32_t number = 0; number < pieces(send_rows(to)); ++number) {
        SendReceive piece = no_messages();
        add_piece(piece.sends, to, product_row(rows_for(to).begin), send_rows(to), number);
        if (!at_once) compute_piece(to, number);
        if (!piece.sends.empty()) send_beside(sent++, std::move(piece), false);
      }
    }
    list_.made.chunks = std::max(1, sent);
    at_once ? copy_own() : compute_own();
    list_.add(Lane::kCaller, Join{});
  }

  // The own rows go where they belong when everything is computed.
  void communicate_beside_callers(int32_t rounds) {
    CallersTiles tiles(plan_, list_);
    list_.made.counters = rounds + 1;
    list_.made.tiles.stores = Buffer::kProduct;
    std::vector<Claim> claims;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      for (int32_t round = 0; round < rounds; ++round) {
        const plan::Rows rows = piece(send_rows(peer), round).behind(rows_for(peer).begin);
        claims.push_back({rows, peer == rank_ ? rounds : round});
      }
    }
    tiles.assign(send_begin_.back(), claims, true);
    list_.add(Lane::kCaller, Fork{plan_.resources.lanes, false});
    list_.add(Lane::kCaller, CallersKernel{true, false});
    for (int32_t round = 0; round < rounds; ++round) {
      tiles.wait(Lane::kSide0, round);
      list_.add_of_chunk(round, Lane::kSide0, send_receive(round, round + 1 == rounds, false));
    }
    copy_own();
    list_.add(Lane::kCaller, Join{});
  }

  void copy_own() {
    const int64_t bytes = send_rows(rank_) * row_bytes_;
    if (bytes == 0) return;
    list_.add(Lane::kCaller, Copy{product_row(rows_for(rank_).begin), output_of(rank_), bytes});
  }

  void compute_beside(int32_t rounds) {
    list_.add(Lane::kCaller, Fork{plan_.resources.lanes, false});
    for (int32_t round = 0; round + 1 < rounds; ++round) {
      for (int32_t peer = 0; peer < ranks_; ++peer) {
        if (peer != rank_ && takes_part(send_rows(peer), round, false)) compute_piece(peer, round);
      }
      send_beside(round, send_receive(round, false, false), variant_.compute == Compute::kKernel);
    }
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) compute_piece(peer, pieces(send_rows(peer)) - 1);
    }
    send_beside(rounds - 1, send_receive(rounds - 1, true, false),
                variant_.compute == Compute::kKernel);
    compute_own();
    list_.add(Lane::kCaller, Join{});
  }

  // Both ranks of a pair come to the same number, whatever operands they have.
  int32_t pieces(int64_t rows) const {
    if (callers_) return variant_.pieces;
    if (!cuts_) return 1;
    return static_cast<int32_t>(
        std::clamp<int64_t>(rows * row_bytes_ / message_bytes_, 1, kMaxPieces));
  }

  plan::Rows piece(int64_t rows, int32_t number) const {
    const int32_t count = pieces(rows);
    if (callers_) return {rows * number / count, rows * (number + 1) / count};
    // Whole clusters of tiles, except for the last piece.
    const int64_t grain = on_cpu_ ? 1 : int64_t{plan_.tile_m} * plan_.cluster_m;
    const int64_t each = std::max<int64_t>(1, (rows / count + grain / 2) / grain) * grain;
    const int64_t begin = std::min(rows, each * number);
    return {begin, number + 1 == count ? rows : std::min(rows, each * (number + 1))};
  }

  // A pair's piece of this round, or its last one, if it takes part.
  bool takes_part(int64_t rows, int32_t round, bool last) const {
    return rows > 0 && (last || round + 1 < pieces(rows));
  }

  // For two ranks: true if the peer's rows are computed before this rank's own ones.
  bool computes_apart() const {
    if (ranks_ != 2) return false;
    if (variant_.compute ==
        Compute::kLibrary) {  // whether they are worth a GEMM of the framework's of their own
      return send_rows(1 - rank_) * row_bytes_ >= 2 * message_bytes_;
    }
    return steps::computes_apart(plan_, machine_, rank_, variant_.send_rows, variant_.receive_rows,
                                 ctas_beside_);
  }

  void compute_piece(int32_t peer, int32_t number) {
    const plan::Rows rows = piece(send_rows(peer), number).behind(rows_for(peer).begin);
    compute(rows, product_row(rows.begin), ranks_ == 2 ? machine_.sm_count : ctas_beside_);
  }

  void compute(plan::Rows rows, Where destination, int32_t ctas) {
    if (rows.count() == 0) return;
    if (variant_.compute == Compute::kKernel) {
      launch(rows, destination, ctas);
    } else {
      list_.add(Lane::kCaller, library_gemm(rows, destination));
    }
  }

  // `own`: the rows that stay as well, which NCCL moves beside the others.
  SendReceive send_receive(int32_t round, bool last, bool own) const {
    SendReceive messages = no_messages();
    if (own && send_rows(rank_) > 0) {
      const int64_t bytes = send_rows(rank_) * row_bytes_;
      messages.sends.push_back({rank_, product_row(rows_for(rank_).begin), bytes});
      messages.receives.push_back({rank_, output_of(rank_), bytes});
    }
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t to = rank_after(distance);
      const int32_t from = rank_before(distance);
      add(messages.sends, to, product_row(rows_for(to).begin), send_rows(to), round, last);
      add(messages.receives, from, output_of(from), receive_rows(from), round, last);
    }
    return messages;
  }

  // `first`: where the peer's rows begin.
  void add(std::vector<Message>& messages, int32_t peer, Where first, int64_t rows, int32_t round,
           bool last) const {
    if (takes_part(rows, round, last)) {
      add_piece(messages, peer, first, rows, last ? pieces(rows) - 1 : round);
    }
  }

  void add_piece(std::vector<Message>& messages, int32_t peer, Where first, int64_t rows,
                 int32_t number) const {
    const plan::Rows range = piece(rows, number);
    if (range.count() == 0) return;
    messages.push_back({peer, first.behind(range.begin * row_bytes_), range.count() * row_bytes_});
  }

  // The rows that stay, computed where they belong: of two ranks some after what is communicated, on all SMs.
  void compute_own() {
    const plan::Rows rows = rows_for(rank_);
    int64_t beside = rows.count();
    if (ranks_ == 2 && variant_.compute == Compute::kKernel) {
      beside = rows_beside_exchange(plan_, machine_, rank_, variant_.send_rows,
                                    variant_.receive_rows, ctas_beside_);
    }
    const Where output = output_of(rank_);
    compute({rows.begin, rows.begin + beside}, output, ctas_beside_);
    compute({rows.begin + beside, rows.end}, output.behind(beside * row_bytes_), machine_.sm_count);
  }

  const bool on_cpu_;
  const int64_t message_bytes_;  // of the shortest that are worth a call of their own
  const bool cuts_;              // a pair's rows into pieces
  const int32_t ctas_beside_;
};

}  // namespace

StepList lower_all_to_all(const RankCall& call) {
  return AllToAll(call).lower();
}

}  // namespace overlap::steps
