// Lists that lack something or have something in another place, and which of them nobody notices.
#include "mutate.h"

#include <algorithm>
#include <string_view>
#include <type_traits>
#include <utility>

#include "steps/list/fields.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

std::string name_of(const Step& step) {
  return std::visit([](const auto& what) { return name(what); }, step.what);
}

// The places that a step reads and writes, and its switches for what orders steps: by the fields that are printed. Places
// of messages without bytes do nothing.
struct Accesses {
  std::vector<Where*> places;
  std::vector<std::pair<std::string, bool*>> orders;

  void put(const Where& where) { places.push_back(const_cast<Where*>(&where)); }
  template <typename Item>
  void put(const std::vector<Item>& items) {
    for (const Item& item : items) put(item);
  }
  void put(const Piece& piece) {
    if (piece.bytes == 0) return;
    visit_given(*this, "send", piece.send);
    visit_given(*this, "destination", piece.destination);
  }
  void put(const PeerMessages& messages) {
    if (messages.send_bytes > 0) {
      visit_given(*this, "send", messages.send);
      visit_given(*this, "destination", messages.destination);
    }
    if (messages.receive_bytes > 0) {
      visit_given(*this, "received", messages.received);
      put(messages.output);
    }
  }
  template <typename Struct>
  void put(const Struct& value) {
    if constexpr (std::is_class_v<Struct>) fields(value, *this);
  }
  void put(const char*) {}
  template <typename Value>
  void operator()(const char* name, const Value& value) {
    constexpr std::string_view kOrders[] = {"counts",  "announces",      "awaits_chunks",
                                            "awaits",  "sends_messages", "ends_call",
                                            "to_self", "copies"};
    if constexpr (std::is_same_v<Value, bool>) {
      if (std::find(std::begin(kOrders), std::end(kOrders), name) != std::end(kOrders) && value)
        orders.emplace_back(name, const_cast<bool*>(&value));
    } else {
      put(value);
    }
  }
};

Accesses accesses(Step& step) {
  Accesses all;
  std::visit([&](const auto& one) { fields(one, all); }, step.what);
  return all;
}

// Steps that do more than to wait, signal and order others.
bool works(const Step& step, const Accesses& found) {
  return !found.places.empty() || std::holds_alternative<CallersKernel>(step.what);
}

// Each move of a GEMM that comes after chunks.
template <typename With>
void weaken(const Gemm& one, const With& with) {
  for (size_t j = 0; j < one.moves.size() && one.awaits_chunks; ++j) {
    if (one.moves[j].arrival == 0) continue;
    with(" whose move " + std::to_string(j) + " waits for nothing",
         [&](Step& changed) { std::get<Gemm>(changed.what).moves[j].arrival = 0; });
  }
}

// Each lane of a fork.
template <typename With>
void weaken(const Fork& one, const With& with) {
  for (int32_t lanes = 0; lanes < one.side_lanes; ++lanes) {
    with(" of " + std::to_string(lanes) + " lanes",
         [&](Step& changed) { std::get<Fork>(changed.what).side_lanes = lanes; });
  }
}

template <typename Kind, typename With>
void weaken(const Kind&, const With&) {}

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
    Step copy = step;
    const Accesses found = accesses(copy);
    const bool idle = std::holds_alternative<Delay>(copy.what) ||
                      std::holds_alternative<Mark>(copy.what) ||
                      std::holds_alternative<SendReceive>(copy.what);  // without messages
    if (!idle && !works(copy, found)) {
      with(" left out", [](Step& changed) { changed.what = Delay{}; });
    }
    for (size_t j = 0; j < found.orders.size(); ++j) {
      with(" without " + found.orders[j].first,
           [&](Step& changed) { *accesses(changed).orders[j].second = false; });
    }
    std::visit([&](const auto& one) { weaken(one, with); }, step.what);
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
    const Accesses found = accesses(copy);
    for (size_t j = 0; j < found.places.size(); ++j) {
      Changed one = {step, name + " with place " + std::to_string(j) + " shifted", list};
      accesses(one.list.steps[i]).places[j]->offset += kShift;
      all.push_back(std::move(one));
    }
    if (!works(copy, found)) continue;
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
