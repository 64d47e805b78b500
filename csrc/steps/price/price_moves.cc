// The cost of each kind of step that moves data, signals or waits.
#include <algorithm>
#include <utility>

#include "steps/price/price_walk.h"

namespace overlap::steps {
namespace {

// A collective that has the machine to itself.
double alone_us(const Walk& w, double bytes) {
  const bool pair = w.problem.traits().all_reduces() && w.ranks == 2 && !w.cpu;
  const double slow_rate =
      pair ? w.profile.link.slow_pair_rate : w.profile.calls.slow_link.link_rate;
  const double rate =
      between_links(slow_rate, w.profile.link.alone_rate, w.fast_share) * one_way_rate(w);
  return (w.cpu ? 0.0 : w.profile.link.alone_start_us) + w.machine.link_latency_us +
         bytes / (1e3 * w.machine.link_gbps * rate);
}

double beside_on_cpu_us(const Walk& w, double bytes) {
  return w.profile.cpu.call_us + w.machine.link_latency_us + bytes / (1e3 * w.machine.link_gbps);
}

plan::Profile::Call slow_call(const Walk& w) {
  const plan::Profile::Calls& calls = w.profile.calls;
  if (w.plan.collective == plan::Collective::kExchange) return calls.slow_link_exchange;
  return {calls.slow_link.start_us, calls.slow_link.link_rate * one_way_rate(w),
          calls.slow_link.cta_gbps * one_way_rate(w), calls.slow_link.latencies};
}

plan::Profile::Call fast_call(const Walk& w) {
  const plan::Profile::Calls& calls = w.profile.calls;
  const bool window = w.plan.resources.window;
  switch (w.plan.collective) {
    case plan::Collective::kExchange:
      return calls.exchange;
    case plan::Collective::kReduceScatter:
      return window ? calls.reduce_scatter_window : calls.reduce_scatter;
    case plan::Collective::kAllGather:
      return window ? calls.all_gather_window : calls.all_gather;
    default:
      if (w.ranks > 2) return window ? calls.all_reduce_window_of_many : calls.all_reduce_of_many;
      return window ? calls.all_reduce_window : calls.all_reduce;
  }
}

// A message of a program, or of a plan in two levels: to another host, as far as the machine knows hosts.
double message_us(const Walk& w, double bytes) {
  const bool across = w.plan.clique > 0 && w.machine.across_gbps > 0.0;
  const double gbps = across ? w.machine.across_gbps : w.machine.link_gbps;
  return (across ? w.machine.across_latency_us : w.machine.link_latency_us) + bytes / (1e3 * gbps);
}

// The copy engine's time from rank to rank.
double carried(Walk& w, size_t id, bool leaves, double bytes) {
  const double us = w.communicated(w.profile.peer.copy_us + w.sent_us(bytes));
  if (leaves) w.lanes[w.lane_of(w.list.steps[id])].sent_us += us;
  return us;
}

// A collective over peers in one kernel, with a piece of `piece` bytes for each rank. Sums of pieces go to everyone.
double collect(Walk& w, double piece, bool sends, bool twice, double begin_us) {
  const double out_us = w.sent_us((w.ranks - 1) * piece) / w.profile.peer.collective_rate;
  if (sends) {
    const double once_us = out_us + w.local_us((w.ranks + 1) * piece);
    return begin_us + w.communicated(w.profile.peer.sequential_us + (twice ? 2.0 : 1.0) * once_us);
  }
  const double end_us = begin_us + w.slots_us((w.ranks + 1) * piece);
  return twice ? end_us + w.profile.peer.sequential_us + out_us +
                     w.local_us(2 * (w.ranks - 1) * piece)
               : end_us;
}

// The sum of an exchanged chunk runs on the SMs that GEMM and communication leave, and on all after the GEMM.
double sum(const Walk& w, size_t id, double bytes, double begin_us) {
  const double busy = w.all_bytes / (1e3 * w.profile.calls.exchange.cta_gbps * w.counted_us);
  const double beside =
      1e3 * w.profile.beside.sum_sm_gbps * std::max(0.0, w.plan.resources.comm_sms - busy);
  const double until_us = std::max(begin_us, w.counted_us);
  const double hidden = (until_us - begin_us) * beside;
  const double end_us = bytes <= hidden
                            ? begin_us + bytes / beside
                            : until_us + (bytes - hidden) / (1e3 * w.profile.local.finish_gbps);
  return end_us + (w.next_of_lane[id] == kNone ? w.profile.local.finish_start_us : 0.0);
}

// CTAs that find no SM beside a persistent GEMM start after its end.
double when_ctas_fit(const Walk& w, double begin_us, int64_t ctas) {
  const bool fit = w.counted_us == 0.0 || w.plan.resources.comm_sms >= ctas;
  return fit ? begin_us : std::max(begin_us, w.counted_us + w.wait_us);
}

// Blocks that find no SM beside the caller's kernel start when its tiles end, all at about the same time.
double when_tiles_end(const Walk& w, double begin_us, int64_t blocks) {
  if (w.plan.resources.comm_sms >= blocks || begin_us >= w.callers_end_us) return begin_us;
  return std::min(begin_us + w.callers_tile_us, w.callers_end_us);
}

}  // namespace

double one_way_rate(const Walk& w) {
  const bool one_way = w.plan.collective == plan::Collective::kReduceScatter ||
                       w.plan.collective == plan::Collective::kAllGather;
  return one_way ? w.profile.link.one_way_rate : 1.0;
}

plan::Profile::Call call_model(const Walk& w) {
  const plan::Profile::Call slow = slow_call(w);
  plan::Profile::Call fast = fast_call(w);
  // A faster link than any measured one carries more for each CTA.
  fast.cta_gbps *= std::max(1.0, w.machine.link_gbps / w.profile.link.fast_most_gbps);
  const auto between = [&](double plan::Profile::Call::* of) {
    return between_links(slow.*of, fast.*of, w.fast_share);
  };
  return {between(&plan::Profile::Call::start_us), between(&plan::Profile::Call::link_rate),
          between(&plan::Profile::Call::cta_gbps), between(&plan::Profile::Call::latencies)};
}

double end_of(const WaitForTiles& wait, Walk& w, size_t, double& begin_us) {
  return std::max(begin_us, w.counter_us(wait.chunk) + w.wait_us);
}

double end_of(const Mark&, Walk& w, size_t id, double& begin_us) {
  return std::max(begin_us, w.after_us(id) + w.wait_us);
}

double end_of(const Arrive& arrive, Walk& w, size_t, double& begin_us) {
  return w.brought_us[arrive.chunk] = begin_us;
}

double end_of(const Collective& call, Walk& w, size_t, double& begin_us) {
  const double bytes = w.bytes_of(call);
  if (w.ranks == 1 || bytes == 0.0) return begin_us;
  if (w.lanes_beside == 0) return begin_us + w.communicated(alone_us(w, bytes));
  if (w.cpu) return begin_us + w.communicated(beside_on_cpu_us(w, bytes));
  const int64_t ctas = w.ctas_of(call.max_ctas);
  begin_us = when_ctas_fit(w, begin_us, ctas * w.lanes_beside);
  begin_us = when_tiles_end(w, begin_us, ctas * w.lanes_beside);
  const plan::Profile::Call model = call_model(w);
  LaneState& lane = w.lanes[static_cast<size_t>(side_lane(call.lane))];
  lane.calls = true;
  lane.flows_at_us = begin_us + (model.start_us + model.latencies * w.machine.link_latency_us);
  lane.bytes = bytes;
  lane.most = static_cast<double>(ctas) * (model.cta_gbps * 1e3);
  return kNever;
}

double end_of(const SendReceive& call, Walk& w, size_t id, double& begin_us) {
  const double sent = w.bytes_of(call.sends);
  const double received = w.bytes_of(call.receives);
  if (w.program) return begin_us + w.communicated(message_us(w, std::max(sent, received)));
  const bool beside = w.list.steps[id].lane != Lane::kCaller;
  if (sent + received == 0.0) return begin_us;
  if (w.hierarchical) {
    const double call_us = w.cpu ? w.profile.cpu.call_us : 0.0;
    return begin_us + w.communicated(call_us + message_us(w, std::max(sent, received)));
  }
  // An all-gather's: as many bytes as a collective over all ranks' parts.
  if (w.gathers)
    return begin_us + w.communicated(beside_on_cpu_us(w, received / (w.ranks - 1) * w.ranks));
  if (beside && w.ranks == 2) {  // until the peer has computed its rows
    const auto rows = static_cast<int64_t>(received / w.row_bytes);
    begin_us = std::max(begin_us, launch_us(w.plan, w.machine, rows, w.sms));
  }
  return begin_us + w.communicated(exchange_us(w.machine, sent, received, beside));
}

double end_of(const Copy& copy, Walk& w, size_t id, double& begin_us) {
  const auto bytes = static_cast<double>(copy.bytes);
  const bool leaves = w.is_remote(copy.destination);
  if (w.program && (leaves || w.is_remote(copy.source)))
    return begin_us + carried(w, id, leaves, bytes);
  if (leaves && w.gathers && !w.hierarchical) {
    if (w.chunk_bytes == 0.0) w.chunk_begin_us = begin_us;
    return w.chunk_begin_us + w.sent_us(w.chunk_bytes += bytes);
  }
  if (leaves) return begin_us + w.communicated(w.sent_us(bytes));
  const bool finishes = w.list.steps[id].lane == Lane::kCopy;
  if (w.hierarchical && finishes && !w.hides(id))
    return begin_us + w.profile.local.copy_start_us + bytes / (1e3 * w.profile.local.copy_gbps);
  if (w.cpu || w.hides(id) || (finishes && !w.plan.resources.window)) return begin_us;
  return begin_us + w.profile.local.copy_start_us +
         (finishes ? w.chunk_bytes_after(id) : bytes) / (1e3 * w.profile.local.copy_gbps);
}

double end_of(const CopyRows& copy, Walk& w, size_t id, double& begin_us) {
  const auto bytes = static_cast<double>(copy.rows * copy.row_bytes);
  const bool leaves = w.is_remote(copy.destination);
  if (leaves || w.is_remote(copy.source)) return begin_us + carried(w, id, leaves, bytes);
  return begin_us + w.finish_us((copy.adds ? 2.0 : 1.0) * bytes);
}

double end_of(const Pack& pack, Walk& w, size_t, double& begin_us) {
  const double tiles = w.plan.chunks[at(pack.chunk)].tiles;
  return begin_us + w.finish_us(tiles * w.plan.tile_m * w.plan.tile_n * w.element);
}

double end_of(const Unpack& unpack, Walk& w, size_t id, double& begin_us) {
  const double bytes = w.chunk_bytes_after(id);
  const double put_us = begin_us + (w.hides(id) ? 0.0 : w.finish_us(bytes));
  if (unpack.terms <= 1 || w.fast_share == 0.0) return put_us;
  return between_links(put_us, sum(w, id, bytes, begin_us), w.fast_share);
}

double end_of(const AddTerms& sum, Walk& w, size_t id, double& begin_us) {
  const double bytes = static_cast<double>(sum.rows) * w.row_bytes * (sum.terms + 1) / 2.0;
  return begin_us + (w.hides(id) ? 0.0 : w.finish_us(bytes));
}

double end_of(const WaitForSlots&, Walk& w, size_t, double& begin_us) {
  return begin_us + (w.awaits ? w.profile.peer.gather_us + w.profile.peer.first_copy_us : 0.0);
}

double end_of(const WaitForPeers& wait, Walk& w, size_t, double& begin_us) {
  if (w.arrived_us.size() <= at(wait.step)) return kNever;
  return std::max(begin_us, w.arrived_us[at(wait.step)]);
}

double end_of(const Signal&, Walk& w, size_t, double& begin_us) {
  if (w.plan.collective == plan::Collective::kStripes ||
      w.hierarchical) {  // after what has arrived
    w.arrived_us.push_back(begin_us + w.flag_us());
    return begin_us;
  }
  const double bytes = std::exchange(w.chunk_bytes, 0.0);
  w.arrived_us.push_back(w.chunk_begin_us +
                         w.communicated(w.profile.peer.copy_us + w.sent_us(bytes)));
  return w.arrived_us.back();
}

double end_of(const MeetTiles&, Walk& w, size_t, double& begin_us) {
  return begin_us + w.communicated(w.profile.peer.sequential_us);
}

double end_of(const Announce&, Walk& w, size_t, double& begin_us) {
  return begin_us + w.flag_us();
}

// A sender takes as long for these bytes as this rank has for what it sent meanwhile; the rest has yet to come.
double end_of(const Await&, Walk& w, size_t id, double& begin_us) {
  double us = 0.0;
  if (const StepId next = w.next_of_lane[id]; next != kNone) {
    const What& what = w.list.steps[at(next)].what;
    if (const auto* copy = std::get_if<Copy>(&what))
      us = w.sent_us(static_cast<double>(copy->bytes));
    if (const auto* copy = std::get_if<CopyRows>(&what)) {
      us = w.sent_us(static_cast<double>(copy->rows * copy->row_bytes));
    }
  }
  const double sent = std::exchange(w.lanes[w.lane_of(w.list.steps[id])].sent_us, 0.0);
  return begin_us + w.flag_us() + std::max(0.0, us - sent);
}

double end_of(const PeerCollective& step, Walk& w, size_t, double& begin_us) {
  const bool sends = std::any_of(step.pieces.begin(), step.pieces.end(),
                                 [](const Piece& piece) { return piece.send.has_value(); });
  return collect(w, static_cast<double>(step.stride), sends, step.reduces && step.gathers,
                 begin_us);
}

double end_of(const LowLatency&, Walk& w, size_t, double& begin_us) {
  return collect(w, static_cast<double>(plan::direct_piece_bytes(w.plan)), true,
                 plan::direct_in_pieces(w.plan), begin_us);
}

double end_of(const PeerExchange& step, Walk& w, size_t, double& begin_us) {
  double sent = 0.0;
  double received = 0.0;
  for (const PeerMessages& messages : step.messages) {
    if (messages.destination) sent += static_cast<double>(messages.send_bytes);
    received += static_cast<double>(messages.receive_bytes);
  }
  return begin_us + w.communicated(w.profile.peer.sequential_us +
                                   w.sent_us(sent) / w.profile.peer.collective_rate +
                                   w.slots_us(2.0 * received));
}

}  // namespace overlap::steps
