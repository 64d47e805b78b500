// Rows that go to the ranks that own them, over peers: the GEMM stores them there, or, where the framework computes or
// there are few, the kernel that moves them into the outputs. Messages that are too long for a slot go by NCCL. In one
// launch, where the plan wants that, the GEMM takes the peers' rows first, announces each message with its last tile,
// and copies what has come. How rows are computed and stored is each rank's own choice: the peers see no difference.
#include <bit>

#include "steps/lower/all_to_all.h"

namespace overlap::steps {
namespace {

constexpr int64_t kAlignment = 128;  // of messages in slots

// Room for the message of each rank in everybody's slot, the same on all ranks. Two ranks know all messages; of more,
// no pair knows those of another, but what the ranks have told each other.
int64_t message_room(const RankCall& call) {
  constexpr int64_t kMostOfSlot = int64_t{1} << 30;
  constexpr int64_t kLeastOfMany = int64_t{1} << 25;
  const int32_t ranks = call.plan.problem.world_size;
  const int64_t most = kMostOfSlot / ranks / kAlignment * kAlignment;
  const Variant& variant = call.variant;
  if (ranks == 2) {
    return std::min(most,
                    longest_message(call.plan, call.rank, variant.send_rows, variant.receive_rows));
  }
  // With some to spare: numbers of rows change from call to call.
  const auto longest = static_cast<uint64_t>(variant.longest_message);
  return std::clamp(static_cast<int64_t>(std::bit_ceil(longest)), kLeastOfMany, most);
}

class Exchange : AllToAllSteps {
 public:
  explicit Exchange(const RankCall& call)
      : AllToAllSteps(call),
        message_bytes_(message_room(call)),
        calls_nccl_(any_too_long()),
        stores_(variant_.compute == Compute::kKernel &&
                stores_messages(plan_, machine_, rank_, variant_.send_rows)),
        one_launch_(stores_ && plan_.resources.one_launch && !calls_nccl_ &&
                    send_begin_.back() > 0) {}

  StepList lower() {
    if (calls_nccl_ || ranks_ > 2) list_.add_communicators(plan_);
    list_.add_slot(ranks_ * message_bytes_);
    if (!stores_ || calls_nccl_) add_product();
    if (!stores_) begin_with_all();
    if (one_launch_) {
      list_.add(Lane::kCaller, WaitForSlots{});
      compute_and_meet();
      return std::move(list_.made);
    }
    if (calls_nccl_) list_.add(Lane::kCaller, Fork{plan_.resources.lanes, false});
    if (stores_) {
      list_.add(Lane::kCaller, WaitForSlots{});
      compute_and_send();
    }
    if (calls_nccl_) send_beside(0, long_messages(), stores_);
    if (stores_) {
      // Beside NCCL on the SMs that the plan leaves.
      compute(rank_, output_of(rank_),
              calls_nccl_ ? ctas_beside(plan_, machine_) : machine_.sm_count);
    }
    if (calls_nccl_) list_.add(Lane::kCaller, Join{});
    exchange();
    return std::move(list_.made);
  }

 private:
  bool too_long(int64_t rows) const { return rows * row_bytes_ > message_bytes_; }

  bool any_too_long() const {
    bool any = false;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      any = any || (peer != rank_ && (too_long(send_rows(peer)) || too_long(receive_rows(peer))));
    }
    return any;
  }

  // The place of rank `from`'s message in rank `to`'s slot.
  Where place(int32_t to, int32_t from) const { return {Buffer::kSlot, from * message_bytes_, to}; }

  void compute_and_send() {
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t peer = rank_after(distance);
      const bool by_nccl = too_long(send_rows(peer));
      compute(peer, by_nccl ? product_row(rows_for(peer).begin) : place(peer, rank_),
              machine_.sm_count);
    }
  }

  // All rows in one launch: those of the next rank first, this rank's own ones last.
  void compute_and_meet() {
    Gemm gemm;
    gemm.rows = {0, send_begin_.back()};
    gemm.input = {Buffer::kInput};
    gemm.map.mode = plan::RowMap::Mode::kRanges;
    gemm.map.first_part = rank_after(1);
    std::vector<int32_t> heights;
    for (int32_t distance = 1; distance <= ranks_; ++distance) {
      heights.push_back(tile_rows(send_rows(rank_after(distance))));
    }
    plan::TileOrder order = plan::chunked_order(plan_, plan_.problem.n, heights);
    order.parts = ranks_;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      gemm.map.range_begin[peer] = static_cast<int32_t>(rows_for(peer).begin);
      gemm.outputs.push_back({peer == rank_ ? output_of(rank_) : place(peer, rank_)});
    }
    gemm.order = list_.add_order(order);
    gemm.end_tile = order.num_tiles();
    gemm.ctas = machine_.sm_count;
    gemm.spread_ns = spread_ns(plan_, machine_);
    gemm.sends_messages = true;
    gemm.ends_call = true;
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t from = rank_before(distance);
      if (receive_rows(from) == 0) continue;
      gemm.moves.push_back(
          {place(rank_, from), output_of(from), receive_rows(from) * row_bytes_, from});
    }
    list_.made.counters = ranks_;  // of tiles for each of them
    list_.hold(list_.add_of_chunk(0, Lane::kCaller, gemm));
  }

  void compute(int32_t peer, Where destination, int32_t ctas) {
    if (send_rows(peer) > 0) launch(rows_for(peer), destination, ctas);
  }

  SendReceive long_messages() const {
    SendReceive messages = no_messages();
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t to = rank_after(distance);
      const int32_t from = rank_before(distance);
      if (too_long(send_rows(to))) {
        messages.sends.push_back({to, product_row(rows_for(to).begin), send_rows(to) * row_bytes_});
      }
      if (too_long(receive_rows(from))) {
        messages.receives.push_back({from, output_of(from), receive_rows(from) * row_bytes_});
      }
    }
    return messages;
  }

  // Messages into their places; before that, unless they have been stored there, into the slots.
  void exchange() {
    PeerExchange step;
    step.sends = !stores_;
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const bool own = rank == rank_;
      PeerMessages messages;
      if (step.sends && (own || !too_long(send_rows(rank)))) {
        messages.send = product_row(rows_for(rank).begin);
        messages.send_bytes = send_rows(rank) * row_bytes_;
      }
      messages.output = output_of(rank);
      if (!own) {
        messages.destination = place(rank, rank_);
        messages.received = place(rank_, rank);
        if (!too_long(receive_rows(rank))) {
          messages.receive_bytes = receive_rows(rank) * row_bytes_;
        }
      }
      step.messages.push_back(messages);
    }
    list_.hold(list_.add_of_chunk(0, Lane::kCaller, step));
  }

  const int64_t message_bytes_;  // at most, over peers
  const bool calls_nccl_;
  const bool stores_;
  const bool one_launch_;
};

}  // namespace

int64_t longest_message(const plan::Plan& plan, int32_t rank, const std::vector<int64_t>& send_rows,
                        const std::vector<int64_t>& receive_rows) {
  int64_t rows = 0;
  for (size_t peer = 0; peer < send_rows.size(); ++peer) {
    if (peer != static_cast<size_t>(rank)) {
      rows = std::max({rows, send_rows[peer], receive_rows[peer]});
    }
  }
  const int64_t bytes = rows * plan.problem.n * plan::moved_bytes(plan.problem);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

StepList lower_all_to_all_over_peers(const RankCall& call) {
  return Exchange(call).lower();
}

}  // namespace overlap::steps
