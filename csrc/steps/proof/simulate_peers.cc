// Steps over peers' memory, except for GEMMs, taken apart.
#include <algorithm>

#include "plan/low_latency.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

// CTAs of a collective in one kernel, at most.
constexpr int32_t kPeerBlocks = 128;

}  // namespace

// --- over peers ---

// Ranks that this rank's signals reach, and whose it awaits.
std::vector<int32_t> Simulation::peers_of(const Here& here) const {
  const int32_t count = plan::peer_ranks(*here.plan);
  const int32_t first = here.rank / count * count;
  std::vector<int32_t> all;
  for (int32_t peer = first; peer < first + count; ++peer) {
    if (peer != here.rank) all.push_back(peer);
  }
  return all;
}

void Simulation::await_slots(const Span& span, const Here& here) {
  reads_calls(span, here);
  const std::vector<Node>& ends = slot_ends_[at(here.call->slot)];
  if (ends.empty()) return;
  for (const int32_t peer : peers_of(here)) graph_.edge(ends[at(peer)], span.last);
}

void Simulation::take(Here& here, const WaitForSlots&, Span& span) {
  if (!here.call->slots_may_be_busy) return;
  end_of(here, span, "has seen that the slots are free");
  await_slots(span, here);
  holds(here, span, 1, 1, true, true);
}

void Simulation::await_arrival(const Span& span, const Here& here, int32_t writer, int32_t step) {
  arrival_waits_.push_back({span.last, here.rank, writer, step});
  reads_calls(span, here);
  use_flag(span, here.rank, kArrivedFlag, writer * 2 + here.call->slot, 0, 1, false);
}

void Simulation::take(Here& here, const WaitForPeers& step, Span& span) {
  end_of(here, span, "has seen the peers");
  for (const int32_t peer : peers_of(here)) await_arrival(span, here, peer, step.step);
  holds(here, span, 1, 1, true, true);
}

void Simulation::take(Here& here, const Signal& step, Span& span) {
  arrivals_[at(here.rank)].push_back({step.step, span.first, here.lane, step.to_self});
  reads_calls(span, here);
  std::vector<int32_t> reached = peers_of(here);
  if (step.to_self) reached.push_back(here.rank);
  for (const int32_t peer : reached) {
    use_flag(span, peer, kArrivedFlag, here.rank * 2 + here.call->slot, 0, 1, true);
  }
  holds(here, span, 1, 1, false, true);
}

void Simulation::take(Here& here, const EndCall&, Span& span) {
  ends_call(span.first, here);
  holds(here, span, 1, 1, false, true);
}

int64_t Simulation::part_tiles(const Here& here) const {
  return static_cast<int64_t>(plan::tiles_m(*here.plan)) / ranks_ * plan::tiles_n(*here.plan);
}

void Simulation::announce_tiles(Node node, const Here& here, int32_t distance, int64_t begin,
                                int64_t end) {
  const int32_t owner = (here.rank + distance) % ranks_;
  const int64_t shift = (distance - 1) * part_tiles(here);
  tile_signals_[at(owner)].push_back({begin + shift, end + shift, node});
  use_flag({node, node}, owner, kTileFlags, here.call->slot, begin + shift, end + shift, true);
}

void Simulation::await_tiles(const Span& span, const Here& here, int64_t begin, int64_t end) {
  tile_waits_[at(here.rank)].push_back({begin, end, span.last});
  use_flag(span, here.rank, kTileFlags, here.call->slot, begin, end, false);
}

void Simulation::take(Here& here, const MeetTiles& step, Span& span) {
  if (step.announces) {
    announce_tiles(span.first, here, step.distance, step.first_announced,
                   step.first_announced + step.tiles);
  }
  end_of(here, span, "has seen its tiles");
  reads_calls(span, here);
  if (step.awaits) {
    await_tiles(span, here, step.first_awaited, step.first_awaited + step.tiles);
  }
  holds(here, span, 1, 1, step.awaits, true);
}

// --- a program's transfers ---

void Simulation::take(Here& here, const Announce& step, Span& span) {
  const int32_t end = step.flag + 1;
  tile_signals_[at(step.peer)].push_back({step.flag, end, span.last});
  reads_calls(span, here);
  use_flag({span.last, span.last}, step.peer, kTileFlags, here.call->slot, step.flag, end, true);
  holds(here, span, 1, 1, false, true);
}

void Simulation::take(Here& here, const Await& step, Span& span) {
  end_of(here, span, "has seen its transfer");
  reads_calls(span, here);
  await_tiles(span, here, step.flag, step.flag + 1);
  holds(here, span, 1, 1, true, true);
}

// A step of a meeting: what this rank has done so far, and that all peers have done as much.
void Simulation::announce(Node node, Here& here, int32_t step) {
  here.meeting->announces.push_back(node);
  reads_calls({node, node}, here);
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    if (peer == here.rank) continue;
    use_flag({node, node}, peer, kBlockFlag, (here.rank * 2 + here.call->slot) * 2 + step, 0, 1,
             true);
  }
}

void Simulation::await(Node node, Here& here, int32_t step) {
  here.meeting->awaits.push_back(node);
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    if (peer == here.rank) continue;
    use_flag({node, node}, here.rank, kBlockFlag, (peer * 2 + here.call->slot) * 2 + step, 0, 1,
             false);
  }
}

void Simulation::meet(Node first, Here& here, const char* kind) {
  if (here.meeting) fail(Fault::Kind::kDeadlock, says(first), " is a second meeting of one call");
  here.meeting = Meeting{kind, {}, {}};
}

// The next part of a step that is done one after the other.
Graph::Node Simulation::then(Here& here, Span& span, const char* note) {
  const Node next = node(here, note);
  follow(span.last, next);
  return next;
}

void Simulation::take(Here& here, const PeerCollective& step, Span& span) {
  meet(span.first, here, "peer_collective");
  const int64_t own_bytes = step.pieces[at(here.rank)].bytes;
  const bool sends = step.pieces[at((here.rank + 1) % ranks_)].send.has_value();
  const Node sent = then(here, span, "sends");
  if (sends) await_slots(span, here);
  for (int32_t peer = 0; peer < ranks_ && sends; ++peer) {
    const Piece& piece = step.pieces[at(peer)];
    const int64_t bytes = step.reduces ? piece.bytes : own_bytes;
    if (peer != here.rank) {
      moves(sent, here, *piece.send, *piece.destination, bytes);
    }
  }
  announce(sent, here, 0);
  await(then(here, span, "has met the peers"), here, 0);
  if (step.reduces) reduce(here, step, span);
  if (step.gathers) gather(here, step, span);
  ends_call(then(here, span, "ends"), here);
  holds(here, span, kPeerBlocks, 1, true);
}

// The own piece, into the output and, if it is gathered, to all.
void Simulation::reduce(Here& here, const PeerCollective& step, Span& span) {
  const Node by = then(here, span, "reduces");
  const int64_t bytes = step.pieces[at(here.rank)].bytes;
  const Where to = step.output.behind(step.gathers ? here.rank * step.stride : 0);
  std::vector<Place> terms;
  std::vector<Place> targets = {place(here, to, bytes, by)};
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    const Piece& piece = step.pieces[at(rank)];
    const bool own = rank == here.rank;
    terms.push_back(place(here, own ? step.own : piece.received, bytes, by));
    if (step.gathers && !own) targets.push_back(place(here, *piece.final_destination, bytes, by));
  }
  adds(by, terms, targets, bytes, step.bias);
  if (!step.gathers) return;
  announce(by, here, 1);
  await(then(here, span, "has met the peers again"), here, 1);
}

void Simulation::gather(Here& here, const PeerCollective& step, Span& span) {
  const Node by = then(here, span, "gathers");
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    const Piece& piece = step.pieces[at(rank)];
    const bool own = rank == here.rank;
    if (own && step.reduces) continue;
    const Where from = own ? step.own : step.reduces ? *piece.final_received : piece.received;
    const Where to = step.output.behind(rank * step.stride);
    if (from == to) continue;
    moves(by, here, from, to, piece.bytes);
  }
}

void Simulation::take(Here& here, const LowLatency& step, Span& span) {
  meet(span.first, here, step.in_pieces ? "low_latency in pieces" : "low_latency");
  const int64_t piece =
      step.in_pieces ? plan::low_latency_piece(step.bytes, ranks_) * plan::kRunBytes : 0;
  const auto begin_of = [&](int32_t rank) { return std::min(step.bytes, rank * piece); };
  const auto bytes_of = [&](int32_t rank) {
    return step.in_pieces ? begin_of(rank + 1) - begin_of(rank) : step.bytes;
  };
  const auto part = [&](const Where& where, int32_t rank, Node by) {
    return place(here, where.behind(begin_of(rank)), bytes_of(rank), by);
  };
  // The writer's place in the owner's memory: what is to be added, and after it sums.
  const auto buffer = [&](int32_t owner, int32_t writer, bool sums) {
    return Place{key(owner, kLowLatency, writer * 2 + low_latency_calls_ % 2), sums ? piece : 0};
  };
  const int32_t rank = here.rank;

  const Node sent = then(here, span, "sends");
  here.meeting->announces.push_back(sent);
  const Node added = then(here, span, "adds");
  here.meeting->awaits.push_back(added);
  std::vector<Place> terms;
  std::vector<Place> targets = {part(step.output, rank, added)};
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    if (peer == rank) {
      terms.push_back(part(step.own, rank, added));
      continue;
    }
    moves(sent, part(step.own, peer, sent), buffer(peer, rank, false), bytes_of(peer));
    terms.push_back(buffer(rank, peer, false));
    if (step.in_pieces) targets.push_back(buffer(peer, rank, true));
  }
  adds(added, terms, targets, bytes_of(rank), step.bias);
  if (step.in_pieces) {
    here.meeting->announces.push_back(added);
    const Node gathered = then(here, span, "gathers");
    here.meeting->awaits.push_back(gathered);
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      if (peer == rank) continue;
      moves(gathered, buffer(rank, peer, true), part(step.output, peer, gathered), bytes_of(peer));
    }
  }
  holds(here, span, kPeerBlocks, 1, true);
}

void Simulation::take(Here& here, const PeerExchange& step, Span& span) {
  meet(span.first, here, "peer_exchange");
  const Node sent = then(here, span, "sends");
  if (step.sends) await_slots(span, here);
  for (int32_t peer = 0; peer < ranks_ && step.sends; ++peer) {
    const PeerMessages& messages = step.messages[at(peer)];
    if (peer != here.rank && messages.send_bytes > 0) {
      moves(sent, here, *messages.send, *messages.destination, messages.send_bytes);
    }
  }
  announce(sent, here, 0);
  const PeerMessages& own = step.messages[at(here.rank)];
  if (own.send_bytes > 0) {
    moves(then(here, span, "copies its own rows"), here, *own.send, own.output, own.send_bytes);
  }
  await(then(here, span, "has met the peers"), here, 0);
  const Node received = then(here, span, "receives");
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    const PeerMessages& messages = step.messages[at(peer)];
    if (peer != here.rank && messages.receive_bytes > 0) {
      moves(received, here, *messages.received, messages.output, messages.receive_bytes);
    }
  }
  ends_call(then(here, span, "ends"), here);
  holds(here, span, kPeerBlocks, 1, true);
}

}  // namespace overlap::steps
