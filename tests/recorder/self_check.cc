#include "checks.h"

#include <functional>

#include "record.h"

namespace recorder {
namespace {

struct Streams {
  cudaStream_t caller;
  cudaStream_t side;
};

// The state that one call of `steps` leaves behind.
struct Result {
  std::string text;
  std::vector<std::string> violations;
};
Result record_call(const std::function<void(const Streams&)>& steps, bool captured = false) {
  record().begin_case(2, 0);
  const Streams streams = {record().new_stream("caller"), record().new_stream("side")};
  record().begin_call(streams.caller, captured);
  steps(streams);
  record().end_call(streams.caller);
  return {record().text(), record().violations};
}

void order(cudaStream_t before, cudaStream_t after) {
  const cudaEvent_t event = record().new_event(false);
  record().mark(event, before);
  record().wait(after, event);
}

// A, then B on the other stream, and the call ends after both.
void forked(const Streams& streams) {
  record().operation(streams.caller, "A");
  order(streams.caller, streams.side);
  record().operation(streams.side, "B");
  order(streams.side, streams.caller);
}

void twice_ordered(const Streams& streams) {
  record().operation(streams.caller, "A");
  order(streams.caller, streams.side);
  order(streams.caller, streams.side);
  record().operation(streams.side, "B");
  order(streams.side, streams.caller);
}

void not_ordered(const Streams& streams) {
  record().operation(streams.caller, "A");
  record().operation(streams.side, "B");
  order(streams.side, streams.caller);
}

void not_ordered_in_turn(const Streams& streams) {
  record().operation(streams.side, "B");
  record().operation(streams.caller, "A");
  order(streams.side, streams.caller);
}

void not_joined(const Streams& streams) {
  record().operation(streams.caller, "A");
  order(streams.caller, streams.side);
  record().operation(streams.side, "B");
}

void renamed(const Streams& streams) {
  record().operation(streams.caller, "A");
  order(streams.caller, streams.side);
  record().operation(streams.side, "C");
  order(streams.side, streams.caller);
}

void beyond(const Streams& streams) {
  const auto* block = static_cast<const char*>(record().allocate("block", 64));
  record().operation(streams.caller, at(block + 48, 16));
  record().operation(streams.caller, at(block + 56, 16));
}

}  // namespace

std::vector<std::string> self_check() {
  std::vector<std::string> failures;
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) failures.push_back(what);
  };
  const std::string plain = record_call(forked).text;
  expect(record_call(forked).violations.empty(), "a forked and joined call is sound");
  expect(plain.find("B | caller#0") != std::string::npos, "an operation names what it comes after");
  expect(record_call(twice_ordered).text == plain, "a redundant wait does not show");
  const std::string loose = record_call(not_ordered).text;
  expect(loose != plain, "a wait left out shows");
  expect(record_call(not_ordered_in_turn).text == loose,
         "the order of enqueueing on streams that are not ordered does not show");
  expect(record_call(renamed).text != plain, "another operation shows");

  expect(record_call(not_joined).violations.size() == 1, "a call that is not joined is found");
  expect(record_call(beyond).violations.size() == 1, "an access beyond its memory is found");
  expect(record_call(forked, true).violations.empty(), "a captured call is sound");
  expect(record_call(not_ordered, true).violations.size() == 2,
         "an operation that no capture holds is found, and the wait for it");
  expect(record_call([](const Streams&) { record().host("waits"); }, true).violations.size() == 1,
         "a host that waits in a capture is found");
  return failures;
}

}  // namespace recorder
