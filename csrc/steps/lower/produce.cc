// Computation before communication, chunk by chunk, over NCCL.
#include <limits>

#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

// Kernels that finish chunks have one CTA per block of work. The few SMs that GEMM and
// communication leave take some of them, and all SMs take the rest as soon as the GEMM has ended.
constexpr int32_t kDefaultFinishCtas = std::numeric_limits<int32_t>::max();

class Produce {
 public:
  Produce(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
          const Variant& variant)
      : plan_(plan),
        rank_(rank),
        ctas_(ctas_beside(plan, machine)),
        finish_ctas_(plan.resources.finish_ctas > 0 ? plan.resources.finish_ctas
                                                    : kDefaultFinishCtas),
        variant_(variant),
        chunks_(static_cast<int32_t>(plan.chunks.size())),
        row_parts_(plan::row_parts(plan)),
        packed_(plan.layout == plan::Layout::kPacked),
        exchanges_(plan.collective == plan::Collective::kExchange),
        element_bytes_(plan::moved_bytes(plan.problem)),
        row_bytes_(plan.problem.n * element_bytes_),
        operand_bytes_(plan::element_bytes(plan.problem.dtype)),
        chunk_places_(plan),
        rows_(chunk_places_.rows),
        extents_(chunk_places_.extents),
        buffer_(communicates_in_place(plan) ? Buffer::kOutput
                                            : staging_of(plan, variant, extents_)) {}

  StepList lower() {
    list_.made.steps.reserve(index(chunks_ * (variant_.kernel_takes ? 3 : 2 + row_parts_) + 3));
    list_.made.counters = chunks_;
    list_.made.chunks = chunks_;
    if (buffer_ != Buffer::kOutput) list_.add_scratch(buffer_, staging_bytes(plan_));
    if (packed_ && !variant_.kernel_takes) {
      list_.add_scratch(Buffer::kProduct, plan_.problem.m * row_bytes_);
    }
    list_.add_communicators(plan_);
    bool copies = false;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) copies = copies || finishes(chunk);
    list_.add(Lane::kCaller, Fork{plan_.resources.lanes, copies});
    // The producer goes first: what waits for it must never be able to keep it out.
    if (variant_.kernel_takes || packed_) list_.add_order(plan::tile_order(plan_));
    if (variant_.kernel_takes) {
      launch();
    } else if (packed_) {
      list_.add(Lane::kCaller, library_gemm({0, plan_.problem.m}, {Buffer::kProduct}));
    }
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (variant_.kernel_takes) {
        list_.add_held(side(chunk), WaitForTiles{chunk, plan_.chunks[index(chunk)].tiles});
      } else {
        list_.add_held(side(chunk), Mark{chunk}, {compute(chunk)});
      }
      const StepId communicated = communicate(chunk);
      if (finishes(chunk)) finish(chunk, communicated);
    }
    list_.add(Lane::kCaller, Join{});
    return std::move(list_.made);
  }

 private:
  static size_t index(int32_t chunk) { return static_cast<size_t>(chunk); }
  Lane side(int32_t chunk) const { return side_lane(chunk % plan_.resources.lanes); }

  void launch() {
    Gemm gemm;
    gemm.rows = {0, plan_.problem.m};
    gemm.input = {Buffer::kInput};
    gemm.outputs = {{{buffer_}}};
    gemm.term = exchanges_ ? rank_ : 0;
    gemm.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
    if (row_parts_ > 1) {
      gemm.map.mode = plan::RowMap::Mode::kScatter;
      gemm.map.part_rows = static_cast<int32_t>(plan::part_rows(plan_));
    }
    gemm.end_tile = list_.made.orders[0].num_tiles();
    gemm.ctas = ctas_;
    gemm.counts = true;
    list_.add(Lane::kCaller, gemm);
  }

  LibraryGemm library_gemm(plan::Rows rows, Where output) const {
    return {0, rows, {Buffer::kInput, rows.begin * plan_.problem.k * operand_bytes_}, {output}};
  }

  // The framework's GEMM of the chunk's rows of each part; or its tiles, once all are computed.
  StepId compute(int32_t chunk) {
    if (packed_) {
      Pack pack;
      pack.chunk = chunk;
      pack.source = {Buffer::kProduct};
      pack.destination = {buffer_};
      pack.term = exchanges_ ? rank_ : 0;
      pack.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
      pack.ctas = finish_ctas_;
      return list_.add(Lane::kCaller, pack);
    }
    const plan::Rows rows = rows_[index(chunk)];
    const int64_t part_rows = plan::part_rows(plan_);
    for (int32_t part = 0; part < row_parts_; ++part) {
      list_.add(Lane::kCaller,
                library_gemm({part * part_rows + rows.begin, part * part_rows + rows.end},
                             place(chunk, part)));
    }
    return list_.last();
  }

  StepId communicate(int32_t chunk) {
    const int32_t lane = chunk % plan_.resources.lanes;
    const Where source = place(chunk, exchanges_ ? rank_ : 0);
    const Where destination = row_parts_ > 1 ? result(chunk) : place(chunk, 0);
    list_.communicates = chunk;
    const StepId id =
        list_.add(side(chunk), Collective{plan_.collective, plan_.chunks[index(chunk)].max_ctas,
                                          lane, source, destination, extents_[index(chunk)].count});
    list_.communicates = -1;
    return id;
  }

  // True if something is left to do once the chunk has been communicated.
  bool finishes(int32_t chunk) const {
    return packed_ || variant_.bias || !(result(chunk) == output(chunk));
  }

  void finish(int32_t chunk, StepId communicated) {
    const plan::Rows rows = rows_[index(chunk)];
    if (packed_) {
      Unpack unpack;
      unpack.chunk = chunk;
      unpack.source = {buffer_};
      unpack.destination = {Buffer::kOutput};
      unpack.terms = exchanges_ ? plan::buffer_parts(plan_) : 1;
      unpack.ctas = finish_ctas_;
      unpack.bias = variant_.bias;
      list_.add(Lane::kCopy, unpack, {communicated});
    } else if (variant_.bias) {
      list_.add(Lane::kCopy,
                AddBias{result(chunk), output(chunk), rows.end - rows.begin, finish_ctas_},
                {communicated});
    } else {
      // The copy engine, which takes no SM from GEMM and communication.
      list_.add(Lane::kCopy,
                Copy{result(chunk), output(chunk), (rows.end - rows.begin) * row_bytes_},
                {communicated});
    }
  }

  // Where a chunk, or one part of it, lies in what is communicated.
  Where place(int32_t chunk, int32_t part) const {
    const plan::Extent& extent = extents_[index(chunk)];
    return {buffer_, (extent.offset + part * extent.count) * element_bytes_};
  }

  Where output(int32_t chunk) const {
    return {Buffer::kOutput, rows_[index(chunk)].begin * row_bytes_};
  }

  // Where the communicated rows of a row-major chunk lie. A reduce-scatter puts them where the caller wants them,
  // unless NCCL should take its window kernels, or the last tile is larger than what is left of the output.
  Where result(int32_t chunk) const {
    if (row_parts_ == 1) return place(chunk, 0);
    const plan::Rows rows = rows_[index(chunk)];
    const bool whole = extents_[index(chunk)].count == (rows.end - rows.begin) * plan_.problem.n;
    return whole && buffer_ != Buffer::kWindow ? output(chunk) : place(chunk, rank_);
  }

  const plan::Plan& plan_;
  const int32_t rank_;
  const int32_t ctas_;
  const int32_t finish_ctas_;
  const Variant variant_;
  const int32_t chunks_;
  const int32_t row_parts_;
  const bool packed_;
  const bool exchanges_;
  const int64_t element_bytes_;
  const int64_t row_bytes_;
  const int64_t operand_bytes_;
  const ChunkPlaces chunk_places_;
  const std::vector<plan::Rows>& rows_;
  const std::vector<plan::Extent>& extents_;
  const Buffer buffer_;
  List list_;
};

}  // namespace

StepList lower_produce(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant) {
  return Produce(plan, rank, machine, variant).lower();
}

}  // namespace overlap::steps
