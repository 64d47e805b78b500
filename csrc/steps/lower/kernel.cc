// Calls whose GEMM, or whatever else it computes, is a kernel of the caller's. It takes the tiles of a row-major matrix in
// an order of its own, and counts them, or awaits what arrives, by a table: which tile belongs to which chunk.
//
//   produce  caller | fork | the kernel: signal [A] ............................... | join |
//            side   |      | wait 0 [A] | copy and communicate 0 | wait 1 [A] | ... | ^
//
//   consume  caller | own rows | fork | the kernel: await chunk 0, 1 ... [D] | join |
//            side   |                 | communicate 0 | arrive 0 [D] | communicate 1 ... | ^
//
// Rows of tiles need not end where parts of the matrix do. A tile that several chunks need counts for the first of them,
// and the others wait for that one, too; a tile that needs several chunks awaits the last one, as chunks arrive in order.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

// Rows of the kernel's matrix that a chunk communicates, or brings.
struct Claim {
  plan::Rows rows;
  int32_t chunk = 0;
};

class KernelSteps {
 public:
  KernelSteps(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
              const KernelJob& job)
      : plan_(plan),
        rank_(rank),
        machine_(machine),
        job_(job),
        problem_(plan.problem),
        ranks_(problem_.world_size),
        chunks_(static_cast<int32_t>(plan.chunks.size())),
        lanes_(plan.resources.lanes),
        parts_(plan::op_row_parts(problem_)),
        part_rows_(problem_.m / parts_),
        element_bytes_(plan::moved_bytes(problem_)),
        row_bytes_(plan::moved_columns(problem_) * element_bytes_) {}

  StepList lower() {
    list_.made.tiles.columns = plan::tiles_n(plan_);
    if (ranks_ == 1) {
      alone();
    } else if (plan::has_program(plan_)) {
      by_program();
    } else if (plan_.collective == plan::Collective::kDirect ||
               (plan::over_peers(plan_) && plan_.schedule == plan::Schedule::kSequential)) {
      in_one_kernel();
    } else if (problem_.traits().gathers()) {
      gather();
    } else if (plan::over_peers(plan_)) {
      throw std::invalid_argument(
          std::string("a kernel of your own cannot run by the plan's collective ") +
          plan::name(plan_.collective) +
          " over peers, which this package's GEMMs do as they store; take the collective direct, a "
          "program, or the transport nccl");
    } else if (problem_.traits().rows_by_rank) {
      all_to_all();
    } else if (plan_.layout == plan::Layout::kPacked) {
      reduce_tiles();
    } else {
      reduce_rows();
    }
    return std::move(list_.made);
  }

 private:
  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  Lane side(int32_t chunk) const { return side_lane(chunk % lanes_); }
  int64_t kernel_rows() const {
    if (!problem_.traits().rows_by_rank) return problem_.m;
    int64_t rows = 0;
    for (const int64_t count : job_.send_rows) rows += count;
    return rows;
  }

  // --- tiles ---

  // Each tile's chunk: of those that claim its rows the first, or the last. Rows that nobody claims: chunk 0.
  void assign(const std::vector<Claim>& claims, bool first) {
    const int64_t rows = (kernel_rows() + plan_.tile_m - 1) / plan_.tile_m;
    std::vector<int32_t>& tiles = list_.made.tiles.chunks;
    tiles.reserve(at(rows * list_.made.tiles.columns));
    needs_.resize(at(list_.made.counters));
    std::vector<int32_t> counts(at(list_.made.counters));
    for (int64_t row = 0; row < rows; ++row) {
      const plan::Rows own = {row * plan_.tile_m, (row + 1) * plan_.tile_m};
      std::set<int32_t> by;
      for (const Claim& one : claims) {
        if (one.rows.begin < std::min(own.end, one.rows.end) && own.begin < one.rows.end) {
          by.insert(one.chunk);
        }
      }
      const int32_t chunk = by.empty() ? 0 : first ? *by.begin() : *by.rbegin();
      for (const int32_t one : by) needs_[at(one)].insert(chunk);
      tiles.insert(tiles.end(), at(list_.made.tiles.columns), chunk);
      counts[at(chunk)] += list_.made.tiles.columns;
    }
    counts_ = std::move(counts);
  }

  // Until all tiles are finished that the chunk needs.
  void wait(Lane lane, int32_t chunk) {
    bool first = true;
    for (const int32_t counted : needs_[at(chunk)]) {
      const WaitForTiles tiles = {counted, counts_[at(counted)]};
      if (first) {
        list_.add_held(lane, tiles);
      } else {
        list_.add(lane, tiles);
      }
      first = false;
    }
  }

  void kernel(bool counts, bool awaits = false, std::vector<StepId> after = {}) {
    list_.add(Lane::kCaller, CallersKernel{counts, awaits}, std::move(after));
  }

  // --- families ---

  void alone() {
    list_.made.counters = 1;
    assign({}, true);
    kernel(false);
  }

  // Whole rows, of each part. A reduce-scatter's are brought together first. The kernel stores an all-reduce's where they
  // are added up: in the output, or in a window, from which the sums are copied.
  void reduce_rows() {
    const bool scatters = problem_.traits().scatters();
    list_.made.chunks = list_.made.counters = chunks_;
    std::vector<Claim> claims;
    std::vector<plan::Extent> extents;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Rows rows = rows_of(chunk);
      for (int64_t part = 0; part < parts_; ++part) {
        claims.push_back({{part * part_rows_ + rows.begin, part * part_rows_ + rows.end}, chunk});
      }
      extents.push_back({parts_ * rows.begin * problem_.n, (rows.end - rows.begin) * problem_.n});
    }
    assign(claims, true);
    Buffer staging = staging_of(plan_, variant(), extents);
    const bool window = staging == Buffer::kWindow;
    if (!scatters && !window) staging = Buffer::kOutput;
    list_.made.tiles.stores = scatters ? Buffer::kProduct : staging;
    if (scatters) list_.add_scratch(Buffer::kProduct, problem_.m * row_bytes_);
    if (staging != Buffer::kOutput) list_.add_scratch(staging, problem_.m * row_bytes_);
    list_.add_communicators(plan_);
    list_.add(Lane::kCaller, Fork{lanes_, window});
    kernel(true);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Rows rows = rows_of(chunk);
      const plan::Extent extent = extents[at(chunk)];
      const auto place = [&](int64_t part) {
        return Where{staging, (extent.offset + part * extent.count) * element_bytes_};
      };
      const int64_t bytes = extent.count * element_bytes_;
      wait(side(chunk), chunk);
      for (int64_t part = 0; part < parts_ && scatters; ++part) {
        const Where from = {Buffer::kProduct, (part * part_rows_ + rows.begin) * row_bytes_};
        list_.add(side(chunk), Copy{from, place(part), bytes});
      }
      const Where output = {Buffer::kOutput, rows.begin * row_bytes_};
      const Where result = window ? place(scatters ? rank_ : 0) : output;
      communicate(chunk, place(0), result, extent.count);
      if (window) list_.add(Lane::kCopy, Copy{result, output, bytes}, {list_.last()});
    }
    list_.add(Lane::kCaller, Join{});
  }

  // Runs of tiles, in the plan's order.
  void reduce_tiles() {
    const bool exchanges = plan_.collective == plan::Collective::kExchange;
    const int32_t terms = exchanges ? plan::buffer_parts(plan_) : 1;
    const ChunkPlaces places(plan_);
    const Buffer staging = staging_of(plan_, variant(), places.extents);
    const int32_t order = list_.add_order(plan::tile_order(plan_));
    list_.made.chunks = list_.made.counters = chunks_;
    by_order(list_.made.orders[at(order)]);
    list_.made.tiles.stores = Buffer::kProduct;
    list_.add_scratch(Buffer::kProduct, problem_.m * row_bytes_);
    list_.add_scratch(staging, staging_bytes(plan_));
    list_.add_communicators(plan_);
    list_.add(Lane::kCaller, Fork{lanes_, true});
    kernel(true);
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Extent extent = places.extents[at(chunk)];
      const auto place = [&](int32_t term) {
        return Where{staging, (extent.offset + term * extent.count) * element_bytes_};
      };
      const int32_t term = exchanges ? rank_ : 0;
      list_.add_held(side(chunk), WaitForTiles{chunk, counts_[at(chunk)]});
      list_.add(side(chunk),
                Pack{chunk, order, {Buffer::kProduct}, {staging}, term, terms, finish_ctas()});
      communicate(chunk, place(term), place(0), extent.count);
      list_.add(Lane::kCopy,
                Unpack{chunk, order, {staging}, {Buffer::kOutput}, terms, finish_ctas()},
                {list_.last()});
    }
    list_.add(Lane::kCaller, Join{});
  }

  // Each pair's rows in as many pieces, whatever their number; this rank's own ones when everything is computed.
  void all_to_all() {
    const int32_t rounds = job_.pieces;
    const std::vector<int64_t> send_begin = offsets(job_.send_rows);
    const std::vector<int64_t> receive_begin = offsets(job_.receive_rows);
    const auto piece = [&](const std::vector<int64_t>& begin, int32_t peer, int32_t round) {
      const int64_t rows = begin[at(peer) + 1] - begin[at(peer)];
      return plan::Rows{begin[at(peer)] + rows * round / rounds,
                        begin[at(peer)] + rows * (round + 1) / rounds};
    };
    list_.made.chunks = rounds;
    list_.made.counters = rounds + 1;
    std::vector<Claim> claims;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      for (int32_t round = 0; round < rounds; ++round) {
        claims.push_back({piece(send_begin, peer, round), peer == rank_ ? rounds : round});
      }
    }
    assign(claims, true);
    list_.made.tiles.stores = Buffer::kProduct;
    list_.add_scratch(Buffer::kProduct, send_begin.back() * row_bytes_);
    list_.add_communicators(plan_);
    list_.add(Lane::kCaller, Fork{1, false});
    kernel(true);
    for (int32_t round = 0; round < rounds; ++round) {
      SendReceive messages = {plan_.chunks[0].max_ctas, 0, {}, {}};
      for (int32_t distance = 1; distance < ranks_; ++distance) {
        const int32_t to = (rank_ + distance) % ranks_;
        const int32_t from = (rank_ + ranks_ - distance) % ranks_;
        add(messages.sends, to, Buffer::kProduct, piece(send_begin, to, round));
        add(messages.receives, from, Buffer::kOutput, piece(receive_begin, from, round));
      }
      wait(Lane::kSide0, round);
      list_.communicates = round;
      list_.add(Lane::kSide0, std::move(messages));
      list_.communicates = -1;
    }
    const int64_t own = job_.send_rows[at(rank_)] * row_bytes_;
    if (own > 0) {
      list_.add(Lane::kCaller, Copy{{Buffer::kProduct, send_begin[at(rank_)] * row_bytes_},
                                    {Buffer::kOutput, receive_begin[at(rank_)] * row_bytes_},
                                    own});
    }
    list_.add(Lane::kCaller, Join{});
  }

  void add(std::vector<Message>& messages, int32_t peer, Buffer buffer, plan::Rows rows) const {
    if (rows.begin == rows.end) return;
    messages.push_back(
        {peer, {buffer, rows.begin * row_bytes_}, (rows.end - rows.begin) * row_bytes_});
  }

  // Rows of all ranks: this rank's own ones are there before the kernel, as chunk 0.
  void gather() {
    const bool peers = plan::over_peers(plan_);
    list_.made.chunks = chunks_;
    list_.made.counters = chunks_ + 1;
    std::vector<Claim> claims;
    std::vector<plan::Extent> extents;
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const plan::Rows rows = rows_of(chunk);
      for (int64_t part = 0; part < parts_; ++part) {
        claims.push_back({{part * part_rows_ + rows.begin, part * part_rows_ + rows.end},
                          part == rank_ ? 0 : chunk + 1});
      }
      extents.push_back({parts_ * rows.begin * problem_.k, (rows.end - rows.begin) * problem_.k});
    }
    assign(claims, false);
    Buffer staging = Buffer::kSlot;
    if (peers) {
      list_.add_slot(plan::peer_slot_bytes(plan_));
    } else {
      staging = staging_of(plan_, variant(), extents);
      list_.add_communicators(plan_);
      list_.add_scratch(staging, problem_.m * row_bytes_);
    }
    list_.add(Lane::kCaller, Copy{{Buffer::kInput}, gathered(rank_, 0), part_rows_ * row_bytes_});
    list_.add(Lane::kCaller, Arrive{0});
    list_.add(Lane::kCaller, Fork{peers ? 2 : lanes_, false});
    if (peers) list_.add(Lane::kSide0, WaitForSlots{});
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) bring(chunk, staging, extents[at(chunk)]);
    // A kernel that does not await what arrives comes after all of it.
    std::vector<StepId> after;
    if (!job_.awaits) after = arrived_;
    kernel(false, job_.awaits, std::move(after));
    list_.add(Lane::kCaller, Join{});
    if (peers) list_.add(Lane::kCaller, EndCall{});
  }

  // The chunk's rows into the gathered input, and its arrival after that of the chunk before.
  void bring(int32_t chunk, Buffer staging, const plan::Extent& extent) {
    const plan::Rows rows = rows_of(chunk);
    const int64_t bytes = extent.count * element_bytes_;
    const Where own = {Buffer::kInput, rows.begin * row_bytes_};
    const auto place = [&](int32_t part, int32_t of) {
      return Where{staging, (extent.offset + part * extent.count) * element_bytes_,
                   staging == Buffer::kSlot ? of : 0};
    };
    Lane lane = side(chunk);
    if (staging == Buffer::kSlot) {
      list_.communicates = chunk;
      for (int32_t distance = 1; distance < ranks_; ++distance) {
        const int32_t peer = (rank_ + distance) % ranks_;
        const Copy copy = {own, place(rank_, peer), bytes};
        if (distance == 1) {
          list_.add_held(Lane::kSide0, copy);
        } else {
          list_.add(Lane::kSide0, copy);
        }
      }
      list_.add(Lane::kSide0, Signal{chunk, true});
      lane = Lane::kSide1;
      list_.add(lane, WaitForPeers{chunk});
      list_.communicates = -1;
    } else {
      list_.add_held(lane, Copy{own, place(rank_, rank_), bytes});
      communicate(chunk, place(rank_, rank_), place(0, rank_), extent.count);
    }
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      const int32_t part = (rank_ + distance) % ranks_;
      list_.add(lane, Copy{place(part, rank_), gathered(part, rows.begin), bytes});
    }
    // In their order, so that a kernel which has seen one has all those before.
    std::vector<StepId> after;
    if (!arrived_.empty() && list_.made.steps[at(arrived_.back())].lane != lane) {
      after = {arrived_.back()};
    }
    arrived_.push_back(list_.add(lane, Arrive{chunk + 1}, std::move(after)));
  }

  // One launch over peers, after the kernel or before it.
  void in_one_kernel() {
    const bool gathers = problem_.traits().gathers();
    const int32_t columns = list_.made.tiles.columns;
    Variant by_library = variant();
    by_library.kernel_takes = false;
    list_.made = plan_.collective == plan::Collective::kDirect
                     ? lower_direct(plan_, rank_, machine_, by_library)
                     : lower_sequential(plan_, rank_);
    list_.made.tiles.columns = columns;
    list_.made.counters = 1;
    assign({}, true);
    for (Step& step : list_.made.steps) {
      step.unchained = false;
      if (!std::holds_alternative<LibraryGemm>(step.what)) continue;
      step.what = CallersKernel{};
      if (gathers) {
        step.what = Arrive{0};
        kernel(false);
        break;
      }
      const bool becomes_result =
          plan_.schedule == plan::Schedule::kSequential && problem_.traits().all_reduces();
      list_.made.tiles.stores = Buffer::kProduct;
      list_.made.tiles.result = becomes_result ? Buffer::kProduct : Buffer::kOutput;
    }
  }

  // Transfers of the plan's own, of a product whose chunks are counted.
  void by_program() {
    if (problem_.traits().gathers() || problem_.traits().rows_by_rank) {
      throw std::invalid_argument(
          std::string("a kernel of your own runs by programs of gemm_allreduce and "
                      "gemm_reducescatter, not of ") +
          plan::name(problem_.op) + ": take a plan whose chunks travel by its collective");
    }
    const int32_t columns = list_.made.tiles.columns;
    list_.made = lower_program(plan_, rank_, machine_, {});
    list_.made.tiles.columns = columns;
    by_order(plan::tile_order(plan_));
    for (Step& step : list_.made.steps) {
      const Gemm* const gemm = std::get_if<Gemm>(&step.what);
      if (gemm == nullptr) continue;
      const Buffer stores = gemm->outputs[0].where.buffer;
      const bool own = stores == Buffer::kOutput || stores == Buffer::kProduct;
      if (!own || list_.made.counters > plan::kMaxChunks) {
        throw std::invalid_argument(
            "a kernel of your own cannot run by this program, whose GEMM stores into memory that "
            "other ranks map, or counts more than 64 things: take it over nccl");
      }
      list_.made.tiles.stores = stores;
      step.what = CallersKernel{true, false};
    }
  }

  // --- parts of these ---

  Variant variant() const {
    Variant variant;
    variant.captured = job_.captured;
    return variant;
  }

  // Tiles as the plan's order cuts them into chunks.
  void by_order(const plan::TileOrder& order) {
    const int64_t rows = (problem_.m + plan_.tile_m - 1) / plan_.tile_m;
    std::vector<int32_t>& tiles = list_.made.tiles.chunks;
    tiles.resize(at(rows * order.tiles_n));
    counts_.resize(at(chunks_));
    for (int32_t index = 0; index < order.num_tiles(); ++index) {
      const plan::TileCoord tile = plan::tile_coord(order, index);
      if (tile.row >= rows) continue;  // rounds clusters up
      const int32_t chunk = plan::tile_chunk(order, index);
      tiles[at(int64_t{tile.row} * order.tiles_n + tile.column)] = chunk;
      ++counts_[at(chunk)];
    }
    // Our own kernels count beyond the matrix; nobody does so here.
    for (Step& step : list_.made.steps) {
      if (auto* one = std::get_if<WaitForTiles>(&step.what)) one->tiles = counts_[at(one->chunk)];
    }
  }

  void communicate(int32_t chunk, Where source, Where destination, int64_t count) {
    list_.communicates = chunk;
    list_.add(side(chunk), Collective{plan_.collective, plan_.chunks[at(chunk)].max_ctas,
                                      chunk % lanes_, source, destination, count});
    list_.communicates = -1;
  }

  plan::Rows rows_of(int32_t chunk) const {
    if (plan_.schedule == plan::Schedule::kSequential) return {0, part_rows_};
    return plan::chunk_rows(plan_, chunk);
  }
  Where gathered(int32_t part, int64_t row) const {
    return {Buffer::kGathered, (part * part_rows_ + row) * row_bytes_};
  }
  int32_t finish_ctas() const {
    constexpr int32_t kOneForEachBlock = 1 << 30;
    return plan_.resources.finish_ctas > 0 ? plan_.resources.finish_ctas : kOneForEachBlock;
  }
  static std::vector<int64_t> offsets(const std::vector<int64_t>& rows) {
    std::vector<int64_t> result{0};
    for (const int64_t count : rows) result.push_back(result.back() + count);
    return result;
  }

  const plan::Plan& plan_;
  const int32_t rank_;
  const plan::Machine& machine_;
  const KernelJob& job_;
  const plan::Problem& problem_;
  const int32_t ranks_;
  const int32_t chunks_;
  const int32_t lanes_;
  const int64_t parts_;
  const int64_t part_rows_;
  const int64_t element_bytes_;
  const int64_t row_bytes_;
  std::vector<int32_t> counts_;           // tiles that count for each chunk
  std::vector<std::set<int32_t>> needs_;  // of each chunk: whose counts it waits for
  std::vector<StepId> arrived_;
  List list_;
};

}  // namespace

StepList lower_for_kernel(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                          const KernelJob& job) {
  StepList list = KernelSteps(plan, rank, machine, job).lower();
  number_events(list);
  list.communication = plan::communication_hash(plan);
  return list;
}

}  // namespace overlap::steps
