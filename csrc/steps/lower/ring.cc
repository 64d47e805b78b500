// Reductions over peers, a part after the other: in each phase a rank computes one part, its own last. A ring adds what
// came from the rank before, and passes the sum on. With owners each part goes straight to its owner, who adds all terms
// in the last phase. All phases are one launch, which announces and awaits single tiles; where the framework computes, a
// phase follows the other.
#include "plan/ring_order.h"
#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

class Ring : Family {
 public:
  explicit Ring(const RankCall& call)
      : Family(call),
        owners_(plan_.collective == plan::Collective::kOwners),
        part_rows_(plan::part_rows(plan_)),
        part_bytes_(part_rows_ * row_bytes_),
        part_tile_rows_(plan::tiles_m(plan_) / ranks_),
        part_tiles_(static_cast<int64_t>(part_tile_rows_) * plan::tiles_n(plan_)) {}

  StepList lower() {
    list_.add_slot(plan::peer_slot_bytes(plan_), all_reduces_ || ranks_ == 2);
    list_.add(Lane::kCaller, WaitForSlots{});
    list_.communicates = 0;
    if (variant_.compute == Compute::kKernel) {
      launch();
    } else {
      list_.add_scratch(Buffer::kPartial, part_bytes_);
      for (int32_t phase = 0; phase < ranks_; ++phase) compute_by_library(phase);
      if (all_reduces_) collect();
      list_.communicates = -1;
      list_.add(Lane::kCaller, EndCall{});
    }
    list_.communicates = -1;
    if (variant_.bias) {
      const int64_t rows = all_reduces_ ? plan_.problem.m : part_rows_;
      list_.add(Lane::kCaller, AddTerms{{Buffer::kOutput}, {Buffer::kOutput}, rows, 0});
    }
    return std::move(list_.made);
  }

 private:
  // The part that this rank computes in a phase; in the last one its own.
  int32_t part_of(int32_t phase) const { return (rank_ + 2 * ranks_ - 1 - phase) % ranks_; }

  // Rows of a part in bytes: the last one may be shorter, its place in slots is not.
  int64_t bytes_of(int32_t part) const {
    return plan::rows_of_part(plan_, part).count() * row_bytes_;
  }

  Where own_part() const { return {Buffer::kOutput, all_reduces_ ? rank_ * part_bytes_ : 0}; }

  // Parts in a slot before the finished ones: one of each phase but the last, or of each rank.
  int32_t parts_before() const { return owners_ ? ranks_ : ranks_ - 1; }

  // Where `part`, finished, arrives in the memory of `rank`.
  Where finished(int32_t rank, int32_t part) const {
    return {Buffer::kSlot, (parts_before() + part) * part_bytes_, rank};
  }

  // With owners: where rank `from`'s term arrives in the memory of `owner`.
  Where term(int32_t owner, int32_t from) const {
    return {Buffer::kSlot, from * part_bytes_, owner};
  }

  // Where a phase stores, and what it adds: nothing the first one, else what came from the rank before.
  Target target(int32_t phase) const {
    Target target = {own_part()};
    if (owners_) {
      if (phase + 1 < ranks_) {
        target.where = term(part_of(phase), rank_);
      } else if (ranks_ == 2) {  // one source, as a ring's
        target.adds = term(rank_, 1 - rank_);
      }
      return target;
    }
    if (phase + 1 < ranks_) {
      target.where = {Buffer::kSlot, phase * part_bytes_, (rank_ + 1) % ranks_};
    }
    if (phase > 0) target.adds = {Buffer::kSlot, (phase - 1) * part_bytes_, rank_};
    return target;
  }

  void launch() {
    const int32_t round_rows = plan::ring_round_rows(plan_);
    Gemm gemm =
        gemm_of_all(plan::ring_order(ranks_, part_tile_rows_, plan::tiles_n(plan_), round_rows));
    gemm.outputs.resize(at(ranks_));
    for (int32_t phase = 0; phase < ranks_; ++phase) {
      gemm.outputs[at(part_of(phase))] = target(phase);
    }
    gemm.map.mode = plan::RowMap::Mode::kSplit;
    gemm.map.part_rows = static_cast<int32_t>(part_rows_);
    gemm.map.part_tile_rows = part_tile_rows_;
    gemm.map.first_part = part_of(0);
    gemm.map.part_step = ranks_ - 1;
    gemm.map.round_tile_rows = round_rows;
    if (all_reduces_) {
      for (int32_t distance = 1; distance < ranks_; ++distance) {
        gemm.mirrors.push_back(finished(rank_after(distance), rank_));
      }
      gemm.arriving = finished(rank_, 0);
    }
    gemm.rounds = owners_;
    if (owners_ && ranks_ > 2) gemm.terms_at = term(rank_, 0);
    gemm.announces = true;
    gemm.spread_ns = spread_ns(plan_, machine_);
    gemm.ends_call = true;
    const StepId launched = list_.add(Lane::kCaller, gemm);
    if (all_reduces_) list_.hold(launched);
  }

  void compute_by_library(int32_t phase) {
    const int32_t part = part_of(phase);
    const bool last = phase + 1 == ranks_;
    Target target = this->target(phase);
    if (owners_ && last) target = {term(rank_, rank_)};
    const Where place = last ? target.where : Where{Buffer::kPartial};
    list_.communicates = -1;
    LibraryGemm gemm = library_gemm(plan::rows_of_part(plan_, part), place);
    gemm.output.adds = target.adds;
    list_.add(Lane::kCaller, gemm);
    list_.communicates = 0;
    if (last) {
      if (owners_) add_terms();
      return;
    }
    list_.add(Lane::kCaller, Copy{place, target.where, bytes_of(part)});
    if (owners_) {
      announce_term(ranks_ - 1 - phase);
    } else {
      list_.add(Lane::kCaller, MeetTiles{phase * part_tiles_, phase * part_tiles_, part_tiles_, 1});
    }
  }

  // To the owner, `distance` ranks before this one, before anything is awaited: its GEMM may hold all its SMs until this term comes.
  void announce_term(int32_t distance) {
    MeetTiles meet = {0, 0, part_tiles_, distance};
    meet.awaits = false;
    list_.add(Lane::kCaller, meet);
  }

  // Does the kernel's own work on the terms of this rank's part.
  void add_terms() {
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      MeetTiles meet = {0, (distance - 1) * part_tiles_, part_tiles_, distance};
      meet.announces = false;
      list_.add(Lane::kCaller, meet);
    }
    const int64_t count = plan::rows_of_part(plan_, rank_).count();
    list_.add(Lane::kCaller,
              AddTerms{term(rank_, 0), own_part(), count, 0, ranks_, part_bytes_, false});
  }

  // Does the kernel's own work on final tiles.
  void collect() {
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const Copy copy = {own_part(), finished(rank_after(distance), rank_), bytes_of(rank_)};
      const StepId copied = list_.add(Lane::kCaller, copy);
      if (distance == 1) list_.hold(copied);
    }
    const int64_t first = (ranks_ - 1) * part_tiles_;
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      list_.add(Lane::kCaller,
                MeetTiles{first, first + (distance - 1) * part_tiles_, part_tiles_, distance});
      const int32_t part = rank_before(distance);
      list_.add(Lane::kCaller,
                Copy{finished(rank_, part), {Buffer::kOutput, part * part_bytes_}, bytes_of(part)});
    }
  }

  const bool owners_;
  const int64_t part_rows_;
  const int64_t part_bytes_;
  const int32_t part_tile_rows_;
  const int64_t part_tiles_;
};

}  // namespace

StepList lower_ring(const RankCall& call) {
  return Ring(call).lower();
}

}  // namespace overlap::steps
