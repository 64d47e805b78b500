// Communication before computation, chunk by chunk: all-gathers over NCCL and over peers.
//
// All launches of a weight's GEMM walk one tile order: own rows, then the other ranks' of each chunk. Over NCCL each
// arrival starts a launch, as plan/gather_rounds.h has it; over peers one launch awaits the chunks itself, if all
// weights' kernels can. One weight's GEMM copies what arrives into the gathered input meanwhile, else the copy lane does.
//
// On CPU messages bring the rows into the gathered input, and the framework's GEMM reads them there.
#include "plan/gather_rounds.h"
#include "steps/lower/callers.h"
#include "steps/lower/families.h"
#include "steps/lower/hierarchy.h"

namespace overlap::steps {
namespace {

// The places of an all-gather's rows.
class GatherPlaces : protected Family {
 protected:
  GatherPlaces(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
               const Variant& variant)
      : Family(plan, rank, machine, variant),
        on_cpu_(!callers_ && on_cpu(machine)),
        parts_(plan::row_parts(plan)),
        part_rows_(plan::part_rows(plan)),
        chunk_places_(plan, callers_),
        rows_(chunk_places_.rows),
        extents_(chunk_places_.extents),
        hierarchical_(plan::hierarchical(plan)),
        at_(plan, rank),
        buffer_{peers_ ? Buffer::kSlot : staging_of(plan, variant, extents_), 0,
                peers_ ? rank : 0} {}

  Lane side(int32_t chunk) const { return side_lane(chunk % plan_.resources.lanes); }

  int64_t chunk_bytes(int32_t chunk) const {
    const plan::Rows rows = rows_[at(chunk)];
    return (rows.end - rows.begin) * row_bytes_;
  }

  // The rows of a part of the chunk, where they are communicated.
  Where place(int32_t chunk, int32_t part) const {
    Where where = buffer_;
    where.offset = extents_[at(chunk)].offset * element_bytes_ + part * chunk_bytes(chunk);
    return where;
  }

  Where gathered(int32_t part, int64_t row) const {
    return {Buffer::kGathered, (part * part_rows_ + row) * row_bytes_};
  }

  // Where GEMMs read the rows of a part of the chunk.
  Where arrived(int32_t chunk, int32_t part) const {
    return on_cpu_ ? gathered(part, rows_[at(chunk)].begin) : place(chunk, part);
  }

  Where own_rows(int32_t chunk) const {
    return {Buffer::kInput, rows_[at(chunk)].begin * row_bytes_};
  }

  // The rows to copy into the gathered input when the own rows are there (0), and after chunk
  // `arrival` - 1: whole rows of each part.
  std::vector<Move> moves(int32_t arrival) const {
    if (arrival == 0) {
      return {{{Buffer::kInput}, gathered(rank_, 0), part_rows_ * row_bytes_, 0}};
    }
    std::vector<Move> moves;
    const int32_t chunk = arrival - 1;
    for (int32_t part = 0; part < parts_; ++part) {
      if (part == rank_) continue;
      moves.push_back({place(chunk, part), gathered(part, rows_[at(chunk)].begin),
                       chunk_bytes(chunk), arrival});
    }
    return moves;
  }

  const bool on_cpu_;  // where this package computes
  const int32_t parts_;
  const int64_t part_rows_;
  const ChunkPlaces chunk_places_;
  const std::vector<plan::Rows>& rows_;
  const std::vector<plan::Extent>& extents_;
  const bool hierarchical_;
  const CliquePlace at_;
  const Where buffer_;
};

class Consume : GatherPlaces {
 public:
  Consume(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
          const Variant& variant)
      : GatherPlaces(plan, rank, machine, variant),
        weights_(callers_ ? std::vector<Weight>{}
                 : variant.weights.empty()
                     ? std::vector<Weight>{{plan.problem.n, variant.compute == Compute::kKernel}}
                     : variant.weights) {
    awaits_ = !callers_ && plan::gathers_in_one_launch(plan) &&
              std::all_of(weights_.begin(), weights_.end(),
                          [](const Weight& weight) { return weight.kernel_takes; });
    computes_ = !callers_ && !awaits_;
    prepare_launches();
  }

  StepList lower() {
    if (on_cpu_) return lower_on_cpu();
    list_.made.steps.reserve(at(8 + chunks_ * (3 + parts_)));
    if (peers_) list_.add_slot(plan::peer_slot_bytes(plan_));
    add_communicators();
    if (!peers_) {
      list_.add_scratch(buffer_.buffer, staging_bytes(plan_));
      // Copies within a device are kernels, which take all SMs for a moment, but beside a GEMM those that it leaves, and
      // keep the next launch waiting.
      for (int32_t chunk = 0; chunk < chunks_ && stages() && !callers_; ++chunk) {
        stage(chunk, Lane::kCaller);
      }
    }
    if (callers_) bring_own();
    // Over peers one lane sends, and one waits for what arrives, unless the GEMM does.
    const int32_t lanes = hierarchical_ ? levels_.side_lanes()
                          : !peers_     ? plan_.resources.lanes
                          : awaits_     ? 1
                                        : 2;
    const bool carried = callers_ || awaits_ || carrier_ >= 0;
    list_.add(Lane::kCaller, Fork{lanes, !carried});
    // The own rows' GEMM starts while the host enqueues the rest.
    if (awaits_) launch_at_once();
    if (computes_) compute(0);
    if (peers_) list_.add(Lane::kSide0, WaitForSlots{});
    if (hierarchical_) share_own();
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (callers_ && stages()) stage(chunk, side(chunk));
      communicated_.push_back(hierarchical_ ? share(chunk, bring_across(chunk))
                                            : communicate(chunk));
      if (callers_) bring(chunk);
    }
    for (int32_t chunk = 0; chunk < chunks_ && computes_; ++chunk) compute(chunk + 1);
    if (callers_) launch_callers();
    if (!carried) copy_gathered();
    list_.add(Lane::kCaller, Join{});
    if (peers_ && !awaits_) list_.add(Lane::kCaller, EndCall{});
    return std::move(list_.made);
  }

 private:
  // All messages are on their way before anything is computed.
  StepList lower_on_cpu() {
    add_communicators();
    list_.add(Lane::kCaller, Fork{hierarchical_ ? levels_.side_lanes() : 1, false});
    if (hierarchical_) return share_on_cpu();
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      SendReceive messages = no_messages();
      for (int32_t distance = 1; distance < parts_; ++distance) {
        const int32_t to = rank_after(distance);
        const int32_t from = rank_before(distance);
        messages.sends.push_back({to, own_rows(chunk), chunk_bytes(chunk)});
        messages.receives.push_back({from, arrived(chunk, from), chunk_bytes(chunk)});
      }
      list_.communicates = chunk;
      communicated_.push_back(list_.add_held(Lane::kSide0, std::move(messages)));
    }
    list_.communicates = -1;
    copy(Lane::kCaller, 0);
    for (int32_t arrival = 0; arrival <= chunks_; ++arrival) compute(arrival);
    list_.add(Lane::kCaller, Join{});
    return std::move(list_.made);
  }

  // --- in two levels ---

  void add_communicators() {
    if (hierarchical_) return levels_.add_communicators();
    if (!peers_) list_.add_communicators(plan_);
  }
  // NCCL's all-gather finds a rank's own rows among the others.
  bool stages() const { return !peers_ && !hierarchical_; }

  StepList share_on_cpu() {
    share_own();
    std::vector<StepId> across;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) across.push_back(bring_across(chunk));
    copy(Lane::kCaller, 0);
    compute(0);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      communicated_.push_back(share(chunk, across[at(chunk)]));
      compute(chunk + 1);
    }
    list_.add(Lane::kCaller, Join{});
    return std::move(list_.made);
  }

  // Own rows of all chunks to the clique.
  void share_own() {
    if (at_.clique() == 1) return;
    SendReceive messages = levels_.messages_within();
    for (const int32_t place : at_.places()) {
      const int32_t peer = at_.rank(at_.number(), place);
      for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
        if (peers_) {
          const Copy copy = {own_rows(chunk), in_slot_of(peer, chunk, rank_), chunk_bytes(chunk)};
          list_.add_of_chunk(chunk, Lane::kSide0, copy);
        } else {
          add_message(messages.sends, peer, own_rows(chunk), chunk_bytes(chunk));
          add_message(messages.receives, peer, arrived(chunk, peer), chunk_bytes(chunk));
        }
      }
    }
    if (peers_) {
      list_.add(Lane::kSide0, Signal{0});
    } else {
      list_.add_held(Lane::kSide0, std::move(messages));
    }
  }

  // Counterparts' rows of the chunk.
  StepId bring_across(int32_t chunk) {
    SendReceive messages = levels_.messages_across(chunk);
    for (const int32_t number : at_.numbers()) {
      const int32_t peer = at_.rank(number, at_.place());
      add_message(messages.sends, peer, own_rows(chunk), chunk_bytes(chunk));
      add_message(messages.receives, peer, arrived(chunk, peer), chunk_bytes(chunk));
    }
    // Timelines show these of all messages.
    const StepId sent = list_.add_of_chunk(chunk, levels_.across(chunk), std::move(messages));
    list_.made.steps.back().held = true;
    return sent;
  }

  // Counterparts' rows to the clique; the step after which all rows of the chunk are here.
  StepId share(int32_t chunk, StepId across) {
    if (at_.clique() == 1) return across;
    std::vector<StepId> after = {across};
    SendReceive messages = levels_.messages_within();
    for (const int32_t place : at_.places()) {
      const int32_t peer = at_.rank(at_.number(), place);
      for (const int32_t number : at_.numbers()) {
        const int32_t sent = at_.rank(number, at_.place());
        const int32_t received = at_.rank(number, place);
        if (peers_) {
          const Copy copy = {arrived(chunk, sent), in_slot_of(peer, chunk, sent),
                             chunk_bytes(chunk)};
          list_.add_of_chunk(chunk, Lane::kSide0, copy, std::exchange(after, {}));
        } else {
          add_message(messages.sends, peer, arrived(chunk, sent), chunk_bytes(chunk));
          add_message(messages.receives, peer, arrived(chunk, received), chunk_bytes(chunk));
        }
      }
    }
    if (!peers_) return list_.add(Lane::kSide0, std::move(messages), std::move(after));
    list_.add(Lane::kSide0, Signal{chunk + 1});
    return list_.add(Lane::kSide1, WaitForPeers{chunk + 1}, {across});
  }

  Where in_slot_of(int32_t peer, int32_t chunk, int32_t part) const {
    Where where = place(chunk, part);
    where.index = peer;
    return where;
  }

  // The lane on which a chunk arrives.
  Lane arrives_on(int32_t chunk) const {
    if (peers_) return Lane::kSide1;
    if (!hierarchical_) return side(chunk);
    return at_.clique() > 1 ? Lane::kSide0 : levels_.across(chunk);
  }

  // --- in one ---

  StepId communicate(int32_t chunk) {
    list_.communicates = chunk;
    const StepId id = peers_ ? push(chunk) : gather(chunk);
    list_.communicates = -1;
    return id;
  }

  // Own rows of the chunk into the staging buffer.
  void stage(int32_t chunk, Lane lane) {
    list_.add(lane, Copy{own_rows(chunk), place(chunk, rank_), chunk_bytes(chunk)});
  }

  // Everybody's rows of the chunk into the staging buffer.
  StepId gather(int32_t chunk) {
    return list_.add_held(
        side(chunk), Collective{plan_.collective, plan_.chunks[at(chunk)].max_ctas,
                                chunk % plan_.resources.lanes, place(chunk, rank_), place(chunk, 0),
                                extents_[at(chunk)].count});
  }

  // Own rows of the chunk into every peer's memory, by the copy engine; the step after which the peers' are here.
  StepId push(int32_t chunk) {
    for (int32_t distance = 1; distance < parts_; ++distance) {
      const Where to = in_slot_of(rank_after(distance), chunk, rank_);
      const Copy copy = {own_rows(chunk), to, chunk_bytes(chunk)};
      if (distance == 1) {
        list_.add_held(Lane::kSide0, copy);
      } else {
        list_.add(Lane::kSide0, copy);
      }
    }
    // Also to this rank's own GEMM, which else could end the call before.
    const StepId sent = list_.add(Lane::kSide0, Signal{chunk, true});
    return awaits_ ? sent : list_.add(Lane::kSide1, WaitForPeers{chunk});
  }

  // These moves as steps, of which the first comes after others.
  void copy(Lane lane, int32_t arrival, std::vector<StepId> after = {}) {
    for (const Move& move : moves(arrival)) {
      list_.add(lane, Copy{move.from, move.to, move.bytes}, std::exchange(after, {}));
    }
  }

  void copy_gathered() {
    copy(Lane::kCopy, 0);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      copy(Lane::kCopy, chunk + 1, {communicated_[at(chunk)]});
    }
  }

  // A caller's kernel reads all rows in the gathered input, and is told of arrivals: of the own rows, counter 0, and of
  // each chunk. They come in their order, so that a kernel which has seen one has all those before.
  void bring_own() {
    copy(Lane::kCaller, 0);
    list_.add(Lane::kCaller, Arrive{0});
  }

  void bring(int32_t chunk) {
    const Lane lane = arrives_on(chunk);
    copy(lane, chunk + 1);
    std::vector<StepId> after;
    if (chunk > 0 && list_.made.steps[at(after_.back())].lane != lane) {
      after.push_back(after_.back());
    }
    after_.push_back(list_.add(lane, Arrive{chunk + 1}, std::move(after)));
  }

  // A kernel that does not await what arrives comes after all of it.
  void launch_callers() {
    std::vector<Claim> claims;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Rows rows = rows_[at(chunk)];
      for (int32_t part = 0; part < parts_; ++part) {
        claims.push_back({{part * part_rows_ + rows.begin, part * part_rows_ + rows.end},
                          part == rank_ ? 0 : chunk + 1});
      }
    }
    list_.made.counters = chunks_ + 1;
    CallersTiles(plan_, list_).assign(plan_.problem.m, claims, false);
    if (variant_.awaits) after_.clear();
    list_.add(Lane::kCaller, CallersKernel{false, variant_.awaits}, std::move(after_));
  }

  // The launches when this rank's own rows are there (0), and after chunk `arrival` - 1.
  void compute(int32_t arrival) {
    if (arrival > 0) after_.push_back(communicated_[at(arrival - 1)]);
    for (size_t weight = 0; weight < weights_.size(); ++weight) {
      if (weights_[weight].kernel_takes) {
        const plan::GatherLaunch& range = launches_[weight][at(arrival)];
        Gemm gemm = gemms_[weight];
        gemm.first_tile = range.first_tile;
        gemm.end_tile = range.end_tile;
        gemm.ctas = range.at_once;
        if (static_cast<int32_t>(weight) == carrier_) gemm.moves = moves(arrival);
        add_on_caller(std::move(gemm));
      } else if (arrival == 0) {
        const int64_t first = rank_ * part_rows_;
        add_library(weight, {first, first + part_rows_}, {Buffer::kInput});
      } else {
        compute_library(weight, arrival - 1);
      }
    }
  }

  // The rows that the chunk brought from the peers.
  void compute_library(size_t weight, int32_t chunk) {
    const plan::Rows rows = rows_[at(chunk)];
    for (int32_t part = 0; part < parts_; ++part) {
      if (part == rank_) continue;
      add_library(weight, {part * part_rows_ + rows.begin, part * part_rows_ + rows.end},
                  arrived(chunk, part));
    }
  }

  void add_library(size_t weight, plan::Rows rows, Where input) {
    const int64_t offset =
        rows.begin * weights_[weight].columns * plan::output_bytes(plan_.problem);
    const auto number = static_cast<int32_t>(weight);
    add_on_caller(LibraryGemm{number, rows, input, {{Buffer::kOutput, offset, number}}});
  }

  // The first step of an arrival is the one that waits for it.
  template <typename Kind>
  void add_on_caller(Kind what) {
    list_.add(Lane::kCaller, std::move(what), std::move(after_));
    after_.clear();
  }

  // GEMMs that wait for rows themselves: all own rows' tiles first, those of the last weight in one launch with the
  // others' rows. The last launch ends the call.
  void launch_at_once() {
    const size_t last = gemms_.size() - 1;
    const auto own_tiles = [&](size_t weight) {
      return list_.made.orders[static_cast<size_t>(gemms_[weight].order)].chunk_begin[1];
    };
    for (size_t weight = 0; weight < last; ++weight) {
      launch_tiles(weight, 0, own_tiles(weight), false);
    }
    for (int32_t arrival = 0; arrival <= chunks_; ++arrival) {
      for (const Move& move : moves(arrival)) gemms_[last].moves.push_back(move);
    }
    launch_tiles(last, 0, gemms_[last].end_tile, last == 0);
    for (size_t weight = 0; weight < last; ++weight) {
      launch_tiles(weight, own_tiles(weight), gemms_[weight].end_tile, weight + 1 == last);
    }
  }

  void launch_tiles(size_t weight, int32_t first_tile, int32_t end_tile, bool ends_call) {
    Gemm gemm = gemms_[weight];
    gemm.first_tile = first_tile;
    gemm.end_tile = end_tile;
    gemm.awaits_chunks = true;
    gemm.ends_call = ends_call;
    list_.add(Lane::kCaller, std::move(gemm));
  }

  // Each weight's GEMM over all rows, and what each launch takes of it.
  void prepare_launches() {
    for (size_t weight = 0; weight < weights_.size(); ++weight) {
      gemms_.emplace_back();
      launches_.emplace_back();
      if (!weights_[weight].kernel_takes) continue;
      // Something arrives before each launch, so none is empty.
      if (!awaits_ && carrier_ < 0 && plan::is_sm90(plan_.kernel) &&
          parts_ - 1 <= plan::kMaxCopyRuns) {
        carrier_ = static_cast<int32_t>(weight);
      }
      const plan::TileOrder order = plan::gather_order(plan_, weights_[weight].columns);
      Gemm& gemm = gemms_.back() = gemm_of_all(order);
      gemm.weight = static_cast<int32_t>(weight);
      gemm.input = buffer_;
      gemm.outputs = {{{Buffer::kOutput, 0, gemm.weight}}};
      gemm.map.mode = plan::RowMap::Mode::kGather;
      gemm.map.part_rows = static_cast<int32_t>(part_rows_);
      gemm.map.own_part = rank_;
      if (awaits_) continue;
      launches_.back() = plan::gather_launches(plan::gather_arrivals(plan_, order.tiles_n),
                                               plan_.cluster_m, gemm.ctas, machine_.sm_count);
    }
  }

  const std::vector<Weight> weights_;
  bool computes_ = false;  // what has arrived
  bool awaits_ = false;    // the GEMMs wait for what arrives, one launch each
  int32_t carrier_ = -1;  // else the weight whose GEMM copies rows into the gathered input, or none
  std::vector<Gemm> gemms_;
  // The launches of each weight, unless one launch waits: own rows, then chunk by chunk.
  std::vector<std::vector<plan::GatherLaunch>> launches_;
  std::vector<StepId> communicated_;
  std::vector<StepId> after_;
  Levels levels_{plan_, list_};
};

}  // namespace

StepList lower_consume(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant) {
  return Consume(plan, rank, machine, variant).lower();
}

}  // namespace overlap::steps
