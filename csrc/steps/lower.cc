// Plans as lists of steps.
#include <stdexcept>

#include "steps/step.h"

namespace overlap::steps {
namespace {

class List {
 public:
  StepId add(Lane lane, What what, std::vector<StepId> after = {}, bool unchained = false) {
    made.steps.push_back({lane, std::move(what), std::move(after), unchained});
    return static_cast<StepId>(made.steps.size()) - 1;
  }
  StepList made;
};

// Computation before communication, chunk by chunk.
class Produce {
 public:
  Produce(const plan::Plan& plan, int32_t rank, const Variant& variant)
      : plan_(plan),
        rank_(rank),
        variant_(variant),
        chunks_(static_cast<int32_t>(plan.chunks.size())),
        row_parts_(plan::row_parts(plan)),
        packed_(plan.layout == plan::Layout::kPacked),
        exchanges_(plan.collective == plan::Collective::kExchange),
        element_bytes_(plan::element_bytes(plan.problem.dtype)),
        row_bytes_(plan.problem.n * element_bytes_),
        buffer_(communicates_in_place(plan) ? Buffer::kOutput
                : variant.in_window         ? Buffer::kWindow
                                            : Buffer::kStaging) {
    // A chunk's rows follow from the tiles of all chunks before it.
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      rows_.push_back(packed_ ? plan::Rows{} : plan::chunk_rows(plan, chunk));
      extents_.push_back(plan::chunk_extent(plan, chunk));
    }
  }

  StepList lower() {
    list_.made.counters = chunks_;
    bool copies = false;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) copies = copies || finishes(chunk);
    list_.add(Lane::kCaller, Fork{plan_.resources.lanes, copies});
    // The producer goes first: what waits for it must never be able to keep it out.
    if (variant_.kernel_takes) {
      list_.add(Lane::kCaller, Gemm{{buffer_, 0},
                                    exchanges_ ? rank_ : 0,
                                    exchanges_ ? plan::buffer_parts(plan_) : 1,
                                    row_parts_ > 1 ? plan::part_rows(plan_) : 0});
    } else if (packed_) {
      list_.add(Lane::kCaller, LibraryGemm{{0, plan_.problem.m}, {Buffer::kProduct, 0}});
    }
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (variant_.kernel_takes) {
        list_.add(side(chunk), WaitForTiles{chunk, plan_.chunks[index(chunk)].tiles});
      } else {
        list_.add(side(chunk), Mark{chunk}, {compute(chunk)});
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

  // The framework's GEMM of the chunk's rows of each part; or its tiles, once all are computed.
  StepId compute(int32_t chunk) {
    if (packed_) {
      return list_.add(Lane::kCaller, Pack{chunk,
                                           {Buffer::kProduct, 0},
                                           {buffer_, 0},
                                           exchanges_ ? rank_ : 0,
                                           exchanges_ ? plan::buffer_parts(plan_) : 1});
    }
    const plan::Rows rows = rows_[index(chunk)];
    const int64_t part_rows = plan::part_rows(plan_);
    StepId last = 0;
    for (int32_t part = 0; part < row_parts_; ++part) {
      last = list_.add(Lane::kCaller,
                       LibraryGemm{{part * part_rows + rows.begin, part * part_rows + rows.end},
                                   place(chunk, part)});
    }
    return last;
  }

  StepId communicate(int32_t chunk) {
    const int32_t lane = chunk % plan_.resources.lanes;
    const Where source = place(chunk, exchanges_ ? rank_ : 0);
    const Where destination = row_parts_ > 1 ? result(chunk) : place(chunk, 0);
    return list_.add(side(chunk),
                     Collective{plan_.collective, plan_.chunks[index(chunk)].max_ctas, lane, source,
                                destination, extents_[index(chunk)].count});
  }

  // Whether something is left to do once the chunk has been communicated.
  bool finishes(int32_t chunk) const {
    return packed_ || variant_.bias || !(result(chunk) == output(chunk));
  }

  void finish(int32_t chunk, StepId communicated) {
    const plan::Rows rows = rows_[index(chunk)];
    What what;
    if (packed_) {
      what = Unpack{chunk,
                    {buffer_, 0},
                    {Buffer::kOutput, 0},
                    exchanges_ ? plan::buffer_parts(plan_) : 1,
                    variant_.bias};
    } else if (variant_.bias) {
      what = AddBias{result(chunk), output(chunk), rows.end - rows.begin};
    } else {
      // The copy engine, which takes no SM from GEMM and communication.
      what = Copy{result(chunk), output(chunk), (rows.end - rows.begin) * row_bytes_};
    }
    list_.add(Lane::kCopy, std::move(what), {communicated});
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
  const Variant variant_;
  const int32_t chunks_;
  const int32_t row_parts_;
  const bool packed_;
  const bool exchanges_;
  const int64_t element_bytes_;
  const int64_t row_bytes_;
  const Buffer buffer_;
  std::vector<plan::Rows> rows_;
  std::vector<plan::Extent> extents_;
  List list_;
};

// One GEMM and one collective over whole tensors.
StepList lower_sequential(const plan::Plan& plan) {
  const plan::Problem& problem = plan.problem;
  const bool gathers = problem.op == plan::Op::kAllGatherGemm;
  const int64_t columns = gathers ? problem.k : problem.n;
  const Where product = {Buffer::kProduct, 0};
  Collective collective = {plan.collective, plan.chunks[0].max_ctas,        0, product,
                           product,         plan::part_rows(plan) * columns};
  if (gathers) collective.source = {Buffer::kInput, 0};
  if (gathers) collective.destination = {Buffer::kGathered, 0};
  if (problem.op == plan::Op::kGemmReduceScatter) collective.destination = {Buffer::kOutput, 0};
  const LibraryGemm gemm = {{0, problem.m}, gathers ? Where{Buffer::kOutput, 0} : product};
  List list;
  if (!gathers) list.add(Lane::kCaller, gemm, {}, true);
  list.add(Lane::kCaller, collective);
  if (gathers) list.add(Lane::kCaller, gemm, {}, true);
  return std::move(list.made);
}

}  // namespace

bool communicates_in_place(const plan::Plan& plan) {
  return plan.problem.op == plan::Op::kGemmAllReduce && plan.layout == plan::Layout::kRowMajor &&
         !plan.resources.window;
}

bool lowers(const plan::Plan& plan) {
  const plan::Op op = plan.problem.op;
  if (plan::over_peers(plan) || op == plan::Op::kGemmAllToAll) return false;
  return plan.schedule == plan::Schedule::kSequential || op != plan::Op::kAllGatherGemm;
}

StepList lower(const plan::Plan& plan, int32_t rank, const Variant& variant) {
  if (!lowers(plan)) throw std::invalid_argument("no steps for " + plan.to_string());
  if (plan.schedule == plan::Schedule::kSequential) return lower_sequential(plan);
  return Produce(plan, rank, variant).lower();
}

}  // namespace overlap::steps
