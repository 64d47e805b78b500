// The steps of a plan with a program, on one rank.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "steps/lower/callers.h"
#include "steps/lower/families.h"

namespace overlap::steps {

// Where the memories of a program are on a rank, and what lands where in slots.
class ProgramPlaces {
 public:
  static constexpr int64_t kAlignment = 256;

  explicit ProgramPlaces(const RankCall& call);

  bool is_sent(const plan::Transfer& one) const { return one.source.rank == rank; }
  const plan::Region& own_side(const plan::Transfer& one) const {
    return is_sent(one) ? one.source : one.destination;
  }
  // Rows of a memory; an all-to-all's are shares of messages.
  plan::Rows rows_of(const plan::Region& region) const;
  int64_t height(const plan::Region& region) const { return rows_of(region).count(); }
  int64_t width(const plan::Region& region) const { return region.area.columns * element_bytes; }
  int64_t bytes_of(const plan::Transfer& one) const {
    return height(own_side(one)) * width(own_side(one));
  }
  Where place(const plan::Region& region) const;
  // True if its rows follow each other without a gap.
  bool one_run(const plan::Region& region) const {
    return width(region) == row_bytes || height(region) == 1;
  }
  Where landing(size_t number) const;
  static int64_t rounded_up(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  const plan::Plan& plan;
  const std::vector<plan::Transfer>& transfers;
  const int32_t rank;
  const int32_t ranks;
  const bool gathers;
  const bool to_all;
  const int64_t part_rows;
  const int64_t element_bytes;
  const int64_t row_bytes;
  const Buffer product;
  std::vector<int64_t> send_begin;  // of an all-to-all's messages, one more than ranks
  std::vector<int64_t> receive_begin;
  int64_t slot_bytes = kAlignment;

 private:
  void place_landings(const Variant& variant);

  std::vector<int64_t> landings_;  // where each transfer's is in its slot
  int64_t room_ = 0;               // of an all-to-all's message
};

// True if a transfer between ranks lands in a slot; NCCL or gloo makes the others.
bool lands(const plan::Plan& plan, const plan::Transfer& one);

// Builds the list in the order of the program: what is computed, each round of transfers, the result.
class ProgramBuilder : Family {
 public:
  explicit ProgramBuilder(const RankCall& call);
  StepList lower();

 private:
  static constexpr StepId kNone = -1;

  const plan::Transfer& transfer(size_t number) const { return places_.transfers[number]; }
  std::map<int32_t, std::vector<size_t>> own_rounds() const;
  Where stage(int64_t bytes);

  // Computes the product, and the result.
  void compute_before();
  void compute_product();
  void compute_messages();
  void compute_gathered(plan::Rows rows, const std::vector<StepId>& after);
  void compute_arrived();
  void add_library(plan::Rows rows, Where output);
  void finish();

  // Each transfer as steps of its stream's lane.
  void communicate();
  CopyRows rows_of(size_t number, bool sends, Where landing) const;
  void copy(size_t number);
  void call(const std::vector<size_t>& transfers);
  void send(size_t number);
  void receive(size_t number);
  Where sent_place(const plan::Transfer& one, Lane lane, std::vector<StepId>& after);
  StepId add_copy(const CopyRows& one, Lane lane, std::vector<StepId> after);
  void await_needs(size_t number, Lane lane, std::vector<StepId>& after);
  void await_tiles(const plan::Rectangle& area, Lane lane, std::vector<StepId>& after);
  void await_step(StepId id, Lane lane, std::vector<StepId>& after) const;

  // How many tiles count for a chunk.
  int32_t tiles_of(int32_t chunk) const {
    return callers_ ? tiles_.counted(chunk) : plan_.chunks[at(chunk)].tiles;
  }

  const ProgramPlaces places_;
  const std::vector<int32_t> rounds_;
  const int32_t lanes_;
  int32_t calls_ = 0;  // messages, which timelines show as chunks
  int64_t staging_bytes_ = 0;
  std::vector<StepId> computed_;           // each chunk, by the framework's GEMM
  std::map<int64_t, StepId> pieces_;       // of messages, by their first share
  std::vector<std::set<int32_t>> waited_;  // of each lane: chunks
  std::vector<StepId> arrived_;            // of each transfer that ends here
  std::vector<StepId> left_;               // of each that begins here
  std::vector<bool> lane_waited_for_slots_;
  CallersTiles tiles_ = {plan_, list_};
};

}  // namespace overlap::steps
