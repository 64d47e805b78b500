#include "self_check.h"

#include <functional>

#include "record.h"

namespace recorder {
namespace {

struct Streams {
  cudaStream_t caller;
  cudaStream_t side;
};

// What one call of `steps` leaves behind.
struct Result {
  std::string text;
  std::string canonical;
  std::vector<std::string> violations;
};
Result record_call(const std::function<void(const Streams&)>& steps, bool captured = false) {
  record().begin_case(2, 0);
  const Streams streams = {record().new_stream("caller"), record().new_stream("side")};
  record().begin_call("call", streams.caller, captured);
  steps(streams);
  record().end_call(streams.caller);
  return {record().text(), record().canonical(), record().violations};
}

void order(cudaStream_t before, cudaStream_t after) {
  const cudaEvent_t event = record().new_event(false);
  record().mark(event, before);
  record().wait(after, event);
}

// A, then B on the other stream, and the call ends behind both.
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
  const Result plain = record_call(forked);
  expect(plain.violations.empty(), "a forked and joined call is sound");
  expect(plain.text.find("after caller#0") != std::string::npos, "a wait names what it waits for");

  const Result again = record_call(forked);
  expect(again.text == plain.text && again.canonical == plain.canonical,
         "the same steps have the same text");

  const Result redundant = record_call(twice_ordered);
  expect(redundant.text != plain.text, "a redundant wait changes the text");
  expect(redundant.canonical == plain.canonical, "a redundant wait keeps the canonical form");

  const Result loose = record_call(not_ordered);
  expect(loose.canonical != plain.canonical, "a wait left out changes the canonical form");
  const Result turned = record_call(not_ordered_in_turn);
  expect(turned.text != loose.text, "the order of enqueueing changes the text");
  expect(turned.canonical == loose.canonical,
         "the order of enqueueing on streams that are not ordered keeps the canonical form");
  expect(record_call(renamed).canonical != plain.canonical,
         "another operation changes the canonical form");

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
