#include <functional>

#include "record.h"
#include "session.h"

namespace recorder {
namespace {

using Calls = std::function<void(cudaStream_t caller, cudaStream_t side)>;

Recording record_call(const Calls& calls, bool captured = false) {
  record().begin_case(2, 0);
  const cudaStream_t caller = record().new_stream("caller");
  const cudaStream_t side = record().new_stream("side");
  record().begin_call(caller, captured);
  calls(caller, side);
  record().end_call(caller);
  return {record().text(), record().violations};
}

void order(cudaStream_t before, cudaStream_t after) {
  const cudaEvent_t event = record().new_event(false);
  record().mark(event, before);
  record().wait(after, event);
}

// An operation on each stream, and the waits between them.
Calls call(int forks, int joins, bool side_first = false) {
  return [=](cudaStream_t caller, cudaStream_t side) {
    if (side_first) record().operation(side, "B");
    record().operation(caller, "A");
    for (int i = 0; i < forks; ++i) order(caller, side);
    if (!side_first) record().operation(side, "B");
    for (int i = 0; i < joins; ++i) order(side, caller);
  };
}

void reach_beyond(cudaStream_t caller, cudaStream_t) {
  const auto* block = static_cast<const char*>(record().allocate("block", 64));
  for (const int offset : {48, 56}) record().operation(caller, at(block + offset, 16));
}

}  // namespace

std::vector<std::string> self_check() {
  std::vector<std::string> failures;
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) failures.push_back(what);
  };
  const auto text = [](const Calls& calls) { return record_call(calls).text; };
  const std::string plain = text(call(1, 1));
  expect(plain.find("B | caller#0") != std::string::npos, "an operation names what it comes after");
  expect(text(call(2, 1)) == plain, "a redundant wait does not show");
  expect(text(call(0, 1)) != plain, "a wait left out shows");
  expect(text(call(0, 1)) == text(call(0, 1, true)),
         "the order of enqueueing on streams that are not ordered does not show");

  const auto finds = [&](size_t count, const Calls& calls, bool captured, const char* what) {
    expect(record_call(calls, captured).violations.size() == count, what);
  };
  const Calls waits = [](cudaStream_t, cudaStream_t) { record().host("waits"); };
  const Calls frees = [](cudaStream_t, cudaStream_t) { record().free(); };
  finds(0, call(1, 1), true, "a captured call is sound");
  finds(1, call(1, 0), false, "a call that is not joined is found");
  finds(1, reach_beyond, false, "an access beyond its memory is found");
  finds(2, call(0, 1), true, "an operation that no capture holds is found, and the wait for it");
  finds(1, waits, true, "a host that waits in a capture is found");
  finds(1, frees, false, "memory that is freed in a call is found");
  return failures;
}

}  // namespace recorder
