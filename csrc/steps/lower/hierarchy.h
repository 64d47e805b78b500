// Communication in two levels: ranks of a clique, which share a host, and cliques. The ranks of all cliques that have the
// same place in theirs are a row of counterparts.
//
//   reduction    a rank's clique adds up its share of a chunk | counterparts add up their sums | results to the clique
//   all-gather   own rows to the clique, and to counterparts | counterparts' rows to the clique
//
// Each row so crosses between cliques once, by NCCL's messages. Within a clique copy engines move rows into the peers'
// slots; where the plan's transport is not peer, messages do.
//
//   side 0   | wait 0 [A] | terms 0 to the clique | signal | wait 1 [A] | terms 1 | signal | ... signal sums 0
//   side 1   |            | wait for the clique | add 0 |              | wait | add 1 |
//   side 2   |                                          | messages 0 | add | sums 0 to counterparts, to the clique |
//   copy     |                                                                             | wait | sums 0 of the clique
#pragma once

#include <vector>

#include "steps/lower/callers.h"

namespace overlap::steps {

// A rank's place among cliques of equal size, which follow each other.
class CliquePlace {
 public:
  CliquePlace(const plan::Plan& plan, int32_t rank)
      : clique_(std::max(1, plan.clique)),
        cliques_(plan.problem.world_size / clique_),
        place_(rank % clique_),
        number_(rank / clique_) {}

  int32_t clique() const { return clique_; }    // ranks
  int32_t cliques() const { return cliques_; }  // their number
  int32_t place() const { return place_; }      // of this rank in its clique
  int32_t number() const { return number_; }    // of its clique
  int32_t rank(int32_t number, int32_t place) const { return number * clique_ + place; }

  // Others in its clique, and of their places; the next one first.
  std::vector<int32_t> places() const { return others(clique_, place_); }
  // Numbers of other cliques; the next one first.
  std::vector<int32_t> numbers() const { return others(cliques_, number_); }

 private:
  static std::vector<int32_t> others(int32_t count, int32_t own) {
    std::vector<int32_t> all;
    for (int32_t distance = 1; distance < count; ++distance)
      all.push_back((own + distance) % count);
    return all;
  }

  int32_t clique_;
  int32_t cliques_;
  int32_t place_;
  int32_t number_;
};

// The lanes and communicators of both levels.
class Levels {
 public:
  Levels(const plan::Plan& plan, List& list) : plan_(plan), list_(list) {}

  // Lanes 0 and 1 are for the cliques.
  int32_t side_lanes() const { return 2 + plan_.resources.lanes; }
  Lane across(int32_t chunk) const { return side_lane(2 + chunk % plan_.resources.lanes); }
  void add_communicators() {
    list_.add_communicators(plan_);
    if (!plan::over_peers(plan_)) list_.made.communicators.push_back(within());
  }
  SendReceive messages_across(int32_t chunk) const {
    return {max_ctas(), chunk % plan_.resources.lanes, {}, {}};
  }
  SendReceive messages_within() const { return {within().max_ctas, within().lane, {}, {}}; }

 private:
  int32_t max_ctas() const { return plan_.chunks[0].max_ctas; }
  Communicator within() const { return {max_ctas(), plan_.resources.lanes}; }

  const plan::Plan& plan_;
  List& list_;
};

// Appends a message, unless it is empty.
inline void add_message(std::vector<Message>& messages, int32_t peer, Where where, int64_t bytes) {
  if (bytes > 0) messages.push_back({peer, where, bytes});
}

// Reduces chunks that lie row-major in this rank's memory.
class HierarchicalReduction {
 public:
  // A chunk's rows in memory; of a reduce-scatter one run of them for each rank.
  struct Chunk {
    std::vector<Where> parts;
    Where result;  // of a reduce-scatter
  };

  HierarchicalReduction(const plan::Plan& plan, int32_t rank, List& list);

  const Levels& levels() const { return levels_; }
  // Communicators and memory.
  void prepare();
  // Sends a chunk's terms within the clique, after what their lane, side 0, did before.
  void begin(int32_t chunk, Chunk where);
  // Adds it up, and brings an all-reduce's sums to all; the last step of that. The next chunk has begun by then.
  StepId finish(int32_t chunk);

 private:
  // Rows of a chunk's part that one of the clique's ranks adds up, and of these rows those that one clique does.
  struct Run {
    Where source;
    int64_t landing = 0;  // row among the rank's
    int64_t rows = 0;
  };
  // A chunk whose terms are on their way: messages and this rank's own are there after a step, peers' after the signal.
  struct Sent {
    StepId last = 0;
    int32_t signal = 0;
  };
  int64_t bytes(int64_t rows) const { return rows * row_bytes_; }
  int64_t height(int32_t chunk) const;
  int64_t grain(int32_t chunk) const;
  int64_t rows_of(int32_t chunk, int32_t place) const;
  int64_t rows_of(int32_t chunk, int32_t place, int32_t number) const;
  std::vector<Run> runs(int32_t chunk, int32_t place) const;
  Where cell(int32_t chunk, int32_t place, int32_t number) const;

  Where land(int32_t place, int64_t offset) const;
  Where term(int32_t to, int32_t from, int32_t chunk) const;
  Where sums(int32_t chunk) const;
  Where far_term(int32_t number, int32_t chunk) const;

  void send_terms(int32_t chunk);
  StepId copy_own(int32_t chunk, Lane lane, std::vector<StepId> after);
  SendReceive terms(int32_t chunk) const;
  StepId add_within(int32_t chunk);
  StepId exchange(int32_t chunk, StepId after);
  StepId add_across(int32_t chunk);
  void gather_across(int32_t chunk);
  StepId gather_within(int32_t chunk);

  const plan::Plan& plan_;
  const CliquePlace at_;
  List& list_;
  Levels levels_;
  const bool all_reduces_;
  const bool peers_;
  const int64_t row_bytes_;
  const std::vector<int64_t> heights_;  // rows that this rank adds up, of each chunk
  const int64_t stride_;                // bytes from one rank's terms to the next one's
  std::vector<int64_t> first_;          // row of each chunk among them
  std::vector<int64_t> far_first_;      // the same among those of one clique
  int64_t far_rows_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<Sent> sent_;
  int32_t signals_ = 0;
};

}  // namespace overlap::steps
