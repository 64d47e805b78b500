// Who waits for whom among the ranks of a call.
#include <algorithm>

#include "steps/proof/simulation.h"

namespace overlap::steps {

// --- who waits for whom ---

void Simulation::match_arrivals() {
  for (const ArrivalWait& wait : arrival_waits_) {
    const std::vector<ArrivalSignal>& signals = arrivals_[at(wait.writer)];
    // Numbers only grow: a later step's stands for this one's, too.
    const ArrivalSignal* first = nullptr;
    bool in_order = true;
    const ArrivalSignal* before = nullptr;
    for (const ArrivalSignal& signal : signals) {
      if (before != nullptr) {
        in_order = in_order && signal.lane == before->lane && signal.step > before->step;
      }
      before = &signal;
      if (wait.writer == wait.rank && !signal.to_self) continue;
      if (first == nullptr && signal.step >= wait.step) first = &signal;
    }
    if (first == nullptr) {
      fail(Fault::Kind::kDeadlock, says(wait.node), " waits for step ", wait.step, " of rank ",
           wait.writer, ", which does not signal it");
    }
    if (in_order) graph_.edge(first->node, wait.node);
  }
}

void Simulation::match_tiles() {
  for (int32_t owner = 0; owner < ranks_; ++owner) {
    std::vector<TileRange>& signals = tile_signals_[at(owner)];
    std::sort(signals.begin(), signals.end(),
              [](const TileRange& a, const TileRange& b) { return a.begin < b.begin; });
    for (const TileRange& wait : tile_waits_[at(owner)]) {
      int64_t there = wait.begin;
      for (const TileRange& signal : signals) {
        if (signal.end <= wait.begin || signal.begin >= wait.end) continue;
        if (signal.begin > there) break;
        graph_.edge(signal.node, wait.node);
        there = std::max(there, signal.end);
      }
      if (there < wait.end) {
        fail(Fault::Kind::kDeadlock, says(wait.node), " waits for the flags of tiles ", there,
             " to ", wait.end, ", which no rank sets");
      }
    }
  }
}

Graph::Node Simulation::hub() {
  Here nobody;
  nobody.turn = call_;
  nobody.id = -1;
  return node(nobody, "NCCL");
}

void Simulation::match_collectives() {
  for (const auto& [communicator, calls] : collectives_) {
    size_t most = 0;
    for (const auto& of_rank : calls) most = std::max(most, of_rank.size());
    for (size_t i = 0; i < most; ++i) {
      const Node hub = this->hub();
      std::vector<CommunicatorCall> together;
      for (int32_t rank = 0; rank < ranks_; ++rank) {
        if (at(rank) >= calls.size() || i >= calls[at(rank)].size()) {
          fail(Fault::Kind::kDeadlock, says(call_, rank, -1), ": call ", i,
               " of the communicator of ", communicator.first, " CTAs, lane ", communicator.second,
               ", is made by other ranks, not by this one");
        }
        const CommunicatorCall& one = calls[at(rank)][i];
        const Collective& first = *calls[0][i].step;
        if (one.step->kind != first.kind || one.step->count != first.count) {
          fail(Fault::Kind::kDisagreement, says(one.first), " is ", plan::name(one.step->kind),
               " of ", one.step->count, " elements, and rank 0's ", plan::name(first.kind), " of ",
               first.count);
        }
        graph_.edge(one.first, hub);
        graph_.edge(hub, one.last);
        together.push_back(one);
      }
      share(hub, together);
    }
  }
}

void Simulation::match_messages() {
  for (const auto& [pair, receives] : receives_) {
    const std::vector<MessageCall>& sends = sends_[pair];
    if (sends.size() < receives.size()) {
      fail(Fault::Kind::kDeadlock, says(receives[sends.size()].first), " waits for message ",
           sends.size(), " of rank ", pair[0], ", which it does not send");
    }
  }
  for (const auto& [pair, sends] : sends_) {
    const std::vector<MessageCall>& receives = receives_[pair];
    for (size_t i = 0; i < sends.size(); ++i) {
      if (i >= receives.size()) {
        fail(Fault::Kind::kDeadlock, says(sends[i].first), " sends rank ", pair[1],
             " a message that it does not receive");
      }
      const MessageCall& from = sends[i];
      const MessageCall& to = receives[i];
      if (from.bytes != to.bytes) {
        fail(Fault::Kind::kDisagreement, says(to.first), " receives ", to.bytes, " bytes of rank ",
             pair[0], ", which sends ", from.bytes);
      }
      const Node hub = this->hub();
      for (const MessageCall* one : {&from, &to}) {
        graph_.edge(one->first, hub);
        graph_.edge(hub, one->last);
      }
      effect(hub, [=, this] { copy(from.where, to.where, from.bytes, hub); });
    }
  }
}

void Simulation::match_meetings(const std::vector<Here>& all) {
  for (const Here& here : all) {
    for (const Here& peer : all) {
      if (!here.meeting || &peer == &here) continue;
      const bool same = peer.meeting && std::string(peer.meeting->kind) == here.meeting->kind &&
                        peer.meeting->announces.size() == here.meeting->announces.size();
      if (!same) {
        fail(Fault::Kind::kDeadlock, says(here.meeting->awaits[0]), " meets rank ", peer.rank,
             ", which does not come to such a ", here.meeting->kind);
      }
      for (size_t i = 0; i < here.meeting->awaits.size(); ++i) {
        graph_.edge(peer.meeting->announces[i], here.meeting->awaits[i]);
      }
    }
  }
}

}  // namespace overlap::steps
