// Reductions by the framework's GEMM whose own stores travel: of each chunk it computes the peers' rows first, into their
// slots, and this rank's rows last, into its own. The owner of rows adds up the ranks' terms beside the next chunk, and
// an all-reduce's sums go to all ranks by copy engines.
//
//   caller | fork | rows of the peers | own rows | rows of the peers | own rows | ...        | join | end
//   side 0 |      |                   | signal 0 |                   | signal 1 | signal sums 0
//   side 1 |                                     | wait 0 | add 0 |
//   side 2 |                                                      | sums 0 to the peers |
//   copy   |                                                                            | wait | sums 0 of the peers
//
// Over gloo the peers' rows stay in the product, and messages take the place of slots and signals.
//
// A kernel of the caller's is one launch, of one chunk. Its product is a matrix whose parts lie in their owners' memory.
#include <stdexcept>
#include <string>

#include "steps/lower/callers.h"
#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

class Stripes {
 public:
  Stripes(const plan::Plan& plan, int32_t rank, const Variant& variant)
      : plan_(plan),
        rank_(rank),
        variant_(variant),
        ranks_(plan.problem.world_size),
        chunks_(static_cast<int32_t>(plan.chunks.size())),
        all_reduces_(plan.problem.traits().all_reduces()),
        peers_(plan::over_peers(plan)),
        callers_(variant.compute == Compute::kCallers),
        row_bytes_(plan.problem.n * plan::moved_bytes(plan.problem)) {}

  StepList lower() {
    if (callers_) check_callers();
    list_.made.chunks = chunks_;
    if (peers_) {
      // A caller's terms lie in stripes.
      list_.add_slot(callers_ && !all_reduces_ ? 0 : plan::peer_slot_bytes(plan_));
      list_.add(Lane::kCaller, WaitForSlots{});
    } else {
      list_.add_communicators(plan_);
      list_.add_scratch(Buffer::kProduct, plan_.problem.m * row_bytes_);
      list_.add_scratch(Buffer::kStaging, ranks_ * plan::stripe_bytes(plan_));
    }
    list_.add(Lane::kCaller, Fork{all_reduces_ && peers_ ? 3 : 2, all_reduces_ && peers_});
    // The next chunk is enqueued before what follows this one.
    compute(0);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (chunk + 1 < chunks_) compute(chunk + 1);
      list_.communicates = chunk;
      add_up(chunk);
      if (all_reduces_) share(chunk);
      list_.communicates = -1;
    }
    list_.add(Lane::kCaller, Join{});
    if (peers_) list_.add(Lane::kCaller, EndCall{});
    return std::move(list_.made);
  }

 private:
  void check_callers() {
    const int64_t bytes = plan::part_rows(plan_) * row_bytes_;
    const bool whole = !peers_ || (plan_.problem.m % ranks_ == 0 && bytes % plan::kStripePage == 0);
    if (chunks_ == 1 && whole) {
      list_.made.stripe_bytes = peers_ ? bytes : 0;
      return;
    }
    throw std::invalid_argument(
        "a kernel of your own with the collective stripes has " + std::to_string(chunks_) +
        " chunks and parts of " + std::to_string(bytes) +
        " bytes of m = " + std::to_string(plan_.problem.m) +
        ", allowed are one chunk and, over peers, equal parts of "
        "multiples of " +
        std::to_string(plan::kStripePage) +
        " bytes, a page of a GPU's memory: take the collective direct, or the transport nccl");
  }

  // Rows of a part that belong to the chunk.
  plan::Rows rows_of(int32_t chunk, int32_t part) const {
    const plan::Rows own = plan::rows_of_part(plan_, part);
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    return {std::min(own.begin + rows.begin, own.end), std::min(own.begin + rows.end, own.end)};
  }
  int64_t bytes_of(int32_t chunk, int32_t part) const {
    const plan::Rows rows = rows_of(chunk, part);
    return (rows.end - rows.begin) * row_bytes_;
  }

  // Where rank `from`'s terms of the chunk lie in rank `to`'s memory.
  Where term(int32_t to, int32_t from, int32_t chunk) const {
    const int64_t offset =
        from * plan::stripe_bytes(plan_) + plan::chunk_rows(plan_, chunk).begin * row_bytes_;
    if (callers_ && peers_ && from < ranks_) return {Buffer::kStripes, offset, 1};  // of rank `to`
    return peers_ ? Where{Buffer::kSlot, offset, to} : Where{Buffer::kStaging, offset};
  }
  // Where a part's sums of the chunk arrive in rank `to`'s slot.
  Where sums(int32_t to, int32_t part, int32_t chunk) const {
    return term(to, ranks_ + part, chunk);
  }

  Where product(int32_t chunk, int32_t part) const {
    return {Buffer::kProduct, rows_of(chunk, part).begin * row_bytes_};
  }
  Where output(int32_t chunk, int32_t part) const {
    const int64_t first = all_reduces_ ? 0 : plan::rows_of_part(plan_, part).begin;
    return {Buffer::kOutput, (rows_of(chunk, part).begin - first) * row_bytes_};
  }

  StepId multiply(int32_t chunk, int32_t part, Where output) {
    const plan::Rows rows = rows_of(chunk, part);
    const int64_t input_row_bytes = plan_.problem.k * plan::element_bytes(plan_.problem.dtype);
    return list_.add(
        Lane::kCaller,
        LibraryGemm{0, rows, {Buffer::kInput, rows.begin * input_row_bytes}, {output}});
  }

  void compute(int32_t chunk) {
    StepId computed = 0;
    if (callers_) {
      add_callers_kernel(plan_, plan_.problem.m, list_);
      list_.made.tiles.stores = peers_ ? Buffer::kStripes : Buffer::kProduct;
      computed = list_.last();
    }
    for (int32_t distance = 1; distance < ranks_ && !callers_; ++distance) {
      const int32_t peer = (rank_ + distance) % ranks_;
      computed = multiply(chunk, peer, peers_ ? term(peer, rank_, chunk) : product(chunk, peer));
    }
    list_.communicates = chunk;
    if (peers_) {
      announced_.push_back(signals_);
      list_.add_held(Lane::kSide0, Signal{signals_++}, {computed});
    } else {
      announced_.push_back(exchange(chunk, false, computed));
    }
    list_.communicates = -1;
    const Where own = term(rank_, rank_, chunk);
    if (!callers_) {
      computed = multiply(chunk, rank_, own);
    } else if (!peers_) {
      computed = list_.add(Lane::kCaller, Copy{product(chunk, rank_), own, bytes_of(chunk, rank_)});
    }
    computed_.push_back(computed);
  }

  void add_up(int32_t chunk) {
    const auto index = static_cast<size_t>(chunk);
    const plan::Rows rows = rows_of(chunk, rank_);
    AddTerms sum = {term(rank_, 0, chunk), output(chunk, rank_), rows.end - rows.begin,
                    plan_.resources.finish_ctas};
    sum.terms = ranks_;
    sum.stride = plan::stripe_bytes(plan_);
    sum.bias = variant_.bias;
    // A rank that waits has computed its own terms: peers' come at about that time.
    std::vector<StepId> after = {computed_[index]};
    if (peers_) {
      list_.add(Lane::kSide1, WaitForPeers{announced_[index]}, std::exchange(after, {}));
    } else {
      after.push_back(announced_[index]);
    }
    list_.add(Lane::kSide1, sum, std::move(after));
  }

  // Sums to all ranks.
  void share(int32_t chunk) {
    StepId last = list_.last();
    if (!peers_) {
      list_.communicates = -1;  // a timeline shows a chunk's messages to owners
      exchange(chunk, true, last);
      return;
    }
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t peer = (rank_ + distance) % ranks_;
      const Copy copy = {output(chunk, rank_), sums(peer, rank_, chunk), bytes_of(chunk, rank_)};
      last =
          list_.add(Lane::kSide2, copy, distance == 1 ? std::vector{last} : std::vector<StepId>{});
    }
    list_.add(Lane::kSide0, Signal{signals_}, {last});
    list_.add(Lane::kCopy, WaitForPeers{signals_++}, {last});
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t part = (rank_ + ranks_ - distance) % ranks_;
      list_.add(Lane::kCopy,
                Copy{sums(rank_, part, chunk), output(chunk, part), bytes_of(chunk, part)});
    }
  }

  // Messages of the chunk: terms to their owners, or sums to all.
  StepId exchange(int32_t chunk, bool sums, StepId after) {
    SendReceive messages = {plan_.chunks[0].max_ctas, 0, {}, {}};
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t to = (rank_ + distance) % ranks_;
      const int32_t from = (rank_ + ranks_ - distance) % ranks_;
      const int32_t sent = sums ? rank_ : to;
      const int32_t received = sums ? from : rank_;
      messages.sends.push_back(
          {to, sums ? output(chunk, sent) : product(chunk, sent), bytes_of(chunk, sent)});
      messages.receives.push_back({from, sums ? output(chunk, received) : term(rank_, from, chunk),
                                   bytes_of(chunk, received)});
    }
    return list_.add_held(Lane::kSide0, std::move(messages), {after});
  }

  const plan::Plan& plan_;
  const int32_t rank_;
  const Variant& variant_;
  const int32_t ranks_;
  const int32_t chunks_;
  const bool all_reduces_;
  const bool peers_;    // else over gloo
  const bool callers_;  // whose kernel computes
  const int64_t row_bytes_;
  int32_t signals_ = 0;           // all on one lane: their numbers only grow
  std::vector<StepId> computed_;  // of each chunk
  std::vector<int32_t>
      announced_;  // of each chunk the signal's number, or the step of its messages
  List list_;
};

}  // namespace

StepList lower_stripes(const plan::Plan& plan, int32_t rank, const Variant& variant) {
  return Stripes(plan, rank, variant).lower();
}

}  // namespace overlap::steps
