// gemm_alltoall on CPU: rows are computed by destination, those for rank + 1 first, in pieces that
// leave as they are finished; this rank's own rows, which do not travel, come last. Receives are
// posted before anything is sent, so that no order of ranks can block.
//
//   caller | piece 0, count [A] | piece 1, count [A] | ... | own rows | join
//   comm.  | post receives | wait 0 [A] | send 0 | wait 1 [A] | send 1 | ... | await receives
#include <algorithm>
#include <numeric>

#include "binding/collectives.h"
#include "binding/cpu_loop.h"
#include "binding/program_cpu.h"

namespace overlap::binding {
namespace {

constexpr int64_t kMaxPieces = 4;  // of a pair

// Smaller messages cost more calls than they hide.
int64_t piece_bytes() {
  return cpu_machine().profile->cpu.message_bytes;
}

// Rows [begin, end) that travel between this rank and a peer as one message.
struct Piece {
  int peer = 0;
  int number = 0;  // of the pair's pieces
  int64_t begin = 0;
  int64_t end = 0;
};

// In how many pieces a pair's rows travel is a function of their number, which both ranks know.
std::vector<Piece> cut(int peer, int64_t first, int64_t rows, int64_t row_bytes) {
  const int64_t count = std::clamp<int64_t>(rows * row_bytes / piece_bytes(), 1, kMaxPieces);
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count && rows > 0; ++i) {
    pieces.push_back(
        {peer, static_cast<int>(i), first + rows * i / count, first + rows * (i + 1) / count});
  }
  return pieces;
}

// The pieces for (or from) all peers, the one at distance 1 first.
std::vector<Piece> pieces_of(const OpCall& call, bool sent) {
  const std::vector<int64_t>& rows = sent ? call.send_rows : call.recv_rows;
  const int world_size = call.group->world_size();
  const int64_t row_bytes = call.problem.n * plan::element_bytes(call.problem.dtype);
  std::vector<Piece> pieces;
  for (int distance = 1; distance < world_size; ++distance) {
    const int peer = (call.group->rank() + (sent ? distance : world_size - distance)) % world_size;
    const int64_t first = std::accumulate(rows.begin(), rows.begin() + peer, int64_t{0});
    for (const Piece& piece : cut(peer, first, rows[peer], row_bytes)) pieces.push_back(piece);
  }
  return pieces;
}

class CpuAllToAllLoop : CpuLoop {
 public:
  explicit CpuAllToAllLoop(const OpCall& call) : CpuAllToAllLoop(call, pieces_of(call, true)) {}

  at::Tensor run() {
    CpuLoop::run([this] { compute_all(); }, [this] { communicate_all(); });
    return output_;
  }

 private:
  CpuAllToAllLoop(const OpCall& call, std::vector<Piece> sends)
      : CpuLoop(call, sends.size()),
        sends_(std::move(sends)),
        receives_(pieces_of(call, false)),
        product_(at::empty({call.input.size(0), call.problem.n}, call.input.options())),
        output_(
            at::empty({std::accumulate(call.recv_rows.begin(), call.recv_rows.end(), int64_t{0}),
                       call.problem.n},
                      call.input.options())) {}

  void compute_all() {
    const int rank = call_.group->rank();
    const std::vector<int64_t>& sent = call_.send_rows;
    const std::vector<int64_t>& received = call_.recv_rows;
    const int64_t own = std::accumulate(sent.begin(), sent.begin() + rank, int64_t{0});
    const int64_t kept = std::accumulate(received.begin(), received.begin() + rank, int64_t{0});
    // One GEMM for few rows: several small ones take longer than their messages.
    const bool at_once = static_cast<int64_t>(product_.nbytes()) <= piece_bytes();
    if (at_once) compute(product_, 0, product_.size(0));
    for (size_t i = 0; i < sends_.size() && !stopped(); ++i) {
      if (!at_once) compute(rows_of(product_, sends_[i]), sends_[i].begin, sends_[i].end);
      ready_us_[i] = now_us();
      signal(static_cast<int>(i));
    }
    at::Tensor place = output_.narrow(0, kept, sent[rank]);
    if (at_once) {
      place.copy_(product_.narrow(0, own, sent[rank]));
    } else {
      compute(place, own, own + sent[rank]);
    }
  }

  // Rows [begin, end) of the product.
  void compute(at::Tensor place, int64_t begin, int64_t end) {
    if (begin == end) return;
    const at::Tensor input = call_.input.narrow(0, begin, end - begin);
    if (call_.bias().has_value()) {
      at::addmm_out(place, *call_.bias(), input, call_.weight().t());
    } else {
      at::mm_out(place, input, call_.weight().t());
    }
  }

  void communicate_all() {
    call_.group->agree();  // also where this rank sends and receives nothing
    std::vector<Receive> arriving;
    arriving.reserve(receives_.size());
    for (const Piece& piece : receives_) {
      arriving.emplace_back(*call_.group, rows_of(output_, piece), piece.peer, piece.number);
    }
    for (size_t i = 0; i < sends_.size(); ++i) {
      if (!wait(static_cast<int>(i), 1, "its own GEMM", timeout())) return;
      hold();
      const Profiled profiled(static_cast<int>(i));
      begin_us_[i] = now_us();
      send(*call_.group, rows_of(product_, sends_[i]), sends_[i].peer, sends_[i].number);
      end_us_[i] = now_us();
    }
    for (Receive& message : arriving) message.wait();
  }

  static at::Tensor rows_of(const at::Tensor& matrix, const Piece& piece) {
    return matrix.narrow(0, piece.begin, piece.end - piece.begin);
  }

  const std::vector<Piece> sends_;
  const std::vector<Piece> receives_;
  const at::Tensor product_;
  const at::Tensor output_;
};

}  // namespace

at::Tensor gemm_alltoall_cpu(const OpCall& call) {
  const auto entry = cpu_plan(call);
  if (plan::has_program(entry->plan)) {
    const int64_t rows = std::accumulate(call.recv_rows.begin(), call.recv_rows.end(), int64_t{0});
    const at::Tensor output = at::empty({rows, call.problem.n}, call.input.options());
    run_program(call, *entry, {output});
    return output;
  }
  return entry->plan.schedule == plan::Schedule::kOverlapped ? CpuAllToAllLoop(call).run()
                                                             : gemm_alltoall_composition(call);
}

}  // namespace overlap::binding
