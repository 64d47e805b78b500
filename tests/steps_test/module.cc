// The ops of tests, and what is proved of their lists.
#include <torch/library.h>

#include "../plan_test/mutate.h"
#include "routed.h"
#include "steps/price/price.h"
#include "steps/proof/simulation.h"

namespace overlap {
namespace {

// Each rank has `rows` rows of 16 elements. Returns the fault of the ranks' lists, or the changes of rank 0's list that
// nobody notices.
std::vector<std::string> prove(int64_t rows, int64_t capacity, int64_t world,
                               at::IntArrayRef indices, bool changes) {
  const plan::Plan plan = plan_of(16, 16, plan::DType::kBFloat16, world, false);
  const int64_t share = world + world * capacity;
  std::vector<steps::StepList> lists;
  std::vector<steps::Variant> variants;
  std::vector<std::vector<int64_t>> held;
  for (int32_t rank = 0; rank < world; ++rank) {
    const at::IntArrayRef own =
        indices.slice(static_cast<size_t>(rank * share), static_cast<size_t>(share));
    lists.push_back(lower(plan, capacity, rank));
    held.emplace_back(own.begin(), own.end());
    steps::Variant& variant = variants.emplace_back();  // all rows end at home
    variant.send_rows.resize(static_cast<size_t>(world));
    variant.send_rows[static_cast<size_t>(rank)] = rows;
    variant.receive_rows = variant.send_rows;
  }
  std::vector<steps::Turn> turns;
  for (const int32_t stream : {0, 0, 1}) {
    turns.push_back({&plan, &variants, &lists, stream, 0, false, &held});
  }
  const auto fault = [&] { return steps::find_fault(turns, steps::usual_machine(plan)); };
  std::vector<std::string> found;
  if (!changes) {
    if (const auto one = fault()) found.push_back(one->what);
    return found;
  }
  for (steps::Changed& one : steps::disturbed(lists[0])) {
    std::swap(lists[0], one.list);
    if (!fault()) found.push_back(one.what);
    std::swap(lists[0], one.list);
  }
  return found;
}

double price(int64_t capacity, int64_t world) {
  const plan::Plan plan = plan_of(4096, 4096, plan::DType::kBFloat16, world, false);
  return steps::price(lower(plan, capacity, 0), plan, 0, steps::usual_machine(plan))
      .expected.total_us;
}

}  // namespace

TORCH_LIBRARY(overlap_test, m) {
  m.def("routed", &routed);
  m.def("prove", &prove);
  m.def("price", &price);
}

}  // namespace overlap
