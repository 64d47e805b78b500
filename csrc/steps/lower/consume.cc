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
struct GatherPlaces {
  explicit GatherPlaces(const RankCall& call)
      : plan(call.plan),
        rank(call.rank),
        chunks(static_cast<int32_t>(plan.chunks.size())),
        peers(plan::over_peers(plan)),
        callers(call.variant.compute == Compute::kCallers),
        on_cpu(!callers && steps::on_cpu(call.machine)),
        parts(plan::row_parts(plan)),
        part_rows(plan::part_rows(plan)),
        row_bytes(plan::moved_columns(plan.problem) * plan::moved_bytes(plan.problem)),
        chunk_places(plan, callers),
        buffer{peers ? Buffer::kSlot : staging_of(plan, call.variant, chunk_places.extents), 0,
               peers ? rank : 0} {}

  plan::Rows rows(int32_t chunk) const { return chunk_places.rows[at(chunk)]; }
  int64_t bytes(int32_t chunk) const { return rows(chunk).count() * row_bytes; }

  // The rows of a part of the chunk, where they are communicated.
  Where place(int32_t chunk, int32_t part) const {
    Where where = buffer;
    const int64_t elements = chunk_places.extents[at(chunk)].offset;
    where.offset = elements * plan::moved_bytes(plan.problem) + part * bytes(chunk);
    return where;
  }

  Where gathered(int32_t part, int64_t row) const {
    return {Buffer::kGathered, (part * part_rows + row) * row_bytes};
  }

  // Where GEMMs read the rows of a part of the chunk.
  Where arrived(int32_t chunk, int32_t part) const {
    return on_cpu ? gathered(part, rows(chunk).begin) : place(chunk, part);
  }
  Where own_rows(int32_t chunk) const { return {Buffer::kInput, rows(chunk).begin * row_bytes}; }

  // The rows of the output, or of the gathered input, that the chunk brings of a part.
  plan::Rows rows_of(int32_t chunk, int32_t part) const {
    return rows(chunk).behind(part * part_rows);
  }

  // The rows to copy into the gathered input when this rank's rows are there (0), and after chunk
  // `arrival` - 1: whole rows of each part.
  std::vector<Move> moves(int32_t arrival) const {
    if (arrival == 0) return {{{Buffer::kInput}, gathered(rank, 0), part_rows * row_bytes, 0}};
    std::vector<Move> moves;
    const int32_t chunk = arrival - 1;
    for (int32_t part = 0; part < parts; ++part) {
      if (part == rank) continue;
      moves.push_back(
          {place(chunk, part), gathered(part, rows(chunk).begin), bytes(chunk), arrival});
    }
    return moves;
  }

  const plan::Plan& plan;
  const int32_t rank;
  const int32_t chunks;
  const bool peers;
  const bool callers;  // whose kernel computes
  const bool on_cpu;   // where this package computes
  const int32_t parts;
  const int64_t part_rows;
  const int64_t row_bytes;
  const ChunkPlaces chunk_places;
  const Where buffer;
};

// Brings each chunk's rows to all ranks: in one level by push, gather or exchange, in two by the others.
class GatherMessages {
 public:
  // `awaited`: the GEMMs wait for what arrives over peers.
  GatherMessages(const GatherPlaces& places, List& list, bool awaited)
      : places_(places),
        plan_(places.plan),
        list_(list),
        awaited_(awaited),
        hierarchical_(plan::hierarchical(plan_)),
        at_(plan_, places.rank),
        levels_(plan_, list) {}

  void prepare() {
    if (places_.peers) list_.add_slot(plan::peer_slot_bytes(plan_));
    if (hierarchical_) levels_.add_communicators();
    if (!hierarchical_ && !places_.peers) list_.add_communicators(plan_);
    if (places_.peers || places_.on_cpu) return;
    list_.add_scratch(places_.buffer.buffer, staging_bytes(plan_));
    // Copies within a device are kernels, which take all SMs for a moment, but beside a GEMM those that it leaves, and
    // keep the next launch waiting.
    for (int32_t chunk = 0; chunk < places_.chunks && !places_.callers; ++chunk) {
      stage(chunk, Lane::kCaller);
    }
  }

  // Over peers one lane sends, and one waits for what arrives, unless the GEMM does.
  int32_t lanes() const {
    if (hierarchical_) return levels_.side_lanes();
    if (places_.peers) return awaited_ ? 1 : 2;
    return places_.on_cpu ? 1 : plan_.resources.lanes;
  }

  // The lane on which a chunk arrives.
  Lane arrives_on(int32_t chunk) const {
    if (places_.peers) return Lane::kSide1;
    if (!hierarchical_) return side(chunk);
    return at_.clique() > 1 ? Lane::kSide0 : levels_.across(chunk);
  }

  // The part of the communication that comes before all chunks.
  void begin() {
    if (places_.peers) list_.add(Lane::kSide0, WaitForSlots{});
    if (hierarchical_) share_own();
  }

  // A chunk's messages, and with two levels only those across cliques; `finish` has the others.
  StepId send(int32_t chunk) {
    if (hierarchical_) return bring_across(chunk);
    if (places_.callers) stage(chunk, side(chunk));
    list_.communicates = chunk;
    const StepId id = places_.on_cpu  ? exchange(chunk)
                      : places_.peers ? push(chunk)
                                      : gather(chunk);
    list_.communicates = -1;
    return id;
  }

  // The step after which all rows of the chunk are here, if these were sent by `sent`.
  StepId finish(int32_t chunk, StepId sent) { return hierarchical_ ? share(chunk, sent) : sent; }

 private:
  // Own rows of all chunks to the clique.
  void share_own() {
    if (at_.clique() == 1) return;
    SendReceive messages = levels_.messages_within();
    for (const int32_t place : at_.places()) {
      const int32_t peer = at_.rank(at_.number(), place);
      for (int32_t chunk = 0; chunk < places_.chunks; ++chunk) {
        const Where rows = places_.own_rows(chunk);
        if (places_.peers) {
          list_.add_of_chunk(chunk, Lane::kSide0, copy_to(peer, chunk, rows, places_.rank));
        } else {
          add_messages(messages, peer, chunk, rows, peer);
        }
      }
    }
    if (places_.peers) list_.add(Lane::kSide0, Signal{0});
    if (!places_.peers) list_.add_held(Lane::kSide0, std::move(messages));
  }

  // Counterparts' rows of the chunk.
  StepId bring_across(int32_t chunk) {
    SendReceive messages = levels_.messages_across(chunk);
    for (const int32_t number : at_.numbers()) {
      const int32_t peer = at_.rank(number, at_.place());
      add_messages(messages, peer, chunk, places_.own_rows(chunk), peer);
    }
    // Timelines show these of all messages.
    return list_.hold(list_.add_of_chunk(chunk, levels_.across(chunk), std::move(messages)));
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
        const Where rows = places_.arrived(chunk, sent);
        if (places_.peers) {
          list_.add_of_chunk(chunk, Lane::kSide0, copy_to(peer, chunk, rows, sent),
                             std::exchange(after, {}));
        } else {
          add_messages(messages, peer, chunk, rows, at_.rank(number, place));
        }
      }
    }
    if (!places_.peers) return list_.add(Lane::kSide0, std::move(messages), std::move(after));
    list_.add(Lane::kSide0, Signal{chunk + 1});
    return list_.add(Lane::kSide1, WaitForPeers{chunk + 1}, {across});
  }

  // These rows of the chunk to the peer, and a part's from it, unless they are empty.
  void add_messages(SendReceive& messages, int32_t peer, int32_t chunk, Where rows, int32_t part) {
    const int64_t bytes = places_.bytes(chunk);
    add_message(messages.sends, peer, rows, bytes);
    add_message(messages.receives, peer, places_.arrived(chunk, part), bytes);
  }

  // These rows of the chunk, a part's, into the peer's slot.
  Copy copy_to(int32_t peer, int32_t chunk, Where rows, int32_t part) const {
    Where slot = places_.place(chunk, part);
    slot.index = peer;
    return {rows, slot, places_.bytes(chunk)};
  }

  Lane side(int32_t chunk) const { return side_lane(chunk % plan_.resources.lanes); }

  // Own rows of the chunk into the staging buffer, as NCCL's all-gather finds them among the others.
  void stage(int32_t chunk, Lane lane) {
    if (hierarchical_ || places_.peers) return;
    const Where staged = places_.place(chunk, places_.rank);
    list_.add(lane, Copy{places_.own_rows(chunk), staged, places_.bytes(chunk)});
  }

  // Everybody's rows of the chunk into the staging buffer.
  StepId gather(int32_t chunk) {
    return list_.add_held(
        side(chunk),
        Collective{plan_.collective, plan_.chunks[at(chunk)].max_ctas,
                   chunk % plan_.resources.lanes, places_.place(chunk, places_.rank),
                   places_.place(chunk, 0), places_.chunk_places.extents[at(chunk)].count});
  }

  // Own rows of the chunk into every peer's memory, by the copy engine; the step after which the peers' are here.
  StepId push(int32_t chunk) {
    for (int32_t distance = 1; distance < places_.parts; ++distance) {
      const int32_t to = (places_.rank + distance) % places_.parts;
      const Copy own = copy_to(to, chunk, places_.own_rows(chunk), places_.rank);
      const StepId copied = list_.add(Lane::kSide0, own);
      if (distance == 1) list_.hold(copied);
    }
    // Also to this rank's own GEMM, which else could end the call before.
    const StepId sent = list_.add(Lane::kSide0, Signal{chunk, true});
    return awaited_ ? sent : list_.add(Lane::kSide1, WaitForPeers{chunk});
  }

  // Own rows of the chunk to every peer, and the peers', by messages.
  StepId exchange(int32_t chunk) {
    SendReceive messages = {plan_.chunks[0].max_ctas, 0, {}, {}};
    for (int32_t distance = 1; distance < places_.parts; ++distance) {
      const int32_t to = (places_.rank + distance) % places_.parts;
      const int32_t from = (places_.rank + places_.parts - distance) % places_.parts;
      messages.sends.push_back({to, places_.own_rows(chunk), places_.bytes(chunk)});
      messages.receives.push_back({from, places_.arrived(chunk, from), places_.bytes(chunk)});
    }
    return list_.add_held(Lane::kSide0, std::move(messages));
  }

  const GatherPlaces& places_;
  const plan::Plan& plan_;
  List& list_;
  const bool awaited_;
  const bool hierarchical_;
  const CliquePlace at_;
  Levels levels_;
};

// Launches the GEMMs of all weights: as rows arrive, or once, to wait for them.
class GatherLaunches {
 public:
  GatherLaunches(const GatherPlaces& places, List& list, std::vector<Weight> weights)
      : places_(places), list_(list), weights_(std::move(weights)) {
    awaits_ = !places.callers && plan::gathers_in_one_launch(places.plan) &&
              std::ranges::all_of(weights_, &Weight::kernel_takes);
  }

  bool awaits() const { return awaits_; }         // the GEMMs, for what arrives, one launch each
  bool carries() const { return carrier_ >= 0; }  // rows into the gathered input, one of the GEMMs

  // The next weight's GEMM over all rows, which nobody looks at where the kernel does not take it.
  void add(Gemm&& all, int32_t sm_count) {
    const plan::Plan& plan = places_.plan;
    launches_.emplace_back();
    Gemm& gemm = gemms_.emplace_back(std::move(all));
    gemm.weight = static_cast<int32_t>(gemms_.size()) - 1;
    if (!weights_[at(gemm.weight)].kernel_takes) return;
    gemm.input = places_.buffer;
    gemm.outputs = {{{Buffer::kOutput, 0, gemm.weight}}};
    gemm.map.mode = plan::RowMap::Mode::kGather;
    gemm.map.part_rows = static_cast<int32_t>(places_.part_rows);
    gemm.map.own_part = places_.rank;
    if (awaits_) return;
    // Something arrives before each launch, so none is empty.
    if (carrier_ < 0 && plan::can(plan.kernel, plan::kCopiesBeside) &&
        places_.parts - 1 <= plan::kMaxCopyRuns) {
      carrier_ = gemm.weight;
    }
    const int32_t columns = list_.made.orders[at(gemm.order)].tiles_n;
    launches_.back() = plan::gather_launches(plan::gather_arrivals(plan, columns), plan.cluster_m,
                                             gemm.ctas, sm_count);
  }

  // The launches when this rank's own rows are there (0), and after chunk `arrival` - 1, which the step brings.
  void compute(int32_t arrival, StepId brought = 0) {
    if (arrival > 0) after_.push_back(brought);
    for (size_t weight = 0; weight < weights_.size(); ++weight) {
      if (weights_[weight].kernel_takes) {
        const plan::GatherLaunch& range = launches_[weight][at(arrival)];
        Gemm gemm = gemms_[weight];
        gemm.first_tile = range.first_tile;
        gemm.end_tile = range.end_tile;
        gemm.ctas = range.at_once;
        if (gemm.weight == carrier_) gemm.moves = places_.moves(arrival);
        launch(std::move(gemm));
      } else if (arrival == 0) {
        const int64_t first = places_.rank * places_.part_rows;
        launch_library(weight, {first, first + places_.part_rows}, {Buffer::kInput});
      } else {
        for (int32_t part = 0; part < places_.parts; ++part) {
          if (part == places_.rank) continue;
          launch_library(weight, places_.rows_of(arrival - 1, part),
                         places_.arrived(arrival - 1, part));
        }
      }
    }
  }

  // GEMMs that wait for rows themselves: all own rows' tiles first, those of the last weight in one launch with the
  // others' rows. The last launch ends the call.
  void launch_at_once() {
    const size_t last = gemms_.size() - 1;
    const auto own_tiles = [&](size_t weight) {
      return list_.made.orders[at(gemms_[weight].order)].chunk_begin[1];
    };
    for (size_t weight = 0; weight < last; ++weight) {
      launch_tiles(weight, 0, own_tiles(weight), false);
    }
    for (int32_t arrival = 0; arrival <= places_.chunks; ++arrival) {
      for (const Move& move : places_.moves(arrival)) gemms_[last].moves.push_back(move);
    }
    launch_tiles(last, 0, gemms_[last].end_tile, last == 0);
    for (size_t weight = 0; weight < last; ++weight) {
      launch_tiles(weight, own_tiles(weight), gemms_[weight].end_tile, weight + 1 == last);
    }
  }

 private:
  void launch_library(size_t number, plan::Rows rows, Where input) {
    const auto weight = static_cast<int32_t>(number);
    const int64_t row_bytes = weights_[number].columns * plan::output_bytes(places_.plan.problem);
    launch(LibraryGemm{weight, rows, input, {{Buffer::kOutput, rows.begin * row_bytes, weight}}});
  }

  // The first step of an arrival is the one that waits for it.
  template <typename Kind>
  void launch(Kind what) {
    list_.add(Lane::kCaller, std::move(what), std::exchange(after_, {}));
  }

  void launch_tiles(size_t weight, int32_t first_tile, int32_t end_tile, bool ends_call) {
    Gemm gemm = gemms_[weight];
    gemm.first_tile = first_tile;
    gemm.end_tile = end_tile;
    gemm.awaits_chunks = true;
    gemm.ends_call = ends_call;
    launch(std::move(gemm));
  }

  const GatherPlaces& places_;
  List& list_;
  const std::vector<Weight> weights_;
  bool awaits_ = false;
  int32_t carrier_ = -1;  // the weight whose GEMM copies rows into the gathered input, or none
  std::vector<Gemm> gemms_;
  // The launches of each weight, unless one launch waits: own rows, then chunk by chunk.
  std::vector<std::vector<plan::GatherLaunch>> launches_;
  std::vector<StepId> after_;
};

// The order of all that, and the copies into the gathered input that no GEMM does.
class Consume : Family {
 public:
  explicit Consume(const RankCall& call)
      : Family(call),
        places_(call),
        launches_(places_, list_, weights()),
        messages_(places_, list_, launches_.awaits()) {
    for (const Weight& weight : weights()) {
      Gemm gemm;
      if (weight.kernel_takes) gemm = gemm_of_all(plan::gather_order(plan_, weight.columns));
      launches_.add(std::move(gemm), machine_.sm_count);
    }
  }

  StepList lower() {
    list_.made.steps.reserve(at(8 + chunks_ * (3 + places_.parts)));
    messages_.prepare();
    if (places_.on_cpu) return lower_on_cpu();
    if (callers_) bring(0);
    const bool awaits = launches_.awaits();
    const bool carried = callers_ || awaits || launches_.carries();
    const bool computes = !callers_ && !awaits;
    list_.add(Lane::kCaller, Fork{messages_.lanes(), !carried});
    // The own rows' GEMM starts while the host enqueues the rest.
    if (awaits) launches_.launch_at_once();
    if (computes) launches_.compute(0);
    messages_.begin();
    std::vector<StepId> brought;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      brought.push_back(messages_.finish(chunk, messages_.send(chunk)));
      if (callers_) bring(chunk + 1);
    }
    for (int32_t chunk = 0; chunk < chunks_ && computes; ++chunk) {
      launches_.compute(chunk + 1, brought[at(chunk)]);
    }
    if (callers_) launch_callers();
    if (!carried) copy(Lane::kCopy, 0);
    for (int32_t chunk = 0; chunk < chunks_ && !carried; ++chunk) {
      copy(Lane::kCopy, chunk + 1, {brought[at(chunk)]});
    }
    list_.add(Lane::kCaller, Join{});
    if (peers_ && !awaits) list_.add(Lane::kCaller, EndCall{});
    return std::move(list_.made);
  }

 private:
  std::vector<Weight> weights() const {
    if (callers_) return {};
    if (!variant_.weights.empty()) return variant_.weights;
    return {{plan_.problem.n, variant_.compute == Compute::kKernel}};
  }

  // All messages are on their way before anything is computed.
  StepList lower_on_cpu() {
    list_.add(Lane::kCaller, Fork{messages_.lanes(), false});
    messages_.begin();
    std::vector<StepId> sent;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) sent.push_back(messages_.send(chunk));
    copy(Lane::kCaller, 0);
    launches_.compute(0);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      launches_.compute(chunk + 1, messages_.finish(chunk, sent[at(chunk)]));
    }
    list_.add(Lane::kCaller, Join{});
    return std::move(list_.made);
  }

  // These moves as steps, of which the first comes after others.
  void copy(Lane lane, int32_t arrival, std::vector<StepId> after = {}) {
    for (const Move& move : places_.moves(arrival)) {
      list_.add(lane, Copy{move.from, move.to, move.bytes}, std::exchange(after, {}));
    }
  }

  // A caller's kernel reads all rows in the gathered input, and is told of arrivals: of this rank's rows, counter 0, and of
  // each chunk. They come in their order, so that a kernel which has seen one has all those before.
  void bring(int32_t arrival) {
    const Lane lane = arrival == 0 ? Lane::kCaller : messages_.arrives_on(arrival - 1);
    copy(lane, arrival);
    std::vector<StepId> after;
    if (arrival > 1 && list_.made.steps[at(arrivals_.back())].lane != lane) {
      after.push_back(arrivals_.back());
    }
    const StepId told = list_.add(lane, Arrive{arrival}, std::move(after));
    if (arrival > 0) arrivals_.push_back(told);
  }

  // A kernel that does not await what arrives comes after all of it.
  void launch_callers() {
    std::vector<Claim> claims;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      for (int32_t part = 0; part < places_.parts; ++part) {
        claims.push_back({places_.rows_of(chunk, part), part == rank_ ? 0 : chunk + 1});
      }
    }
    list_.made.counters = chunks_ + 1;
    CallersTiles(plan_, list_).assign(plan_.problem.m, claims, false);
    if (variant_.awaits) arrivals_.clear();
    list_.add(Lane::kCaller, CallersKernel{false, variant_.awaits}, std::move(arrivals_));
  }

  const GatherPlaces places_;
  GatherLaunches launches_;
  GatherMessages messages_;
  std::vector<StepId> arrivals_;  // that a kernel of the caller's is told of
};

}  // namespace

StepList lower_consume(const RankCall& call) {
  return Consume(call).lower();
}

}  // namespace overlap::steps
