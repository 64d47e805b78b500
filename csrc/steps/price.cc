#include "steps/price.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "plan/gather_rounds.h"
#include "plan/ring_order.h"
#include "steps/costs.h"
#include "steps/list.h"

namespace overlap::steps {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr StepId kNone = -1;

// A lane, and its NCCL call that is under way, if one is.
struct LaneState {
  StepId next = kNone;
  StepId last = kNone;
  double free_us = 0.0;
  bool calls = false;
  double flows_at_us = 0.0;  // start over, bytes flow
  double bytes = 0.0;
  double most = 0.0;     // bytes per us, of its CTAs
  double sent_us = 0.0;  // of a program over peers: what its last transfers to others took
};

size_t index(int32_t number) {
  return static_cast<size_t>(number);
}

struct Walk {
  const StepList& list;
  const plan::Plan& plan;
  const int32_t rank;
  const plan::Machine& machine;
  const double callers_us;  // of a kernel of the caller's, on all SMs and alone

  const plan::Problem& problem = plan.problem;
  const plan::Profile& profile = *machine.profile;
  const int32_t ranks = problem.world_size;
  const int32_t sms = machine.sm_count;
  const bool cpu = on_cpu(machine);
  const double fast_share = fast_link_share(machine);
  const bool program = plan::has_program(plan);
  const bool peers = plan::over_peers(plan) && !program;
  const bool gathers = problem.op == plan::Op::kAllGatherGemm;
  const bool all_to_all = problem.op == plan::Op::kGemmAllToAll;
  const double tile_us = steps::tile_us(plan, machine);
  const double wait_us = cpu ? profile.cpu.wait_us : profile.sync.wait_us;
  const double fork_join_us = cpu ? profile.cpu.fork_join_us : profile.sync.fork_join_us;
  const double element = static_cast<double>(plan::moved_bytes(problem));
  const double row_bytes = static_cast<double>(problem.n) * element;

  Price price = {};
  std::array<LaneState, static_cast<size_t>(Lane::kCopy) + 1> lanes = {};
  std::vector<StepId> next_of_lane = {};
  std::vector<double> arrived_us = {};  // over peers, chunk by chunk
  std::map<int32_t, double> brought_us =
      {};  // what a kernel of the caller's is told of, by counter
  int32_t lanes_beside = 0;
  bool awaits = false;      // one launch awaits an all-gather's chunks
  double all_bytes = 0.0;   // of NCCL's calls
  double counted_us = 0.0;  // the end of a GEMM that counts
  double callers_end_us = 0.0;
  double callers_tile_us = 0.0;  // of one tile of a round
  // A chunk on its way: the framework's GEMMs of its parts, which count as one, or the copies of its rows to peers.
  int64_t chunk_tiles = 0;
  double chunk_begin_us = 0.0;
  double chunk_us = 0.0;
  double chunk_bytes = 0.0;
  std::map<int32_t, double> counters_us = {};  // of a program: those beside the GEMM's
  double now_us = 0.0;                         // until which NCCL's calls are known

  // --- the walk --------------------------------------------------------------------------------

  void run() {
    enqueue();
    do {
      for (bool ended = true; ended;) {  // with what waited for other lanes
        ended = false;
        for (LaneState& lane : lanes) ended |= go_on(lane);
      }
    } while (carry());
    price.expected.total_us = lanes[0].free_us;
  }

  // The lanes' steps, and when the host has come to those that depend on it. It issues the first GEMM at once.
  void enqueue() {
    price.steps.assign(list.steps.size(), {0.0, kNever});
    next_of_lane.assign(list.steps.size(), kNone);
    double host_us = 0.0;
    for (size_t id = 0; id < list.steps.size(); ++id) {
      const Step& step = list.steps[id];
      LaneState& lane = lanes[lane_of(step)];
      (lane.last == kNone ? lane.next : next_of_lane[index(lane.last)]) = static_cast<StepId>(id);
      lane.last = static_cast<StepId>(id);
      double& begin_us = price.steps[id].begin_us;
      if (const auto* fork = std::get_if<Fork>(&step.what)) {
        lanes_beside = fork->side_lanes;
      } else if (const auto* call = std::get_if<Collective>(&step.what)) {
        all_bytes += bytes_of(*call);
        if (lanes_beside > 0) begin_us = host_us;
        host_us += profile.host.issue_us;
      } else if (const auto* unpack = std::get_if<Unpack>(&step.what)) {
        if (unpack->terms > 1) host_us += profile.host.issue_sum_us;
      } else if (is_gemm(step)) {
        if (const auto* gemm = std::get_if<Gemm>(&step.what)) awaits |= gemm->awaits_chunks;
        if (!step.after.empty()) begin_us = host_us;
        host_us = std::max(host_us, profile.host.first_issue_us);
      }
      if (cpu || peers || all_to_all) begin_us = 0.0;
    }
  }

  // Does the lane's steps, as far as it is known when they begin. Whether any has ended.
  bool go_on(LaneState& lane) {
    const StepId first = lane.next;
    while (lane.next != kNone && !lane.calls) {
      const size_t id = index(lane.next);
      const double after_us = behind(id);
      if (after_us == kNever) break;
      double& begin_us = price.steps[id].begin_us;
      begin_us = std::max({begin_us, lane.free_us, after_us});
      const auto end_of_step = [&](const auto& what) { return end_of(what, id, begin_us); };
      finish(lane, std::visit(end_of_step, list.steps[id].what));
      if (price.steps[id].end_us == kNever) break;
    }
    return lane.next != first;
  }

  void finish(LaneState& lane, double end_us) {
    if (end_us == kNever) return;
    const size_t id = index(lane.next);
    lane.free_us = price.steps[id].end_us = end_us;
    lane.next = next_of_lane[id];
  }

  // Lets the calls under way share the link, until one has ended; false if there is none.
  bool carry() {
    const plan::Profile::Call model = call_model();
    const double link = machine.link_gbps * model.link_rate * 1e3;
    while (true) {
      const auto flows = [&](const LaneState& lane) {
        return lane.calls && lane.flows_at_us <= now_us;
      };
      const auto sides = std::span(lanes).subspan(1, index(lanes_beside));
      const auto flowing = static_cast<double>(std::count_if(sides.begin(), sides.end(), flows));
      const auto rate = [&](const LaneState& lane) { return std::min(lane.most, link / flowing); };
      // The next start of a flow, or end of a call.
      double next_us = kNever;
      LaneState* next = nullptr;
      for (LaneState& lane : sides) {
        if (!lane.calls) continue;
        const double at_us = flows(lane) ? now_us + lane.bytes / rate(lane) : lane.flows_at_us;
        if (at_us < next_us) {
          next_us = at_us;
          next = &lane;
        }
      }
      if (next == nullptr) return false;
      const bool ends = flows(*next);
      for (LaneState& lane : sides) {
        if (flows(lane)) lane.bytes -= (next_us - now_us) * rate(lane);
      }
      now_us = next_us;
      if (!ends) continue;
      next->calls = false;
      price.expected.communication_us += now_us - price.steps[index(next->next)].begin_us;
      finish(*next, now_us);
      return true;
    }
  }

  // On CPU chunks travel one by one, but for programs.
  size_t lane_of(const Step& step) const {
    const bool side = step.lane != Lane::kCaller && step.lane != Lane::kCopy;
    return static_cast<size_t>(cpu && side && !program ? Lane::kSide0 : step.lane);
  }
  static bool is_gemm(const Step& step) {
    return std::holds_alternative<Gemm>(step.what) ||
           std::holds_alternative<LibraryGemm>(step.what) ||
           std::holds_alternative<CallersKernel>(step.what);
  }
  // When what the step comes after on other lanes has ended.
  double behind(size_t id) const {
    double us = 0.0;
    for (const StepId other : list.steps[id].after) {
      us = std::max(us, price.steps[index(other)].end_us);
    }
    return us;
  }

  // --- when a step ends that could begin at begin_us, which it may put off; kNever: not known yet ----------

  // Delays and the end of a call: counted where they are part of.
  template <typename Other>
  double end_of(const Other&, size_t, double begin_us) {
    return begin_us;
  }

  double end_of(const Fork& fork, size_t, double begin_us) {
    const double end_us = begin_us + (gathers && !cpu && !peers ? fork_join_us : 0.0);
    for (int32_t lane = 0; lane < fork.side_lanes; ++lane) {
      lanes[static_cast<size_t>(side_lane(lane))].free_us =
          end_us + (cpu && gathers ? wait_us : 0.0);
    }
    return end_us;
  }
  double end_of(const Join&, size_t, double& begin_us) {
    for (const LaneState& lane : lanes) {
      if (&lane != &lanes[0] && lane.next != kNone) return kNever;
      begin_us = std::max(begin_us, lane.free_us);
    }
    if (peers || all_to_all) return begin_us;
    return begin_us + fork_join_us;
  }

  double end_of(const Gemm& gemm, size_t id, double& begin_us) {
    const plan::TileOrder& order = list.orders[index(gemm.order)];
    const int64_t tiles = gemm.end_tile - gemm.first_tile;
    if (gemm.counts) return count(order, begin_us);
    if (gemm.announces) return pass_on(gemm, begin_us);
    if (gemm.awaits_chunks) return await_chunks(gemm, order, begin_us);
    if (plan.collective == plan::Collective::kDirect) return store(tiles, begin_us);
    if (gemm.sends_messages) return send_messages(gemm, tiles, begin_us);
    if (all_to_all) return launch_apart(gemm, begin_us);
    return launch(id, 0, tiles, gemm.ctas, begin_us);
  }
  double end_of(const LibraryGemm& gemm, size_t id, double& begin_us) {
    const int64_t rows = gemm.rows.end - gemm.rows.begin;
    const int64_t tiles = (rows + plan.tile_m - 1) / plan.tile_m * plan::tiles_n(plan);
    if (program) {
      return begin_us + computed(profile.gemm.start_us + rounds_of(tiles, sms) * tile_us);
    }
    if (lanes_beside == 0 || all_to_all) {  // nothing is beside it
      if (peers || all_to_all) {
        return begin_us + computed(library_us(plan, machine, rows, sms));
      }
      const double work = cpu ? static_cast<double>(plan::tiles_m(plan)) * plan::tiles_n(plan)
                              : std::max(1.0, library_tiles(plan, rows) / sms);
      return begin_us + computed(profile.gemm.start_us + work * tile_us);
    }
    const bool goes_on = id > 0 && list.steps[id].after.empty() &&
                         std::holds_alternative<LibraryGemm>(list.steps[id - 1].what);
    return launch(id, goes_on ? chunk_tiles : 0, tiles, ctas_beside(plan, machine), begin_us);
  }

  double end_of(const WaitForTiles& wait, size_t, double begin_us) {
    return std::max(begin_us, counter_us(wait.chunk) + wait_us);
  }
  // When a counter has come to what is waited for.
  double counter_us(int32_t counter) const {
    if (index(counter) < price.computed_us.size()) return price.computed_us[index(counter)];
    const auto found = counters_us.find(counter);
    return found == counters_us.end() ? kNever : found->second;
  }
  double end_of(const Count& count, size_t, double begin_us) {
    return counters_us[count.counter] = begin_us + profile.host.launch_us;
  }
  double end_of(const CallersKernel& kernel, size_t id, double& begin_us) {
    const size_t counters = index(std::max(1, list.counters));
    std::vector<double> tiles(counters, 0.0);
    for (const int32_t counter : list.tiles.chunks) ++tiles[index(counter)];
    const auto all = static_cast<double>(list.tiles.chunks.size());
    const bool several =
        std::count_if(tiles.begin(), tiles.end(), [](double n) { return n > 0.0; }) > 1;
    const double all_us = callers_us_beside(several && (kernel.counts || kernel.awaits));
    begin_us = std::max(begin_us, behind(id));
    double us = begin_us;
    for (size_t counter = 0; counter < counters; ++counter) {
      if (kernel.awaits && tiles[counter] > 0.0) {
        const auto brought = brought_us.find(static_cast<int32_t>(counter));
        if (brought == brought_us.end()) return kNever;
        us = std::max(us, brought->second);
      }
      us += all > 0.0 ? all_us * tiles[counter] / all : 0.0;
      if (kernel.counts) price.computed_us.push_back(us);
    }
    computed(all_us);
    callers_end_us = us;
    callers_tile_us = all > 0.0 ? all_us / std::ceil(all / sms) : 0.0;
    return us;
  }
  // Blocks that find no SM left beside the caller's kernel get those whose tiles end: all do at about the same time.
  double when_tiles_end(double begin_us, int64_t blocks) const {
    if (plan.resources.comm_sms >= blocks || begin_us >= callers_end_us) return begin_us;
    return std::min(begin_us + callers_tile_us, callers_end_us);
  }
  // On the SMs that it does not leave. While NCCL's calls go on beside it, it takes longer, and their CTAs take SMs from it
  // where it has not left as many.
  double callers_us_beside(bool communicates) const {
    if (cpu) return callers_us;
    const auto share_of = [&](double from, double taken) {
      return std::pow(from / std::max(1.0, sms - taken), profile.gemm.fewer_sms_power);
    };
    const double left = plan.resources.comm_sms;
    const double own_us = callers_us * share_of(sms, left);
    if (!communicates || plan::over_peers(plan)) return own_us;
    const plan::Profile::Call model = call_model();
    const auto ctas = static_cast<double>(ctas_of(plan.chunks[0].max_ctas) * plan.resources.lanes);
    const double rate = std::min(machine.link_gbps * model.link_rate, ctas * model.cta_gbps) * 1e3;
    const double slower =
        profile.beside.nccl_factor * share_of(std::max(1.0, sms - left), std::max(left, ctas));
    return own_us + std::min(own_us, all_bytes / rate) * (slower - 1.0);
  }
  double end_of(const Arrive& arrive, size_t, double begin_us) {
    return brought_us[arrive.chunk] = begin_us;
  }
  double end_of(const Mark&, size_t id, double begin_us) {
    return std::max(begin_us, behind(id) + wait_us);
  }

  double end_of(const Collective& call, size_t, double& begin_us) {
    const double bytes = bytes_of(call);
    if (ranks == 1 || bytes == 0.0) return begin_us;
    if (lanes_beside == 0) return begin_us + communicated(alone_us(bytes));
    if (cpu) return begin_us + communicated(beside_on_cpu_us(bytes));
    const int64_t ctas = ctas_of(call.max_ctas);
    // CTAs that find no SM beside a persistent GEMM stay outside until its end.
    const bool fits = counted_us == 0.0 || plan.resources.comm_sms >= ctas * lanes_beside;
    if (!fits) begin_us = std::max(begin_us, counted_us + wait_us);
    begin_us = when_tiles_end(begin_us, ctas * lanes_beside);
    const plan::Profile::Call model = call_model();
    LaneState& lane = lanes[static_cast<size_t>(side_lane(call.lane))];
    lane.calls = true;
    lane.flows_at_us = begin_us + (model.start_us + model.latencies * machine.link_latency_us);
    lane.bytes = bytes;
    lane.most = static_cast<double>(ctas) * (model.cta_gbps * 1e3);
    return kNever;
  }
  double end_of(const SendReceive& call, size_t id, double& begin_us) {
    const double sent = bytes_of(call.sends);
    const double received = bytes_of(call.receives);
    if (program) {
      const double us = std::max(sent, received) / (1e3 * machine.link_gbps);
      return begin_us + communicated(machine.link_latency_us + us);
    }
    const bool beside = list.steps[id].lane != Lane::kCaller;
    if (sent + received == 0.0) return begin_us;
    // An all-gather's: as many bytes as a collective over all ranks' parts.
    if (gathers) return begin_us + communicated(beside_on_cpu_us(received / (ranks - 1) * ranks));
    if (beside && ranks == 2) {  // until the peer has computed its rows
      const auto rows = static_cast<int64_t>(received / row_bytes);
      begin_us = std::max(begin_us, launch_us(plan, machine, rows, sms));
    }
    return begin_us + communicated(exchange_us(machine, sent, received, beside));
  }

  double end_of(const Copy& copy, size_t id, double begin_us) {
    const auto bytes = static_cast<double>(copy.bytes);
    const bool leaves = is_remote(copy.destination);
    if (program && (leaves || is_remote(copy.source))) return begin_us + carried(id, leaves, bytes);
    if (leaves && gathers) {
      if (chunk_bytes == 0.0) chunk_begin_us = begin_us;
      return chunk_begin_us + sent_us(chunk_bytes += bytes);
    }
    if (leaves) return begin_us + communicated(sent_us(bytes));
    const bool finishes = list.steps[id].lane == Lane::kCopy;
    if (cpu || hides(id) || (finishes && !plan.resources.window)) return begin_us;
    return begin_us + profile.local.copy_start_us +
           (finishes ? bytes_behind(id) : bytes) / (1e3 * profile.local.copy_gbps);
  }
  double end_of(const CopyRows& copy, size_t id, double begin_us) {
    const auto bytes = static_cast<double>(copy.rows * copy.row_bytes);
    const bool leaves = is_remote(copy.destination);
    if (leaves || is_remote(copy.source)) return begin_us + carried(id, leaves, bytes);
    return begin_us + finish_us((copy.adds ? 2.0 : 1.0) * bytes);
  }
  bool is_remote(const Where& where) const {
    return where.buffer == Buffer::kSlot && where.index != rank;
  }
  // By the copy engine, from rank to rank.
  double carried(size_t id, bool leaves, double bytes) {
    const double us = communicated(profile.peer.copy_us + sent_us(bytes));
    if (leaves) lanes[lane_of(list.steps[id])].sent_us += us;
    return us;
  }
  double end_of(const Announce&, size_t, double begin_us) { return begin_us + flag_us(); }
  // What comes took its sender as long as what this rank has sent meanwhile; else it has yet to come.
  double end_of(const Await&, size_t id, double begin_us) {
    double us = 0.0;
    if (const StepId next = next_of_lane[id]; next != kNone) {
      const What& what = list.steps[index(next)].what;
      if (const auto* copy = std::get_if<Copy>(&what))
        us = sent_us(static_cast<double>(copy->bytes));
      if (const auto* copy = std::get_if<CopyRows>(&what)) {
        us = sent_us(static_cast<double>(copy->rows * copy->row_bytes));
      }
    }
    const double sent = std::exchange(lanes[lane_of(list.steps[id])].sent_us, 0.0);
    return begin_us + flag_us() + std::max(0.0, us - sent);
  }
  double flag_us() const { return profile.peer.sequential_us / 2.0; }

  // Streams beside each other, each half behind its waits; what comes as with Await.
  double end_of(const Interpret& step, size_t, double& begin_us) {
    for (const Half& half : step.halves) {
      for (const CounterWait& wait : half.waits) {
        const bool own = std::any_of(
            step.halves.begin(), step.halves.end(),
            [&](const Half& other) { return other.counter && *other.counter == wait.counter; });
        if (!own && counter_us(wait.counter) == kNever) return kNever;
      }
    }
    // CTAs that find no SM beside a persistent GEMM stay outside until its end.
    const bool fits = counted_us == 0.0 || plan.resources.comm_sms >= step.streams * step.blocks;
    if (!fits) begin_us = std::max(begin_us, counted_us + wait_us);
    const double start_us = begin_us + profile.host.launch_us;
    std::vector<double> free_us(index(step.streams), start_us);
    std::vector<double> stream_sent_us(index(step.streams), 0.0);
    for (const Half& half : step.halves) {
      double& us = free_us[index(half.stream)];
      double& sent = stream_sent_us[index(half.stream)];
      for (const CounterWait& wait : half.waits) us = std::max(us, counter_us(wait.counter));
      const auto bytes = static_cast<double>(half.rows * half.row_bytes);
      const double moved_us = sent_us(bytes) / profile.peer.collective_rate;
      if (half.to) {
        us += communicated(moved_us + flag_us());
        sent += moved_us;
      } else if (half.from) {
        us += std::max(0.0, moved_us - std::exchange(sent, 0.0)) +
              local_us((half.adds ? 2.0 : 1.0) * bytes);
      } else {
        us += local_us((half.adds ? 2.0 : 1.0) * bytes);
      }
      if (half.counter) counters_us[*half.counter] = us;
    }
    return *std::max_element(free_us.begin(), free_us.end());
  }
  double end_of(const Pack& pack, size_t, double begin_us) {
    const double tiles = plan.chunks[index(pack.chunk)].tiles;
    return begin_us + finish_us(tiles * plan.tile_m * plan.tile_n * element);
  }
  double end_of(const Unpack& unpack, size_t id, double begin_us) {
    const double bytes = bytes_behind(id);
    const double put_us = begin_us + (hides(id) ? 0.0 : finish_us(bytes));
    if (unpack.terms <= 1 || fast_share == 0.0) return put_us;
    return between_links(put_us, sum(id, bytes, begin_us), fast_share);
  }
  double end_of(const AddBias& bias, size_t id, double begin_us) {
    return begin_us + (hides(id) ? 0.0 : finish_us(static_cast<double>(bias.rows) * row_bytes));
  }

  double end_of(const WaitForSlots&, size_t, double begin_us) {
    return begin_us + (awaits ? profile.peer.gather_us + profile.peer.first_copy_us : 0.0);
  }
  double end_of(const Signal&, size_t, double) {
    const double bytes = std::exchange(chunk_bytes, 0.0);
    arrived_us.push_back(chunk_begin_us + communicated(profile.peer.copy_us + sent_us(bytes)));
    return arrived_us.back();
  }
  double end_of(const WaitForPeers& wait, size_t, double begin_us) {
    if (arrived_us.size() <= index(wait.step)) return kNever;
    return std::max(begin_us, arrived_us[index(wait.step)]);
  }
  double end_of(const MeetTiles&, size_t, double begin_us) {
    return begin_us + communicated(profile.peer.sequential_us);
  }

  double end_of(const PeerCollective& step, size_t, double begin_us) {
    const bool sends = std::any_of(step.pieces.begin(), step.pieces.end(),
                                   [](const Piece& piece) { return piece.send.has_value(); });
    return collect(static_cast<double>(step.stride), sends, step.reduces && step.gathers, begin_us);
  }
  double end_of(const LowLatency&, size_t, double begin_us) {
    return collect(static_cast<double>(plan::direct_piece_bytes(plan)), true,
                   plan::direct_in_pieces(plan), begin_us);
  }
  double end_of(const PeerExchange& step, size_t, double begin_us) {
    double sent = 0.0;
    double received = 0.0;
    for (const PeerMessages& messages : step.messages) {
      if (messages.destination) sent += static_cast<double>(messages.send_bytes);
      received += static_cast<double>(messages.receive_bytes);
    }
    return begin_us +
           communicated(profile.peer.sequential_us + sent_us(sent) / profile.peer.collective_rate +
                        slots_us(2.0 * received));
  }

  // --- GEMMs -------------------------------------------------------------------------------------

  double computed(double us) {
    price.expected.gemm_us += us;
    return us;
  }

  // Chunk after chunk, beside communication that has the other SMs.
  double count(const plan::TileOrder& order, double begin_us) {
    const double tiles = order.num_tiles();
    double all_us = tiles * tile_us;
    if (!cpu) {
      const auto low_run = [&](const plan::BandRun& run) {
        return run.tile_rows < profile.gemm.low_band_rows && run.count > 2;
      };
      const bool low = order.tiles_m >= 2 * profile.gemm.low_band_rows &&
                       std::any_of(order.runs, order.runs + order.num_runs, low_run);
      const bool many_ctas = ranks == 2 && lanes_beside * ctas_of(plan.chunks[0].max_ctas) >
                                               profile.link.slow_default_ctas;
      const bool large = plan.kernel == plan::Kernel::kSm90Cooperative ||
                         plan.kernel == plan::Kernel::kSm90PingpongWide;
      all_us = std::max(1.0, tiles / sms) * tile_us * profile.beside.nccl_factor *
               (many_ctas ? between_links(profile.beside.many_ctas_factor, 1.0, fast_share) : 1.0) /
               (low ? profile.gemm.low_band_rate : 1.0) *
               std::pow(static_cast<double>(sms) / ctas_beside(plan, machine),
                        large ? profile.gemm.fewer_sms_power_large : profile.gemm.fewer_sms_power);
    }
    price.computed_us.reserve(plan.chunks.size());
    for (int32_t chunk = 1; chunk <= order.num_chunks; ++chunk) {
      price.computed_us.push_back(begin_us + profile.gemm.start_us +
                                  all_us * order.chunk_begin[chunk] / tiles);
    }
    return counted_us = begin_us + computed(profile.gemm.start_us + all_us);
  }

  // A launch of an all-gather behind what has arrived, or the framework's GEMM of a chunk's part: whole rounds of tiles,
  // with those of the parts `before`.
  double launch(size_t id, int64_t before, int64_t tiles, int32_t at_once, double& begin_us) {
    const bool waits = !list.steps[id].after.empty();
    if (before == 0) {
      const double waited_us = peers ? profile.peer.gather_us : cpu || !waits ? 0.0 : fork_join_us;
      chunk_begin_us = begin_us = std::max(begin_us, behind(id) + waited_us);
      chunk_us = 0.0;
    }
    chunk_tiles = before + tiles;
    const double launched_us = std::exchange(chunk_us, chunk_tiles == 0 ? 0.0 : rounds_us(at_once));
    if (peers && waits) chunk_us += profile.peer.copy_us / 2.0;
    computed(chunk_us - launched_us);
    return chunk_begin_us + chunk_us;
  }
  double rounds_us(int32_t at_once) const {
    if (cpu) return static_cast<double>(chunk_tiles) * tile_us;
    const double rounds = rounds_of(chunk_tiles, at_once);
    if (peers) return profile.gemm.round_factor * rounds * tile_us;
    if (!gathers) return profile.gemm.start_us + rounds * tile_us;
    return profile.gemm.start_us +
           rounds * tile_us * profile.beside.gather_factor *
               std::pow(static_cast<double>(at_once) / sms, 1.0 - profile.gemm.fewer_sms_power);
  }

  // A ring's bands, one after the other: what the GEMM computes in each, and what it stores into peers' memory, once for
  // each part but those in their last turn. The two hold each other up.
  double pass_on(const Gemm& gemm, double begin_us) {
    const double gemm_us =
        profile.gemm.round_factor * rounds_of(gemm.end_tile, gemm.ctas) * tile_us;
    const double sent_part_us = sent_us(gemm.map.part_rows * row_bytes);
    const auto finals = static_cast<int32_t>(gemm.mirrors.size());
    const int32_t rounds = gemm.map.part_tile_rows / gemm.map.round_tile_rows;
    double us = profile.peer.ring_us +
                (gemm.map.part_tile_rows <= plan.cluster_m ? profile.peer.low_part_us : 0.0);
    for (int32_t band = 0; band < rounds + ranks - 1; ++band) {
      const plan::RingBand phases = plan::ring_band(ranks, rounds, band);
      const int32_t count = phases.end_phase - phases.first_phase;
      const int32_t sent = phases.end_phase == ranks ? count - 1 + finals : count;
      us += std::pow(std::pow(count * (gemm_us / ranks) / rounds, profile.beside.overlap_power) +
                         std::pow(sent * sent_part_us / rounds, profile.beside.overlap_power),
                     1.0 / profile.beside.overlap_power);
    }
    computed(gemm_us);
    communicated(parts_sent(plan) * sent_part_us);
    return begin_us + us + profile.peer.final_us * finals;
  }

  // An all-gather in one launch: each chunk's tiles as it arrives.
  double await_chunks(const Gemm& gemm, const plan::TileOrder& order, double& begin_us) {
    if (arrived_us.size() < plan.chunks.size()) return kNever;
    begin_us += profile.peer.gather_us;
    const auto flow_us = [&](int32_t chunk) {
      const double tiles = order.chunk_begin[chunk + 1] - order.chunk_begin[chunk];
      return profile.gemm.round_factor * tiles / gemm.ctas * tile_us;
    };
    double end_us = begin_us + flow_us(0);
    for (int32_t chunk = 1; chunk < order.num_chunks; ++chunk) {
      end_us = std::max(end_us, arrived_us[index(chunk - 1)]) + flow_us(chunk);
    }
    const double all_us =
        computed(profile.gemm.round_factor * rounds_of(order.num_tiles(), gemm.ctas) * tile_us);
    return std::max(end_us, begin_us + all_us) +
           profile.peer.gather_chunk_us * (order.num_chunks - 2);
  }

  // A direct plan's, which stores into peers' memory; the own piece comes last, and is stored at home.
  double store(int64_t tiles, double begin_us) {
    const double gemm_us = computed(profile.gemm.round_factor * rounds_of(tiles, sms) * tile_us);
    const double last = !plan::direct_in_pieces(plan) ? 1.0
                        : tiles <= sms                ? 1.0 - 1.0 / ranks
                                                      : 0.0;
    const double piece = static_cast<double>(plan::direct_piece_bytes(plan));
    return begin_us + profile.peer.direct_us +
           std::max(gemm_us + last * last_round_us(plan, machine, tiles, sms),
                    communicated(sent_us((ranks - 1) * piece)));
  }

  // One of an all-to-all's launches.
  double launch_apart(const Gemm& gemm, double begin_us) {
    const int64_t rows = gemm.rows.end - gemm.rows.begin;
    const bool leaves = gemm.outputs[0].where.buffer == Buffer::kSlot;
    double us = launch_us(plan, machine, rows, gemm.ctas);
    if (peers)
      us = std::max(us,
                    static_cast<double>(problem.k) * row_bytes / (1e3 * profile.gemm.weight_gbps));
    if (leaves) us = std::max(us, sent_us(static_cast<double>(rows) * row_bytes));
    return begin_us + computed(us + (price.expected.gemm_us > 0.0 ? profile.host.launch_us : 0.0));
  }

  // An all-to-all's in one launch: messages leave as they are made, and arrive as the peers make theirs; what came last
  // is still to be copied.
  double send_messages(const Gemm& gemm, int64_t tiles, double begin_us) {
    double received = 0.0;
    for (const Move& move : gemm.moves) received += static_cast<double>(move.bytes);
    const int32_t* const ranges = gemm.map.range_begin;
    const int64_t own_end = rank + 1 < ranks ? ranges[rank + 1] : gemm.rows.end;
    const auto sent = static_cast<double>(gemm.rows.end - (own_end - ranges[rank])) * row_bytes;
    const double gemm_us =
        computed(profile.gemm.round_factor * rounds_of(tiles, gemm.ctas) * tile_us);
    return begin_us + profile.peer.direct_us +
           std::max(gemm_us, communicated(sent_us(std::max(sent, received)))) +
           last_round_us(plan, machine, tiles, sms);
  }

  // --- communication -----------------------------------------------------------------------------

  double communicated(double us) {
    price.expected.communication_us += us;
    return us;
  }

  // A collective that has the machine to itself.
  double alone_us(double bytes) const {
    const bool pair = problem.op == plan::Op::kGemmAllReduce && ranks == 2 && !cpu;
    const double slow_rate = pair ? profile.link.slow_pair_rate : profile.calls.slow_link.link_rate;
    const double rate =
        between_links(slow_rate, profile.link.alone_rate, fast_share) * one_way_rate();
    return (cpu ? 0.0 : profile.link.alone_start_us) + machine.link_latency_us +
           bytes / (1e3 * machine.link_gbps * rate);
  }

  double beside_on_cpu_us(double bytes) const {
    return profile.cpu.call_us + machine.link_latency_us + bytes / (1e3 * machine.link_gbps);
  }

  // Rate of the collective's bytes, of that of an all-reduce's.
  double one_way_rate() const {
    const bool one_way = plan.collective == plan::Collective::kReduceScatter ||
                         plan.collective == plan::Collective::kAllGather;
    return one_way ? profile.link.one_way_rate : 1.0;
  }

  plan::Profile::Call call_model() const {
    const plan::Profile::Call slow = slow_call();
    plan::Profile::Call fast = fast_call();
    // What was measured on the fastest link: with a faster one more of it.
    fast.cta_gbps *= std::max(1.0, machine.link_gbps / profile.link.fast_most_gbps);
    const auto between = [&](double plan::Profile::Call::* of) {
      return between_links(slow.*of, fast.*of, fast_share);
    };
    return {between(&plan::Profile::Call::start_us), between(&plan::Profile::Call::link_rate),
            between(&plan::Profile::Call::cta_gbps), between(&plan::Profile::Call::latencies)};
  }
  plan::Profile::Call slow_call() const {
    const plan::Profile::Calls& calls = profile.calls;
    if (plan.collective == plan::Collective::kExchange) return calls.slow_link_exchange;
    return {calls.slow_link.start_us, calls.slow_link.link_rate * one_way_rate(),
            calls.slow_link.cta_gbps * one_way_rate(), calls.slow_link.latencies};
  }
  plan::Profile::Call fast_call() const {
    const plan::Profile::Calls& calls = profile.calls;
    const bool window = plan.resources.window;
    switch (plan.collective) {
      case plan::Collective::kExchange:
        return calls.exchange;
      case plan::Collective::kReduceScatter:
        return window ? calls.reduce_scatter_window : calls.reduce_scatter;
      case plan::Collective::kAllGather:
        return window ? calls.all_gather_window : calls.all_gather;
      default:
        if (ranks > 2) return window ? calls.all_reduce_window_of_many : calls.all_reduce_of_many;
        return window ? calls.all_reduce_window : calls.all_reduce;
    }
  }

  int64_t ctas_of(int32_t max_ctas) const {
    if (max_ctas != 0) return max_ctas;
    return std::llround(between_links(static_cast<double>(profile.link.slow_default_ctas),
                                      static_cast<double>(profile.link.default_ctas), fast_share));
  }

  // Over all ranks' parts.
  double bytes_of(const Collective& call) const {
    return static_cast<double>(call.count) * plan::op_row_parts(problem) * element;
  }
  double bytes_of(const std::vector<Message>& messages) const {
    double bytes = 0.0;
    for (const Message& one : messages)
      bytes += one.peer == rank ? 0.0 : static_cast<double>(one.bytes);
    return bytes;
  }
  // What the chunk's communication left for a step that puts it in place.
  double bytes_behind(size_t id) const {
    const Step& call = list.steps[index(list.steps[id].after[0])];
    return static_cast<double>(std::get<Collective>(call.what).count) * element;
  }

  // A collective over peers in one kernel, of so many bytes for each rank. Sums of pieces go to everyone.
  double collect(double piece, bool sends, bool twice, double begin_us) {
    const double out_us = sent_us((ranks - 1) * piece) / profile.peer.collective_rate;
    if (sends) {
      const double once_us = out_us + local_us((ranks + 1) * piece);
      return begin_us + communicated(profile.peer.sequential_us + (twice ? 2.0 : 1.0) * once_us);
    }
    const double end_us = begin_us + slots_us((ranks + 1) * piece);
    return twice ? end_us + profile.peer.sequential_us + out_us + local_us(2 * (ranks - 1) * piece)
                 : end_us;
  }

  // The sum of an exchanged chunk: on what SMs GEMM and communication leave, and after the GEMM on all.
  double sum(size_t id, double bytes, double begin_us) const {
    const double busy = all_bytes / (1e3 * profile.calls.exchange.cta_gbps * counted_us);
    const double beside =
        1e3 * profile.beside.sum_sm_gbps * std::max(0.0, plan.resources.comm_sms - busy);
    const double until_us = std::max(begin_us, counted_us);
    const double hidden = (until_us - begin_us) * beside;
    const double end_us = bytes <= hidden
                              ? begin_us + bytes / beside
                              : until_us + (bytes - hidden) / (1e3 * profile.local.finish_gbps);
    return end_us + (next_of_lane[id] == kNone ? profile.local.finish_start_us : 0.0);
  }

  // What puts chunks in place hides beside the communication of the next one, and what copies an all-gather's rows beside
  // their GEMM.
  bool hides(size_t id) const {
    return list.steps[id].lane == Lane::kCopy && (gathers || next_of_lane[id] != kNone);
  }
  double finish_us(double bytes) const {
    return cpu ? bytes / (1e3 * profile.cpu.copy_gbps)
               : profile.local.finish_start_us + bytes / (1e3 * profile.local.finish_gbps);
  }
  double local_us(double bytes) const { return bytes / (1e3 * profile.local.read_write_gbps); }
  double slots_us(double bytes) const { return bytes / (1e3 * profile.local.slot_gbps); }
  double sent_us(double bytes) const { return bytes / (1e3 * machine.peer_gbps); }
};

}  // namespace

Price price(const StepList& list, const plan::Plan& plan, int32_t rank,
            const plan::Machine& machine, double kernel_us) {
  Walk walk = {list, plan, rank, machine, kernel_us};
  walk.run();
  return std::move(walk.price);
}

Prediction predict(const plan::Plan& plan, const plan::Machine& machine) {
  if (plan::tiles_m(plan) == 0 || plan::tiles_n(plan) == 0) return {};
  // A machine that nobody measured: no plan is better than another.
  if (machine.sm_count <= 0 || machine.sm_gflops <= 0.0 ||
      (plan.problem.world_size > 1 && machine.link_gbps <= 0.0)) {
    return {.total_us = kNever};
  }
  Variant variant;
  variant.kernel_takes = takes_by_default(plan);
  return price(lower(plan, 0, machine, variant), plan, 0, machine).expected;
}

}  // namespace overlap::steps
