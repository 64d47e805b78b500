// Lists that lack something or have something in another place, and which of them nobody notices.
#include "mutate.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "steps/list/fields.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

std::string name_of(const Step& step) {
  return std::visit([](const auto& what) { return name(what); }, step.what);
}

// The places that a step reads and writes, except those of nothing.
std::vector<Where*> places(Step& step) {
  std::vector<Where*> all;
  const auto add = [&](auto& where) {
    if constexpr (std::is_same_v<std::decay_t<decltype(where)>, Where>) {
      all.push_back(&where);
    } else if (where.has_value()) {
      all.push_back(&*where);
    }
  };
  std::visit(
      [&](auto& one) {
        using Kind = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<Kind, Gemm>) {
          add(one.input);
          for (Target& target : one.outputs) {
            add(target.where);
            add(target.adds);
          }
          for (Where& mirror : one.mirrors) add(mirror);
          add(one.arriving);
          for (Move& move : one.moves) {
            add(move.from);
            add(move.to);
          }
        } else if constexpr (std::is_same_v<Kind, LibraryGemm>) {
          add(one.input);
          add(one.output.where);
          add(one.output.adds);
        } else if constexpr (std::is_same_v<Kind, SendReceive>) {
          for (Message& message : one.sends) add(message.where);
          for (Message& message : one.receives) add(message.where);
        } else if constexpr (std::is_same_v<Kind, Collective> || std::is_same_v<Kind, Copy> ||
                             std::is_same_v<Kind, CopyRows> || std::is_same_v<Kind, Pack> ||
                             std::is_same_v<Kind, Unpack> || std::is_same_v<Kind, AddTerms>) {
          add(one.source);
          add(one.destination);
        } else if constexpr (std::is_same_v<Kind, PeerCollective>) {
          add(one.own);
          add(one.output);
          for (steps::Piece& piece : one.pieces) {
            if (piece.bytes == 0) continue;
            add(piece.send);
            add(piece.destination);
          }
        } else if constexpr (std::is_same_v<Kind, Interpret>) {
          for (Half& half : one.halves) {
            add(half.source);
            add(half.destination);
          }
        } else if constexpr (std::is_same_v<Kind, LowLatency>) {
          add(one.own);
          add(one.output);
        } else if constexpr (std::is_same_v<Kind, PeerExchange>) {
          for (PeerMessages& messages : one.messages) {
            if (messages.send_bytes > 0) {
              add(messages.send);
              add(messages.destination);
            }
            if (messages.receive_bytes > 0) {
              add(messages.received);
              add(messages.output);
            }
          }
        }
      },
      step.what);
  return all;
}

constexpr bool works(const What& what) {
  return std::holds_alternative<Gemm>(what) || std::holds_alternative<LibraryGemm>(what) ||
         std::holds_alternative<Collective>(what) || std::holds_alternative<Copy>(what) ||
         std::holds_alternative<CopyRows>(what) || std::holds_alternative<Pack>(what) ||
         std::holds_alternative<Unpack>(what) || std::holds_alternative<AddTerms>(what) ||
         std::holds_alternative<PeerCollective>(what) || std::holds_alternative<LowLatency>(what) ||
         std::holds_alternative<PeerExchange>(what) || std::holds_alternative<Interpret>(what) ||
         std::holds_alternative<CallersKernel>(what);
}

// Each wait and each announcement of a program's transfers.
template <typename With>
void weaken(const Interpret& one, const With& with) {
  const auto change = [&](const std::string& without, auto of_step) {
    with(without, [&](Step& changed) { of_step(std::get<Interpret>(changed.what)); });
  };
  if (one.ends_call) {
    change(" without ends_call", [](Interpret& changed) { changed.ends_call = false; });
  }
  for (size_t j = 0; j < one.halves.size(); ++j) {
    const std::string half = " whose half " + std::to_string(j);
    for (size_t k = 0; k < one.halves[j].waits.size(); ++k) {
      change(half + " lacks wait " + std::to_string(k), [&](Interpret& changed) {
        auto& waits = changed.halves[j].waits;
        waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(k));
      });
    }
    if (one.halves[j].from) {
      change(half + " awaits nobody", [&](Interpret& changed) { changed.halves[j].from.reset(); });
    }
    if (one.halves[j].to) {
      change(half + " is not announced", [&](Interpret& changed) { changed.halves[j].to.reset(); });
    }
    if (one.halves[j].counter) {
      change(half + " is not counted",
             [&](Interpret& changed) { changed.halves[j].counter.reset(); });
    }
  }
}

// A GEMM's counts, announcements and waits.
template <typename With>
void weaken(const Gemm& one, const With& with) {
  const auto without = [&](const char* name, bool Gemm::* field) {
    if (!(one.*field)) return;
    with(std::string(" without ") + name,
         [&](Step& changed) { std::get<Gemm>(changed.what).*field = false; });
  };
  without("counts", &Gemm::counts);
  without("announces", &Gemm::announces);
  without("awaits_chunks", &Gemm::awaits_chunks);
  without("sends_messages", &Gemm::sends_messages);
  without("ends_call", &Gemm::ends_call);
  for (size_t j = 0; j < one.moves.size() && one.awaits_chunks; ++j) {
    if (one.moves[j].arrival == 0) continue;
    with(" whose move " + std::to_string(j) + " waits for nothing",
         [&](Step& changed) { std::get<Gemm>(changed.what).moves[j].arrival = 0; });
  }
}

// The counts of a kernel of the caller's, and its waits.
template <typename With>
void weaken(const CallersKernel& one, const With& with) {
  if (one.counts) {
    with(" without counts",
         [](Step& changed) { std::get<CallersKernel>(changed.what).counts = false; });
  }
  if (one.awaits) {
    with(" without awaits",
         [](Step& changed) { std::get<CallersKernel>(changed.what).awaits = false; });
  }
}

}  // namespace

std::vector<Changed> weakened(const StepList& list) {
  std::vector<Changed> all;
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    const std::string what = name_of(step);
    const auto with = [&](const std::string& without, auto change) {
      Changed one = {static_cast<StepId>(i), what + without, list};
      change(one.list.steps[i]);
      all.push_back(std::move(one));
    };
    for (size_t j = 0; j < step.after.size(); ++j) {
      with(" without after #" + std::to_string(step.after[j]), [&](Step& changed) {
        changed.after.erase(changed.after.begin() + static_cast<std::ptrdiff_t>(j));
      });
    }
    const auto left_out = [&] { with(" left out", [](Step& changed) { changed.what = Delay{}; }); };
    std::visit(
        [&](const auto& one) {
          using Kind = std::decay_t<decltype(one)>;
          constexpr bool kOrders =
              std::is_same_v<Kind, Join> || std::is_same_v<Kind, WaitForTiles> ||
              std::is_same_v<Kind, WaitForSlots> || std::is_same_v<Kind, WaitForPeers> ||
              std::is_same_v<Kind, Signal> || std::is_same_v<Kind, EndCall> ||
              std::is_same_v<Kind, MeetTiles> || std::is_same_v<Kind, Announce> ||
              std::is_same_v<Kind, Await> || std::is_same_v<Kind, Count> ||
              std::is_same_v<Kind, Arrive> || std::is_same_v<Kind, Fork>;
          if constexpr (kOrders) left_out();
          if constexpr (std::is_same_v<Kind, Fork>) {
            for (int32_t lanes = 0; lanes < one.side_lanes; ++lanes) {
              with(" of " + std::to_string(lanes) + " lanes",
                   [&](Step& changed) { std::get<Fork>(changed.what).side_lanes = lanes; });
            }
            if (one.copies) {
              with(" without the copy lane",
                   [](Step& changed) { std::get<Fork>(changed.what).copies = false; });
            }
          }
          if constexpr (std::is_same_v<Kind, Signal>) {
            if (one.to_self) {
              with(" to itself",
                   [](Step& changed) { std::get<Signal>(changed.what).to_self = false; });
            }
          }
          if constexpr (std::is_same_v<Kind, Gemm> || std::is_same_v<Kind, Interpret> ||
                        std::is_same_v<Kind, CallersKernel>) {
            weaken(one, with);
          }
        },
        step.what);
  }
  return all;
}

std::vector<Changed> disturbed(const StepList& list) {
  constexpr int64_t kShift = 16;
  std::vector<Changed> all;
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const auto step = static_cast<StepId>(i);
    Step copy = list.steps[i];
    const std::string name = name_of(copy);
    const size_t count = places(copy).size();
    for (size_t j = 0; j < count; ++j) {
      Changed one = {step, name + " with place " + std::to_string(j) + " shifted", list};
      places(one.list.steps[i])[j]->offset += kShift;
      all.push_back(std::move(one));
    }
    if (!works(copy.what)) continue;
    all.push_back({step, name + " left out", list});
    all.back().list.steps[i].what = Delay{};
  }
  return all;
}

std::vector<Unnoticed> unnoticed(const Ranks& ranks, int32_t rank, Change change, int64_t& tried) {
  std::vector<Unnoticed> all;
  std::vector<StepList> plain = lower_all(ranks, false);
  std::vector<StepList> captured = lower_all(ranks, true);
  const auto changed = change == Change::kOrder ? weakened : disturbed;
  std::vector<Changed> changes = changed(plain[at(rank)]);
  std::vector<Changed> as_captured = changed(captured[at(rank)]);
  const auto try_each = [&](bool of_captured, std::vector<Changed>& each, auto fault) {
    std::vector<StepList>& lists = of_captured ? captured : plain;
    tried += static_cast<int64_t>(each.size());
    for (size_t i = 0; i < each.size(); ++i) {
      std::swap(lists[at(rank)], each[i].list);
      if (!fault(i)) all.push_back({each[i].step, each[i].what, of_captured});
      std::swap(lists[at(rank)], each[i].list);
    }
  };
  if (structure(plain[at(rank)]) == structure(captured[at(rank)])) {
    try_each(false, changes, [&](size_t i) {
      std::swap(captured[at(rank)], as_captured[i].list);
      const bool found = find_fault(ranks, plain, captured).has_value();
      std::swap(captured[at(rank)], as_captured[i].list);
      return found;
    });
    return all;
  }
  try_each(false, changes, [&](size_t) { return find_fault_in_a_row(ranks, plain).has_value(); });
  try_each(true, as_captured,
           [&](size_t) { return find_fault_in_a_row(ranks, captured).has_value(); });
  return all;
}

}  // namespace overlap::steps
