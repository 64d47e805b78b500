// Rows that go to the ranks that own them, over memory that the ranks map into each other: the GEMM
// stores them there, or, where the framework computes or there are few, the kernel that moves them into
// the outputs.
//
//   caller | GEMM: rows of peer 1, 2 ... -> their slots | GEMM: own rows | signal, wait [B], copy |
//
// How rows are computed and stored is each rank's own choice: the peers see no difference.
#include <algorithm>
#include <bit>

#include "kernels/peer_exchange.h"
#include "plan/planner.h"
#include "runtime/executor_all_to_all.h"

namespace overlap::runtime {
namespace {

constexpr int64_t kAlignment = 128;  // of messages in slots

class ExchangeLoop : AllToAllRows {
 public:
  ExchangeLoop(Group& group, const AllToAllCall& call)
      : AllToAllRows(group, call), message_bytes_(message_room()) {}

  void run() {
    const bool calls_nccl = any_too_long();
    if (calls_nccl || ranks_ > 2) prepare_communicators();  // collective
    prepare_peers(ranks_ * message_bytes_);
    const bool stores =
        call_.fast && plan::stores_messages(plan_, group_.machine(), rank_, call_.send_rows);
    if (stores) {
      begin(call_.trace, 1);
    } else {
      begin_with_all();
    }
    if (calls_nccl) fork(false);
    if (stores) {
      wait_for_slots(stream_);
      compute_and_send();
    }
    if (trace_ != nullptr) {
      trace_->ready[0]->record(stream_);
      trace_->begin[0]->record(stream_);
    }
    if (calls_nccl) exchange_long_ones(stores);
    if (stores) compute_own(calls_nccl);
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    if (calls_nccl) join();
    hold(stream_);
    exchange(!stores);
    if (trace_ != nullptr) trace_->finish[0]->record(stream_);
    end(1);
  }

 private:
  // Room for the message of each rank in everybody's slot, the same on all ranks. Two ranks know all
  // messages; of more, no pair knows those of another, but what the ranks have told each other. Longer ones
  // travel by NCCL.
  int64_t message_room() const {
    constexpr int64_t kMostOfSlot = int64_t{1} << 30;
    constexpr int64_t kLeastOfMany = int64_t{1} << 25;
    int64_t rows = 0;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      rows = std::max({rows, call_.send_rows[peer], call_.receive_rows[peer]});
    }
    const int64_t most = kMostOfSlot / ranks_ / kAlignment * kAlignment;
    const int64_t bytes = (rows * row_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    if (ranks_ == 2) return std::min(bytes, most);
    // With some to spare: numbers of rows change from call to call.
    const auto longest = static_cast<uint64_t>(group_.longest_message(bytes, capture_.has_value()));
    return std::clamp(static_cast<int64_t>(std::bit_ceil(longest)), kLeastOfMany, most);
  }

  bool too_long(int64_t rows) const { return rows * row_bytes_ > message_bytes_; }

  bool any_too_long() const {
    bool any = false;
    for (int peer = 0; peer < ranks_; ++peer) {
      any = any || (peer != rank_ &&
                    (too_long(call_.send_rows[peer]) || too_long(call_.receive_rows[peer])));
    }
    return any;
  }

  // The place of rank `from`'s message in rank `to`'s slot.
  char* place(int to, int from) const {
    return peers_->slot(peer_call_, to) + from * message_bytes_;
  }

  void compute_and_send() {
    for (int distance = 1; distance < ranks_; ++distance) {
      const int peer = (rank_ + distance) % ranks_;
      char* destination = place(peer, rank_);
      if (too_long(call_.send_rows[peer])) {
        if (product_ == nullptr) product_ = static_cast<char*>(call_.product());
        destination = product_row(send_begin_[peer]);
      }
      compute(peer, destination, device_.sm_count());
    }
  }

  // Beside NCCL on the SMs that the plan leaves.
  void compute_own(bool beside) {
    compute(rank_, output_row(receive_begin_[rank_]),
            beside ? call_.gemm.ctas : device_.sm_count());
  }

  void compute(int peer, char* destination, int ctas) {
    if (call_.send_rows[peer] > 0) launch(rows_for(peer), destination, ctas);
  }

  void exchange_long_ones(bool beside_gemm) {
    const cudaStream_t side = device_.side[0].get();
    std::vector<Communicator::Message> sends;
    std::vector<Communicator::Message> receives;
    for (int distance = 1; distance < ranks_; ++distance) {
      const int to = (rank_ + distance) % ranks_;
      const int from = (rank_ + ranks_ - distance) % ranks_;
      if (too_long(call_.send_rows[to])) {
        sends.push_back({to, product_row(send_begin_[to]),
                         static_cast<size_t>(call_.send_rows[to] * row_bytes_)});
      }
      if (too_long(call_.receive_rows[from])) {
        receives.push_back({from, output_row(receive_begin_[from]),
                            static_cast<size_t>(call_.receive_rows[from] * row_bytes_)});
      }
    }
    device_.produced[0].record(stream_);
    hold_side(0);
    device_.produced[0].block(side);
    if (beside_gemm) let_gemm_start(side);
    communicators_[0]->exchange(sends, receives, side);
  }

  // Messages into their places; before that, unless they have been stored there, into the slots.
  void exchange(bool sends) {
    kernels::PeerExchangeParams params{meeting()};
    params.sends = sends;
    for (int rank = 0; rank < ranks_; ++rank) {
      const bool own = rank == rank_;
      if (sends && (own || !too_long(call_.send_rows[rank]))) {
        params.send[rank] = product_row(send_begin_[rank]);
        params.send_count[rank] = accesses(call_.send_rows[rank]);
      }
      params.output[rank] = output_row(receive_begin_[rank]);
      if (own) continue;
      params.destination[rank] = place(rank, rank_);
      params.received[rank] = place(rank_, rank);
      const int64_t rows = call_.receive_rows[rank];
      if (!too_long(rows)) params.receive_count[rank] = accesses(rows);
    }
    check_cuda(kernels::peer_exchange(params, stream_), "launching an exchange");
  }

  int64_t accesses(int64_t rows) const { return rows * row_bytes_ / kernels::kPeerAccessBytes; }

  const int64_t message_bytes_;  // at most, over peers
};

}  // namespace

void run_exchange(Group& group, const AllToAllCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  ExchangeLoop(group, call).run();
}

}  // namespace overlap::runtime
