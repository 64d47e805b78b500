// Reductions by the framework's GEMM whose own stores travel: of each chunk it computes the peers' rows first, into their
// slots, and this rank's rows last, into its own. The owner of rows adds up the ranks' terms beside the next chunk, and
// an all-reduce's sums go to all ranks by copy engines, in pieces: the first travel while the next are added up.
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
#include "plan/message.h"
#include "steps/lower/callers.h"
#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

class Stripes : Family {
 public:
  using Family::Family;

  StepList lower() {
    if (callers_) check_callers();
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
      finish(chunk);
      list_.communicates = -1;
    }
    list_.add(Lane::kCaller, Join{});
    if (peers_) list_.add(Lane::kCaller, EndCall{});
    return std::move(list_.made);
  }

 private:
  void check_callers() {
    if (peers_ && plan_.problem.dtype == plan::DType::kFloat64) {
      plan::fail(
          "a kernel of your own with the collective stripes produces float64, allowed over peers "
          "are bfloat16, float16 and float32, which a kernel adds up: take the transport nccl");
    }
    const int64_t bytes = plan::part_rows(plan_) * row_bytes_;
    if (chunks_ == 1 && (!peers_ || bytes >= plan::kStripePage)) {
      list_.made.stripe_bytes = peers_ ? bytes : 0;
      return;
    }
    plan::fail(
        "a kernel of your own with the collective stripes has ", chunks_, " chunks and parts of ",
        bytes, " bytes, allowed are one chunk and, over peers, parts of at least ",
        plan::kStripePage,
        " bytes, a page of a GPU's memory: take the collective direct, or the transport nccl");
  }
  bool in_stripes() const { return callers_ && peers_; }
  int64_t stride() const {
    return in_stripes() ? plan::stripe_stride(list_.made.stripe_bytes) : plan::stripe_bytes(plan_);
  }

  // Rows of the chunk in each part, from the part's first row on.
  plan::Rows rows_in_part(int32_t chunk) const { return plan::chunk_rows(plan_, chunk); }
  // The same in the whole matrix. A short last part has fewer.
  plan::Rows rows_of(plan::Rows rows, int32_t part) const {
    const plan::Rows own = plan::rows_of_part(plan_, part);
    return {std::min(own.begin + rows.begin, own.end), std::min(own.begin + rows.end, own.end)};
  }
  int64_t bytes_of(plan::Rows rows, int32_t part) const {
    return rows_of(rows, part).count() * row_bytes_;
  }

  // Where rank `from`'s terms of these rows lie in rank `to`'s memory.
  Where term(int32_t to, int32_t from, plan::Rows rows) const {
    const bool in_slot = from >= ranks_;  // sums
    const int64_t stride = in_slot ? plan::stripe_bytes(plan_) : this->stride();
    const int64_t offset = from * stride + rows.begin * row_bytes_;
    if (in_stripes() && !in_slot) return {Buffer::kStripes, offset, 1};  // of rank `to`
    return peers_ ? Where{Buffer::kSlot, offset, to} : Where{Buffer::kStaging, offset};
  }
  // Where a part's sums arrive in rank `to`'s slot.
  Where sums(int32_t to, int32_t part, plan::Rows rows) const {
    return term(to, ranks_ + part, rows);
  }

  Where product(plan::Rows rows, int32_t part) const {
    return {Buffer::kProduct, rows_of(rows, part).begin * row_bytes_};
  }
  Where output(plan::Rows rows, int32_t part) const {
    const int64_t first = all_reduces_ ? 0 : plan::rows_of_part(plan_, part).begin;
    return {Buffer::kOutput, (rows_of(rows, part).begin - first) * row_bytes_};
  }

  StepId multiply(plan::Rows of_part, int32_t part, Where output) {
    return list_.add(Lane::kCaller, library_gemm(rows_of(of_part, part), output));
  }

  void compute(int32_t chunk) {
    const plan::Rows rows = rows_in_part(chunk);
    StepId computed = 0;
    if (callers_) {
      add_callers_kernel(plan_, plan_.problem.m, list_);
      list_.made.tiles.stores = peers_ ? Buffer::kStripes : Buffer::kProduct;
      computed = list_.last();
    }
    for (int32_t distance = 1; distance < ranks_ && !callers_; ++distance) {
      const int32_t peer = rank_after(distance);
      computed = multiply(rows, peer, peers_ ? term(peer, rank_, rows) : product(rows, peer));
    }
    list_.communicates = chunk;
    if (peers_) {
      announced_.push_back(signals_);
      list_.add_held(Lane::kSide0, Signal{signals_++}, {computed});
    } else {
      announced_.push_back(exchange(rows, false, computed));
    }
    list_.communicates = -1;
    const Where own = term(rank_, rank_, rows);
    if (!callers_) {
      computed = multiply(rows, rank_, own);
    } else if (!peers_) {
      computed = list_.add(Lane::kCaller, Copy{product(rows, rank_), own, bytes_of(rows, rank_)});
    }
    computed_.push_back(computed);
  }

  // Adds up this rank's rows of the chunk. An all-reduce's sums go to all ranks.
  void finish(int32_t chunk) {
    // A rank that waits has computed its own terms: peers' come at about that time.
    std::vector<StepId> after = {computed_[at(chunk)]};
    if (peers_) {
      list_.add(Lane::kSide1, WaitForPeers{announced_[at(chunk)]}, std::exchange(after, {}));
    } else {
      after.push_back(announced_[at(chunk)]);
    }
    const plan::Rows all = rows_in_part(chunk);
    const int64_t pieces = pieces_of(all);
    const int64_t step = (all.count() + pieces - 1) / pieces;
    for (int64_t begin = all.begin; begin < all.end; begin += step) {
      const plan::Rows rows = {begin, std::min(begin + step, all.end)};
      const StepId added = add_up(rows, std::exchange(after, {}));
      if (all_reduces_) share(rows, added);
    }
  }

  int64_t pieces_of(plan::Rows rows) const {
    // Copy engines are slower below this.
    constexpr int64_t kBytes = 8 << 20;
    constexpr int64_t kMost = 8;
    const int64_t bytes = rows.count() * row_bytes_;
    return all_reduces_ && peers_ ? std::clamp<int64_t>(bytes / kBytes, 1, kMost) : 1;
  }

  StepId add_up(plan::Rows rows, std::vector<StepId> after) {
    return list_.add(
        Lane::kSide1,
        AddTerms{term(rank_, 0, rows), output(rows, rank_), rows_of(rows, rank_).count(),
                 plan_.resources.finish_ctas, ranks_, stride(), variant_.bias},
        std::move(after));
  }

  // Sums to all ranks.
  void share(plan::Rows rows, StepId last) {
    if (!peers_) {
      list_.communicates = -1;  // a timeline shows a chunk's messages to owners
      exchange(rows, true, last);
      return;
    }
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t peer = rank_after(distance);
      const Copy copy = {output(rows, rank_), sums(peer, rank_, rows), bytes_of(rows, rank_)};
      last =
          list_.add(Lane::kSide2, copy, distance == 1 ? std::vector{last} : std::vector<StepId>{});
    }
    list_.add(Lane::kSide0, Signal{signals_}, {last});
    list_.add(Lane::kCopy, WaitForPeers{signals_++}, {last});
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t part = rank_before(distance);
      list_.add(Lane::kCopy,
                Copy{sums(rank_, part, rows), output(rows, part), bytes_of(rows, part)});
    }
  }

  // Messages of these rows: terms to their owners, or sums to all.
  StepId exchange(plan::Rows rows, bool sums, StepId after) {
    SendReceive messages = no_messages();
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t to = rank_after(distance);
      const int32_t from = rank_before(distance);
      const int32_t sent = sums ? rank_ : to;
      const int32_t received = sums ? from : rank_;
      messages.sends.push_back(
          {to, sums ? output(rows, sent) : product(rows, sent), bytes_of(rows, sent)});
      messages.receives.push_back({from, sums ? output(rows, received) : term(rank_, from, rows),
                                   bytes_of(rows, received)});
    }
    return list_.add_held(Lane::kSide0, std::move(messages), {after});
  }

  int32_t signals_ = 0;             // all on one lane: their numbers only grow
  std::vector<StepId> computed_;    // of each chunk
  std::vector<int32_t> announced_;  // of each: the signal's number, or the step of its messages
};

}  // namespace

StepList lower_stripes(const RankCall& call) {
  return Stripes(call).lower();
}

}  // namespace overlap::steps
