// The cost of each kind of GEMM.
#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/gather_rounds.h"
#include "plan/ring_order.h"
#include "steps/price/price_walk.h"

namespace overlap::steps {
namespace {

// Chunk after chunk, beside communication that has the other SMs.
double count(Walk& w, const plan::TileOrder& order, double begin_us) {
  const double tiles = order.num_tiles();
  double all_us = tiles * w.tile_us;
  if (!w.cpu) {
    const auto low_run = [&](const plan::BandRun& run) {
      return run.tile_rows < w.profile.gemm.low_band_rows && run.count > 2;
    };
    const bool low = order.tiles_m >= 2 * w.profile.gemm.low_band_rows &&
                     std::any_of(order.runs, order.runs + order.num_runs, low_run);
    const bool many_ctas = w.ranks == 2 && w.lanes_beside * w.ctas_of(w.plan.chunks[0].max_ctas) >
                                               w.profile.link.slow_default_ctas;
    const bool large = plan::traits(w.plan.kernel).shape.tile_n > 128;
    all_us =
        std::max(1.0, tiles / w.sms) * w.tile_us * w.profile.beside.nccl_factor *
        (many_ctas ? between_links(w.profile.beside.many_ctas_factor, 1.0, w.fast_share) : 1.0) /
        (low ? w.profile.gemm.low_band_rate : 1.0) *
        std::pow(static_cast<double>(w.sms) / ctas_beside(w.plan, w.machine),
                 large ? w.profile.gemm.fewer_sms_power_large : w.profile.gemm.fewer_sms_power);
  }
  w.price.computed_us.reserve(w.plan.chunks.size());
  for (int32_t chunk = 1; chunk <= order.num_chunks; ++chunk) {
    w.price.computed_us.push_back(begin_us + w.profile.gemm.start_us +
                                  all_us * order.chunk_begin[chunk] / tiles);
  }
  return w.counted_us = begin_us + w.computed(w.profile.gemm.start_us + all_us);
}

double rounds_us(const Walk& w, int32_t at_once) {
  if (w.cpu) return static_cast<double>(w.chunk_tiles) * w.tile_us;
  const double rounds = rounds_of(w.chunk_tiles, at_once);
  if (w.peers) return w.profile.gemm.round_factor * rounds * w.tile_us;
  if (!w.gathers) return w.profile.gemm.start_us + rounds * w.tile_us;
  return w.profile.gemm.start_us +
         rounds * w.tile_us * w.profile.beside.gather_factor *
             std::pow(static_cast<double>(at_once) / w.sms, 1.0 - w.profile.gemm.fewer_sms_power);
}

// A launch of an all-gather after what has arrived, or the framework's GEMM of a chunk's part: whole rounds of tiles,
// with those of the parts `before`.
double launch(Walk& w, size_t id, int64_t before, int64_t tiles, int32_t at_once,
              double& begin_us) {
  const bool waits = !w.list.steps[id].after.empty();
  if (before == 0) {
    const double waited_us = w.peers           ? w.profile.peer.gather_us
                             : w.cpu || !waits ? 0.0
                                               : w.fork_join_us;
    w.chunk_begin_us = begin_us = std::max(begin_us, w.after_us(id) + waited_us);
    w.chunk_us = 0.0;
  }
  w.chunk_tiles = before + tiles;
  const double launched_us =
      std::exchange(w.chunk_us, w.chunk_tiles == 0 ? 0.0 : rounds_us(w, at_once));
  if (w.peers && waits) w.chunk_us += w.profile.peer.copy_us / 2.0;
  w.computed(w.chunk_us - launched_us);
  return w.chunk_begin_us + w.chunk_us;
}

// A ring's bands, one after the other: what the GEMM computes in each, and what it stores into peers' memory, once for
// each part but those in their last turn. The two hold each other up.
double pass_on(Walk& w, const Gemm& gemm, double begin_us) {
  const double gemm_us =
      w.profile.gemm.round_factor * rounds_of(gemm.end_tile, gemm.ctas) * w.tile_us;
  const double sent_part_us = w.sent_us(gemm.map.part_rows * w.row_bytes);
  const auto finals = static_cast<int32_t>(gemm.mirrors.size());
  const int32_t rounds = gemm.map.part_tile_rows / gemm.map.round_tile_rows;
  double us = w.profile.peer.ring_us +
              (gemm.map.part_tile_rows <= w.plan.cluster_m ? w.profile.peer.low_part_us : 0.0);
  for (int32_t band = 0; band < rounds + w.ranks - 1; ++band) {
    const plan::RingBand phases = plan::ring_band(w.ranks, rounds, band);
    const int32_t count = phases.end_phase - phases.first_phase;
    const int32_t sent = phases.end_phase == w.ranks ? count - 1 + finals : count;
    us += std::pow(std::pow(count * (gemm_us / w.ranks) / rounds, w.profile.beside.overlap_power) +
                       std::pow(sent * sent_part_us / rounds, w.profile.beside.overlap_power),
                   1.0 / w.profile.beside.overlap_power);
  }
  w.computed(gemm_us);
  w.communicated(parts_sent(w.plan) * sent_part_us);
  return begin_us + us + w.profile.peer.final_us * finals;
}

// An all-gather in one launch: each chunk's tiles as it arrives.
double await_chunks(Walk& w, const Gemm& gemm, const plan::TileOrder& order, double& begin_us) {
  if (w.arrived_us.size() < w.plan.chunks.size()) return kNever;
  begin_us += w.profile.peer.gather_us;
  const auto flow_us = [&](int32_t chunk) {
    const double tiles = order.chunk_begin[chunk + 1] - order.chunk_begin[chunk];
    return w.profile.gemm.round_factor * tiles / gemm.ctas * w.tile_us;
  };
  double end_us = begin_us + flow_us(0);
  for (int32_t chunk = 1; chunk < order.num_chunks; ++chunk) {
    end_us = std::max(end_us, w.arrived_us[at(chunk - 1)]) + flow_us(chunk);
  }
  const double all_us =
      w.computed(w.profile.gemm.round_factor * rounds_of(order.num_tiles(), gemm.ctas) * w.tile_us);
  return std::max(end_us, begin_us + all_us) +
         w.profile.peer.gather_chunk_us * (order.num_chunks - 2);
}

// A direct plan's, which stores into peers' memory; this rank's own piece comes last, and is stored at home.
double store(Walk& w, int64_t tiles, double begin_us) {
  const double gemm_us =
      w.computed(w.profile.gemm.round_factor * rounds_of(tiles, w.sms) * w.tile_us);
  const double last = !plan::direct_in_pieces(w.plan) ? 1.0
                      : tiles <= w.sms                ? 1.0 - 1.0 / w.ranks
                                                      : 0.0;
  const double piece = static_cast<double>(plan::direct_piece_bytes(w.plan));
  return begin_us + w.profile.peer.direct_us +
         std::max(gemm_us + last * last_round_us(w.plan, w.machine, tiles, w.sms),
                  w.communicated(w.sent_us((w.ranks - 1) * piece)));
}

// One of an all-to-all's launches.
double launch_apart(Walk& w, const Gemm& gemm, double begin_us) {
  const int64_t rows = gemm.rows.count();
  const bool leaves = gemm.outputs[0].where.buffer == Buffer::kSlot;
  double us = launch_us(w.plan, w.machine, rows, gemm.ctas);
  if (w.peers)
    us = std::max(
        us, static_cast<double>(w.problem.k) * w.row_bytes / (1e3 * w.profile.gemm.weight_gbps));
  if (leaves) us = std::max(us, w.sent_us(static_cast<double>(rows) * w.row_bytes));
  return begin_us +
         w.computed(us + (w.price.expected.gemm_us > 0.0 ? w.profile.host.launch_us : 0.0));
}

// An all-to-all's in one launch: messages leave as they are made, and arrive as the peers make theirs; what came last
// is still to be copied.
double send_messages(Walk& w, const Gemm& gemm, int64_t tiles, double begin_us) {
  double received = 0.0;
  for (const Move& move : gemm.moves) received += static_cast<double>(move.bytes);
  const int32_t* const ranges = gemm.map.range_begin;
  const int64_t own_end = w.rank + 1 < w.ranks ? ranges[w.rank + 1] : gemm.rows.end;
  const auto sent = static_cast<double>(gemm.rows.end - (own_end - ranges[w.rank])) * w.row_bytes;
  const double gemm_us =
      w.computed(w.profile.gemm.round_factor * rounds_of(tiles, gemm.ctas) * w.tile_us);
  return begin_us + w.profile.peer.direct_us +
         std::max(gemm_us, w.communicated(w.sent_us(std::max(sent, received)))) +
         last_round_us(w.plan, w.machine, tiles, w.sms);
}

// On the SMs that it does not leave. While NCCL's calls go on beside it, it takes longer, and their CTAs take SMs from it
// where it has not left as many.
double callers_us_beside(const Walk& w, bool communicates) {
  if (w.cpu) return w.callers_us;
  const auto share_of = [&](double from, double taken) {
    return std::pow(from / std::max(1.0, w.sms - taken), w.profile.gemm.fewer_sms_power);
  };
  const double left = w.plan.resources.comm_sms;
  const double own_us = w.callers_us * share_of(w.sms, left);
  if (!communicates || plan::over_peers(w.plan)) return own_us;
  const plan::Profile::Call model = call_model(w);
  const auto ctas =
      static_cast<double>(w.ctas_of(w.plan.chunks[0].max_ctas) * w.plan.resources.lanes);
  const double rate = std::min(w.machine.link_gbps * model.link_rate, ctas * model.cta_gbps) * 1e3;
  const double slower =
      w.profile.beside.nccl_factor * share_of(std::max(1.0, w.sms - left), std::max(left, ctas));
  return own_us + std::min(own_us, w.all_bytes / rate) * (slower - 1.0);
}

}  // namespace

double end_of(const Gemm& gemm, Walk& w, size_t id, double& begin_us) {
  const plan::TileOrder& order = w.list.orders[at(gemm.order)];
  const int64_t tiles = gemm.end_tile - gemm.first_tile;
  if (gemm.counts) return count(w, order, begin_us);
  if (gemm.announces) return pass_on(w, gemm, begin_us);
  if (gemm.awaits_chunks) return await_chunks(w, gemm, order, begin_us);
  const bool after = w.plan.schedule == plan::Schedule::kSequential;
  if (w.plan.collective == plan::Collective::kDirect && !after) return store(w, tiles, begin_us);
  if (gemm.sends_messages) return send_messages(w, gemm, tiles, begin_us);
  if (w.all_to_all) return launch_apart(w, gemm, begin_us);
  return launch(w, id, 0, tiles, gemm.ctas, begin_us);
}

double end_of(const LibraryGemm& gemm, Walk& w, size_t id, double& begin_us) {
  const int64_t rows = gemm.rows.count();
  const int64_t tiles = (rows + w.plan.tile_m - 1) / w.plan.tile_m * plan::tiles_n(w.plan);
  if (w.program) {
    return begin_us + w.computed(w.profile.gemm.start_us + rounds_of(tiles, w.sms) * w.tile_us);
  }
  if (w.plan.collective == plan::Collective::kStripes && w.peers) {
    const double bytes = static_cast<double>(rows) * w.row_bytes;
    const double sent_us = w.is_remote(gemm.output.where) ? w.communicated(w.sent_us(bytes)) : 0.0;
    const double us = w.computed(library_us(w.plan, w.machine, rows, w.sms));
    return begin_us + w.profile.host.launch_us + std::max(us, sent_us);
  }
  if (w.lanes_beside == 0 || w.all_to_all) {  // nothing is beside it
    if (w.peers || w.all_to_all) {
      return begin_us + w.computed(library_us(w.plan, w.machine, rows, w.sms));
    }
    const double work = w.cpu ? static_cast<double>(plan::tiles_m(w.plan)) * plan::tiles_n(w.plan)
                              : std::max(1.0, library_tiles(w.plan, rows) / w.sms);
    return begin_us + w.computed(w.profile.gemm.start_us + work * w.tile_us);
  }
  const bool goes_on = id > 0 && w.list.steps[id].after.empty() &&
                       std::holds_alternative<LibraryGemm>(w.list.steps[id - 1].what);
  return launch(w, id, goes_on ? w.chunk_tiles : 0, tiles, ctas_beside(w.plan, w.machine),
                begin_us);
}

double end_of(const CallersKernel& kernel, Walk& w, size_t id, double& begin_us) {
  const size_t counters = at(std::max(1, w.list.counters));
  std::vector<double> tiles(counters, 0.0);
  for (const int32_t counter : w.list.tiles.chunks) ++tiles[at(counter)];
  const auto all = static_cast<double>(w.list.tiles.chunks.size());
  const bool several =
      std::count_if(tiles.begin(), tiles.end(), [](double n) { return n > 0.0; }) > 1;
  const double all_us = callers_us_beside(w, several && (kernel.counts || kernel.awaits));
  begin_us = std::max(begin_us, w.after_us(id));
  double us = begin_us;
  for (size_t counter = 0; counter < counters; ++counter) {
    if (kernel.awaits && tiles[counter] > 0.0) {
      const auto brought = w.brought_us.find(static_cast<int32_t>(counter));
      if (brought == w.brought_us.end()) return kNever;
      us = std::max(us, brought->second);
    }
    us += all > 0.0 ? all_us * tiles[counter] / all : 0.0;
    if (kernel.counts) w.price.computed_us.push_back(us);
  }
  w.computed(all_us);
  if (w.plan.collective == plan::Collective::kStripes && w.peers) {
    const auto rows = static_cast<double>(w.plan.problem.m - plan::part_rows(w.plan));
    us = std::max(us, begin_us + w.communicated(w.sent_us(rows * w.row_bytes)));
  }
  w.callers_end_us = us;
  w.callers_tile_us = all > 0.0 ? all_us / std::ceil(all / w.sms) : 0.0;
  return us;
}

}  // namespace overlap::steps
