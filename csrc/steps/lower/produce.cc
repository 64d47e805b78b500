// Computation before communication, chunk by chunk: over NCCL, or in two levels.
#include <limits>
#include <optional>

#include "steps/lower/callers.h"
#include "steps/lower/families.h"
#include "steps/lower/hierarchy.h"

namespace overlap::steps {
namespace {

// Kernels that finish chunks have one CTA per block of work. The few SMs that GEMM and
// communication leave take some of them, and all SMs take the rest as soon as the GEMM has ended.
constexpr int32_t kDefaultFinishCtas = std::numeric_limits<int32_t>::max();

class Produce : Family {
 public:
  explicit Produce(const RankCall& call)
      : Family(call),
        finish_ctas_(plan_.resources.finish_ctas > 0 ? plan_.resources.finish_ctas
                                                     : kDefaultFinishCtas),
        compute_(variant_.compute),
        row_parts_(plan::row_parts(plan_)),
        packed_(plan_.layout == plan::Layout::kPacked),
        exchanges_(plan_.collective == plan::Collective::kExchange),
        makes_product_(packed_ ? compute_ != Compute::kKernel : callers_ && row_parts_ > 1),
        chunk_places_(plan_, callers_),
        rows_(chunk_places_.rows),
        extents_(chunk_places_.extents),
        buffer_(staging()) {
    if (plan::hierarchical(plan_)) levels_.emplace(plan_, rank_, list_);
  }

  StepList lower() {
    list_.made.steps.reserve(at(chunks_ * (compute_ == Compute::kKernel ? 3 : 2 + row_parts_) + 3));
    list_.made.counters = chunks_;
    const int64_t product_bytes = plan_.problem.m * row_bytes_;
    const bool matrix = callers_ && !packed_;
    if (buffer_ != Buffer::kOutput) {
      list_.add_scratch(buffer_, matrix ? product_bytes : staging_bytes(plan_));
    }
    if (makes_product_) list_.add_scratch(Buffer::kProduct, product_bytes);
    if (!levels_) list_.add_communicators(plan_);
    if (levels_) levels_->prepare();
    bool copies = peers_ && all_reduces_;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) copies = copies || finishes(chunk);
    list_.add(Lane::kCaller,
              Fork{levels_ ? levels_->levels().side_lanes() : plan_.resources.lanes, copies});
    // The producer goes first: what waits for it must never be able to keep it out.
    begin();
    levels_ ? communicate_in_levels() : communicate_chunks();
    list_.add(Lane::kCaller, Join{});
    if (peers_) list_.add(Lane::kCaller, EndCall{});
    return std::move(list_.made);
  }

 private:
  Lane side(int32_t chunk) const {
    return levels_ ? Lane::kSide0 : side_lane(chunk % plan_.resources.lanes);
  }

  void communicate_chunks() {
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      complete(chunk);
      const StepId communicated = communicate(chunk);
      if (finishes(chunk)) finish(chunk, communicated);
    }
  }

  // A chunk is on its way within cliques while the one before it crosses between them.
  void communicate_in_levels() {
    if (peers_) list_.add(Lane::kSide0, WaitForSlots{});
    for (int32_t chunk = 0; chunk <= chunks_; ++chunk) {
      if (chunk < chunks_) {
        complete(chunk);
        HierarchicalReduction::Chunk one;
        for (int32_t part = 0; part < row_parts_; ++part) one.parts.push_back(place(chunk, part));
        one.result = result(chunk);
        levels_->begin(chunk, std::move(one));
      }
      if (chunk == 0) continue;
      const StepId communicated = levels_->finish(chunk - 1);
      if (finishes(chunk - 1)) finish(chunk - 1, communicated);
    }
  }

  // Where chunks are communicated. A caller's kernel stores where sums are added up: in the output, or a window.
  Buffer staging() const {
    const Buffer staging = staging_of(plan_, variant_, extents_);
    const bool in_output = callers_ && !packed_ && row_parts_ == 1 && staging != Buffer::kWindow;
    const bool in_place = all_reduces_ && !packed_ && !plan_.resources.window;
    return in_output || in_place ? Buffer::kOutput : staging;
  }

  // Computes, or launches, before any chunk is complete.
  void begin() {
    if (packed_ && compute_ != Compute::kKernel) list_.add_order(plan::tile_order(plan_));
    switch (compute_) {
      case Compute::kKernel:
        return launch();
      case Compute::kLibrary:
        if (packed_) {
          list_.add(Lane::kCaller, library_gemm({0, plan_.problem.m}, {Buffer::kProduct}));
        }
        return;
      case Compute::kCallers:
        return launch_callers();
    }
  }

  void launch() {
    Gemm gemm = gemm_of_all(plan::tile_order(plan_));
    gemm.outputs = {{{buffer_}}};
    gemm.term = exchanges_ ? rank_ : 0;
    gemm.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
    if (row_parts_ > 1) {
      gemm.map.mode = plan::RowMap::Mode::kScatter;
      gemm.map.part_rows = static_cast<int32_t>(plan::part_rows(plan_));
    }
    gemm.counts = true;
    list_.add(Lane::kCaller, gemm);
  }

  void launch_callers() {
    list_.made.tiles.stores = makes_product_ ? Buffer::kProduct : buffer_;
    if (packed_) {
      tiles_.assign(list_.made.orders[0]);
    } else {
      std::vector<Claim> claims;
      for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
        for (int32_t part = 0; part < row_parts_; ++part) {
          claims.push_back({rows_of(chunk, part), chunk});
        }
      }
      tiles_.assign(plan_.problem.m, claims, true);
    }
    list_.add(Lane::kCaller, CallersKernel{true, false});
  }

  // Until the chunk lies where it is communicated.
  void complete(int32_t chunk) {
    switch (compute_) {
      case Compute::kKernel:
        list_.add_held(side(chunk), WaitForTiles{chunk, plan_.chunks[at(chunk)].tiles});
        return;
      case Compute::kLibrary:
        list_.add_held(side(chunk), Mark{chunk}, {compute(chunk)});
        return;
      case Compute::kCallers:
        tiles_.wait(side(chunk), chunk);
        if (makes_product_) gather(chunk);
        return;
    }
  }

  // The framework's GEMM of the chunk's rows of each part; or its tiles, once all are computed.
  StepId compute(int32_t chunk) {
    if (packed_) return pack(Lane::kCaller, chunk);
    for (int32_t part = 0; part < row_parts_; ++part) {
      list_.add(Lane::kCaller, library_gemm(rows_of(chunk, part), place(chunk, part)));
    }
    return list_.last();
  }

  // The chunk's tiles of the product, or its rows of each part, into one run.
  void gather(int32_t chunk) {
    if (packed_) {
      pack(side(chunk), chunk);
      return;
    }
    for (int32_t part = 0; part < row_parts_; ++part) {
      const Where rows = {Buffer::kProduct, rows_of(chunk, part).begin * row_bytes_};
      list_.add(side(chunk),
                Copy{rows, place(chunk, part), extents_[at(chunk)].count * element_bytes_});
    }
  }

  StepId pack(Lane lane, int32_t chunk) {
    Pack pack;
    pack.chunk = chunk;
    pack.source = {Buffer::kProduct};
    pack.destination = {buffer_};
    pack.term = exchanges_ ? rank_ : 0;
    pack.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
    pack.ctas = finish_ctas_;
    return list_.add(lane, pack);
  }

  StepId communicate(int32_t chunk) {
    const int32_t lane = chunk % plan_.resources.lanes;
    const Where source = place(chunk, exchanges_ ? rank_ : 0);
    const Where destination = row_parts_ > 1 ? result(chunk) : place(chunk, 0);
    return list_.add_of_chunk(chunk, side(chunk),
                              Collective{plan_.collective, plan_.chunks[at(chunk)].max_ctas, lane,
                                         source, destination, extents_[at(chunk)].count});
  }

  // True if something is left to do once the chunk has been communicated.
  bool finishes(int32_t chunk) const {
    return packed_ || variant_.bias || !(result(chunk) == output(chunk));
  }

  void finish(int32_t chunk, StepId communicated) {
    const int64_t rows = rows_[at(chunk)].count();
    std::vector<StepId> after = {communicated};
    if (list_.made.steps[at(communicated)].lane == Lane::kCopy) after.clear();
    if (packed_) {
      Unpack unpack;
      unpack.chunk = chunk;
      unpack.source = {buffer_};
      unpack.destination = {Buffer::kOutput};
      unpack.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
      unpack.ctas = finish_ctas_;
      unpack.bias = variant_.bias;
      list_.add(Lane::kCopy, unpack, std::move(after));
    } else if (variant_.bias) {
      list_.add(Lane::kCopy, AddTerms{result(chunk), output(chunk), rows, finish_ctas_},
                std::move(after));
    } else {
      // The copy engine, which takes no SM from GEMM and communication.
      list_.add(Lane::kCopy, Copy{result(chunk), output(chunk), rows * row_bytes_},
                std::move(after));
    }
  }

  // A chunk's rows of a part, in the product.
  plan::Rows rows_of(int32_t chunk, int32_t part) const {
    return rows_[at(chunk)].behind(part * plan::part_rows(plan_));
  }

  // Where a chunk, or one part of it, lies in what is communicated.
  Where place(int32_t chunk, int32_t part) const {
    const plan::Extent& extent = extents_[at(chunk)];
    return {buffer_, (extent.offset + part * extent.count) * element_bytes_};
  }

  Where output(int32_t chunk) const {
    return {Buffer::kOutput, rows_[at(chunk)].begin * row_bytes_};
  }

  // Where the communicated rows of a row-major chunk lie. A reduce-scatter puts them where the caller wants them,
  // unless NCCL should take its window kernels, or the last tile is larger than what is left of the output.
  Where result(int32_t chunk) const {
    if (row_parts_ == 1) return place(chunk, 0);
    const bool whole = extents_[at(chunk)].count == rows_[at(chunk)].count() * plan_.problem.n;
    return whole && buffer_ != Buffer::kWindow ? output(chunk) : place(chunk, rank_);
  }

  const int32_t finish_ctas_;
  const Compute compute_;
  const int32_t row_parts_;
  const bool packed_;
  const bool exchanges_;
  const bool makes_product_;  // a matrix, of which chunks are then gathered
  const ChunkPlaces chunk_places_;
  const std::vector<plan::Rows>& rows_;
  const std::vector<plan::Extent>& extents_;
  const Buffer buffer_;
  std::optional<HierarchicalReduction> levels_;
  CallersTiles tiles_ = {plan_, list_};
};

}  // namespace

StepList lower_produce(const RankCall& call) {
  return Produce(call).lower();
}

}  // namespace overlap::steps
