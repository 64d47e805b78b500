#include <functional>

#include "checks.h"
#include "record.h"
#include "session.h"

namespace recorder {
namespace {

struct Streams {
  cudaStream_t caller;
  cudaStream_t side;

  // An operation on each, in this turn, and the waits between them.
  void call(const char* on_side, bool forks, bool joins, bool side_first = false) const {
    if (side_first) record().operation(side, on_side);
    record().operation(caller, "A");
    if (forks) order(caller, side);
    if (!side_first) record().operation(side, on_side);
    if (joins) order(side, caller);
  }
  static void order(cudaStream_t before, cudaStream_t after) {
    const cudaEvent_t event = record().new_event(false);
    record().mark(event, before);
    record().wait(after, event);
  }
};

Recording record_call(const std::function<void(const Streams&)>& steps, bool captured = false) {
  record().begin_case(2, 0);
  const Streams streams = {record().new_stream("caller"), record().new_stream("side")};
  record().begin_call(streams.caller, captured);
  steps(streams);
  record().end_call(streams.caller);
  return {record().text(), record().violations};
}

}  // namespace

std::vector<std::string> self_check() {
  std::vector<std::string> failures;
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) failures.push_back(what);
  };
  const auto forked = [](const Streams& to) { to.call("B", true, true); };
  const auto loose = [](const Streams& to) { to.call("B", false, true); };
  const std::string plain = record_call(forked).text;
  const auto shows = [&](const auto& steps) { return record_call(steps).text != plain; };
  expect(plain.find("B | caller#0") != std::string::npos, "an operation names what it comes after");
  expect(!shows([](const Streams& to) {
    record().operation(to.caller, "A");
    for (int i = 0; i < 2; ++i) Streams::order(to.caller, to.side);
    record().operation(to.side, "B");
    Streams::order(to.side, to.caller);
  }),
         "a redundant wait does not show");
  expect(shows(loose), "a wait left out shows");
  expect(shows([](const Streams& to) { to.call("C", true, true); }), "another operation shows");
  expect(record_call(loose).text ==
             record_call([](const Streams& to) { to.call("B", false, true, true); }).text,
         "the order of enqueueing on streams that are not ordered does not show");

  const auto finds = [&](size_t count, const auto& steps, bool captured, const char* what) {
    expect(record_call(steps, captured).violations.size() == count, what);
  };
  finds(0, forked, false, "a forked and joined call is sound");
  finds(0, forked, true, "a captured call is sound");
  finds(
      1, [](const Streams& to) { to.call("B", true, false); }, false,
      "a call that is not joined is found");
  finds(
      1,
      [](const Streams& to) {
        const auto* block = static_cast<const char*>(record().allocate("block", 64));
        for (const int offset : {48, 56}) record().operation(to.caller, at(block + offset, 16));
      },
      false, "an access beyond its memory is found");
  finds(2, loose, true, "an operation that no capture holds is found, and the wait for it");
  finds(
      1, [](const Streams&) { record().host("waits"); }, true,
      "a host that waits in a capture is found");
  return failures;
}

}  // namespace recorder
