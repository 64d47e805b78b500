// The state of a simulation: what proof.h says, step by step.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/message.h"
#include "steps/list/list.h"
#include "steps/proof/contents.h"
#include "steps/proof/graph.h"
#include "steps/proof/proof.h"

namespace overlap::steps {

// Streams of callers, each with memory of its own.
inline constexpr int32_t kStreams = 2;

// Ends a simulation.
struct Found {
  Fault fault;
};

// Rows of a tile, or of several that follow each other in all places.
struct TileRows {
  bool own_input = false;
  int64_t input_row = 0;
  int64_t rows = 0;         // of the operand
  int64_t stored_rows = 0;  // with what fills up a part
  int32_t output = 0;       // which of the step's
  int64_t output_row = 0;
  int32_t first_column = 0;  // of tiles
  int32_t columns = 0;
  int32_t tile_row = 0;  // the first one, in the order
};

struct GemmPiece;  // a GEMM's unit of work

class Simulation {
 public:
  Simulation(const std::vector<Turn>& turns, const plan::Machine& machine)
      : turns_(turns), machine_(machine), ranks_(static_cast<int32_t>(turns[0].lists->size())) {}

  // Throws what is found.
  void run();

 private:
  using Node = Graph::Node;
  using Key = int64_t;  // a buffer or flag of a rank

  // The memory that there is beside a list's buffers.
  enum Kind : int32_t {
    kBuffers = 0,      // and what follows Buffer's numbers
    kCallsEnded = 16,  // in a slot, as the rank counts them
    kArrivedFlag,      // by writer and slot
    kBlockFlag,        // of collectives in one kernel, by writer, slot and step
    kTileFlags,        // by slot
    kLowLatency,       // by writer, and which of two
    kCounters,         // of finished tiles
    kCallersTiles,     // that a kernel of the caller's stores, by tile
  };
  static constexpr int32_t kOwners = 2;  // stripes of this index and more: what lies at a rank

  // Where a step, or a part of it, begins and ends.
  struct Span {
    Node first = 0;
    Node last = 0;
  };

  struct Label {
    int32_t turn = 0;
    int32_t rank = 0;
    StepId step = 0;
    const char* note = "";
  };

  // Nobody may touch these bytes between first and last, except for reads of what is read. Flags are numbers that grow in
  // a call, so that only those of different calls disturb each other.
  struct Access {
    Key key = 0;
    int64_t begin = 0;
    int64_t end = 0;
    Node first = 0;
    Node last = 0;
    bool write = false;
    bool flag = false;
  };

  struct Place {
    Key key = 0;
    int64_t offset = 0;

    Place behind(int64_t bytes) const { return {key, offset + bytes}; }
  };

  // A step's share of a device's SMs.
  struct Holder {
    int32_t rank = 0;
    Lane lane = Lane::kCaller;
    StepId step = 0;
    Node first = 0;
    Node last = 0;
    int32_t held = 0;
    int32_t needed = 0;  // to get on
    bool waits = false;  // for others while it holds them
    bool one_warp = false;
  };

  struct ArrivalSignal {
    int32_t step = 0;
    Node node = 0;
    Lane lane = Lane::kCaller;
    bool to_self = false;
  };
  struct ArrivalWait {
    Node node = 0;
    int32_t rank = 0;
    int32_t writer = 0;
    int32_t step = 0;
  };
  struct TileRange {
    int64_t begin = 0;
    int64_t end = 0;
    Node node = 0;
  };
  struct CommunicatorCall {
    Node first = 0;
    Node last = 0;
    const Collective* step = nullptr;
    Place source;
    Place destination;
  };
  struct MessageCall {
    Node first = 0;
    Node last = 0;
    Place where;
    int64_t bytes = 0;
  };
  // A collective or exchange in one kernel.
  struct Meeting {
    const char* kind = nullptr;
    std::vector<Node> announces;  // of each of its steps
    std::vector<Node> awaits;
  };
  // One rank in the call that is taken apart.
  struct Here {
    int32_t turn = 0;
    int32_t rank = 0;
    const Turn* call = nullptr;
    const plan::Plan* plan = nullptr;
    const Variant* variant = nullptr;
    const StepList* list = nullptr;
    StepId id = 0;
    Lane lane = Lane::kCaller;
    std::vector<Node> ends;                               // of each step
    std::vector<Lane> forked;                             // and not joined
    std::map<int32_t, std::pair<Node, int32_t>> counted;  // by counter: after what, how many
    std::vector<std::pair<Span, int32_t>> awaited;        // by a kernel of the caller's: chunks
    std::optional<Meeting> meeting;
    std::optional<Node> ended;
    Node begin = 0;
    Node last_chained = 0;
  };
  // A row of tiles of which some columns have been written.
  struct BegunRow {
    int64_t place = 0;
    std::vector<Run> what;
    std::vector<bool> columns;
  };

  // --- simulate.cc ---
  void expand(int32_t turn);
  void expand_rank(Here& here);
  Node node(const Here& here, const char* note = "");
  Node node_within(const Span& span, const Here& here, const char* note = "");
  void follow(Node& tail, Node next);  // an edge, and the new tail
  Node& tail(const Here& here, Lane lane);
  Place reads(const Span& span, const Here& here, const Where& where, int64_t bytes) {
    return use(span, here, where, bytes, false);
  }
  Place writes(const Span& span, const Here& here, const Where& where, int64_t bytes) {
    return use(span, here, where, bytes, true);
  }
  Place use(const Span& span, const Here& here, const Where& where, int64_t bytes, bool write);
  Place place(const Here& here, const Where& where, int64_t bytes, Node by) const;
  void touches(const Span& span, const Place& place, int64_t bytes, bool write);
  void moves(Node by, const Place& from, const Place& to, int64_t bytes);
  void moves(Node by, const Here& here, const Where& from, const Where& to, int64_t bytes) {
    moves(by, place(here, from, bytes, by), place(here, to, bytes, by), bytes);
  }
  void adds(Node by, const std::vector<Place>& terms, const std::vector<Place>& targets,
            int64_t bytes, bool bias);
  void use_flag(const Span& span, int32_t owner, Kind kind, int32_t index, int64_t begin,
                int64_t end, bool write);
  void reads_calls(const Span& span, const Here& here);
  void ends_call(Node node, Here& here);
  int64_t room(const Here& here, const Where& where) const;
  Key key(const Here& here, const Where& where) const;
  Key key(int32_t rank, int32_t kind, int32_t index, int32_t stream = 0) const;
  void effect(Node node, std::function<void()> what);
  void holds(const Here& here, const Span& span, int32_t held, int32_t needed, bool waits,
             bool one_warp = false);
  void holds_copy(const Here& here, const Span& span, const Where& source,
                  const Where& destination);
  int64_t columns(const Here& here, int32_t weight) const;
  int64_t row_bytes(const Here& here, int32_t weight) const;
  int64_t input_row_bytes(const Here& here) const;

  void check_joins(Here& here) const;
  Span begin_step(Here& here);
  Node end_of(Here& here, Span& span, const char* note);
#define OVERLAP_TAKE(Kind) void take(Here& here, const Kind& step, Span& span);
  OVERLAP_STEP_KINDS(OVERLAP_TAKE, OVERLAP_TAKE)
#undef OVERLAP_TAKE

  void compute(Node node, Here& here, const Gemm& step, const GemmPiece& piece);
  void compute_packed(Node node, Here& here, const Gemm& step, const GemmPiece& piece);
  void compute_rows(Node node, Here& here, const Gemm& step, const TileRows& rows, int32_t columns,
                    bool last);
  void pass_tiles(const Span& span, Here& here, const Gemm& step, const GemmPiece& piece);
  void collect(Here& here, const Gemm& step, const Span& span);
  void exchange(Here& here, const Gemm& step, const Span& span, Node made);
  void check_drawing(const Here& here, const Gemm& step) const;
  void move_rows(Node by, const Here& here, const Where& source, int64_t source_stride,
                 const Where& destination, int64_t destination_stride, int64_t rows,
                 int64_t row_bytes, bool adds);
  void move_by_indices(Node by, const Here& here, const CopyRows& step);
  // Numbers of kIndices, while contents are followed.
  std::optional<Place> indices(Node by, const Here& here, const std::optional<Where>& where,
                               int64_t count);
  std::vector<int64_t> numbers(const Place& from, int64_t count, int32_t turn, Node by) const;
  int64_t counted(const std::optional<Place>& count, int64_t most, int32_t turn, Node by) const;
  void await_counter(const Here& here, const Span& span, int32_t counter, int32_t count);
  void announce_tiles(Node node, const Here& here, int32_t distance, int64_t begin, int64_t end);
  void await_tiles(const Span& span, const Here& here, int64_t begin, int64_t end);
  std::vector<int32_t> peers_of(const Here& here) const;
  void await_arrival(const Span& span, const Here& here, int32_t writer, int32_t step);
  void await_slots(const Span& span, const Here& here);
  void meet(Node first, Here& here, const char* kind);
  Node then(Here& here, Span& span, const char* note);
  void reduce(Here& here, const PeerCollective& step, Span& span);
  void gather(Here& here, const PeerCollective& step, Span& span);
  void announce(Node node, Here& here, int32_t step);
  void await(Node node, Here& here, int32_t step);
  int64_t part_tiles(const Here& here) const;
  void consume_results(Here& here);

  Node hub();  // NCCL's work, once all are there
  void match_arrivals();
  void match_tiles();
  void match_collectives();
  void match_messages();
  void match_meetings(const std::vector<Here>& all);
  void agree(const Turn& turn, int32_t number) const;

  // --- simulate_checks.cc ---
  void check_circles();
  bool flags_disturb(const Access& a, const Access& b) const;
  void check_races();
  int32_t held_beside(const Holder& one, const std::vector<bool>& ended, std::string* who) const;
  void check_progress();
  void check_results();
  void share(Node hub, const std::vector<CommunicatorCall>& calls);
  std::string says(Node node) const;
  std::string says(int32_t turn, int32_t rank, StepId step) const;
  std::string name_of(Key key) const;
  const char* remedy(Fault::Kind kind) const;
  template <typename... Parts>
  [[noreturn]] void fail(Fault::Kind kind, const Parts&... parts) const {
    throw Found{{kind, plan::message(parts..., ": ", remedy(kind))}};
  }

  // Contents.
  std::vector<Run> read(const Place& from, int64_t bytes, Node by) const;
  template <typename Runs>
  void write(const Place& to, const Runs& runs) {
    contents_[to.key].write(to.offset, runs);
  }
  std::vector<Run> product(const std::vector<Run>& inputs, int64_t from_row_bytes,
                           int64_t to_row_bytes, int32_t weight, int32_t turn, Node by) const;
  // `commutes`: each term has been rounded, so that two make the same sum either way round.
  std::vector<Run> add(const std::vector<std::vector<Run>>& terms, bool by_library, Node by,
                       bool commutes = false);
  void add_bias(std::vector<Run>& runs, Node by) const;
  void write_columns(const Place& to, const TileRows& rows, int32_t columns,
                     const std::vector<Run>& what, Node by);
  void copy(const Place& from, const Place& to, int64_t bytes, Node by);
  void expect(const Here& here, Node by);
  void expect_runs(const std::vector<Run>& runs, int64_t offset, Content::Space space,
                   int32_t weight, int64_t position, const std::set<int32_t>& ranks,
                   const Here& here, Node by, bool biased, const char* what);

  const std::vector<Turn>& turns_;
  const plan::Machine& machine_;
  const int32_t ranks_;

  Graph graph_;
  std::vector<Label> labels_;
  std::vector<Access> accesses_;
  std::vector<std::vector<std::function<void()>>> effects_;
  std::vector<Holder> holders_;
  std::deque<Gemm> callers_;  // what kernels of the caller's do, as GEMMs

  // From call to call.
  static constexpr int32_t kTails = 16;
  std::vector<std::array<Node, kTails>>
      tails_;                // of each rank: of each stream's caller, of each lane
  std::vector<Node> chain_;  // of each rank: the device's last op
  std::array<std::vector<Node>, 2> slot_ends_;  // of each rank: where the last call in a slot ended
  int32_t low_latency_calls_ = 0;

  // The call that is taken apart.
  std::vector<std::vector<ArrivalSignal>> arrivals_;  // of each writer
  std::vector<ArrivalWait> arrival_waits_;
  std::vector<std::vector<TileRange>> tile_signals_;  // of each owner
  std::vector<std::vector<TileRange>> tile_waits_;
  std::map<std::pair<int32_t, int32_t>, std::vector<std::vector<CommunicatorCall>>> collectives_;
  // By sender, receiver and the communicator's lane.
  std::map<std::array<int32_t, 3>, std::vector<MessageCall>> sends_;
  std::map<std::array<int32_t, 3>, std::vector<MessageCall>> receives_;
  int32_t call_ = 0;

  Sums sums_;
  std::unordered_map<Key, Contents> contents_;
  std::map<Key, std::map<int32_t, BegunRow>> begun_rows_;  // by tile row
  std::vector<std::vector<Run>> results_;                  // of the ranks, of an all-reduce
};

}  // namespace overlap::steps
