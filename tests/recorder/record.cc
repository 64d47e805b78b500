#include "record.h"

#include <algorithm>

namespace recorder {
namespace {

// Far from what a program can map, and far from each other.
constexpr int kBlockShift = 40;

template <typename Handle>
Handle handle_of(size_t index) {
  return reinterpret_cast<Handle>((index + 1) * 16);
}

template <typename Handle>
size_t index_of(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle) / 16 - 1;
}

}  // namespace

Record& record() {
  static Record instance;
  return instance;
}

void Record::begin_case(int new_world, int new_rank) {
  const int last = device;
  *this = Record();
  device = last + 1;
  world = new_world;
  rank = new_rank;
}

void* Record::allocate(std::string name, int64_t bytes) {
  memory_.push_back({std::move(name), bytes});
  return reinterpret_cast<void*>(memory_.size() << kBlockShift);
}

std::string Record::at(const void* pointer, int64_t bytes) {
  if (pointer == nullptr) return "-";
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const size_t block = (address >> kBlockShift) - 1;
  const auto offset = static_cast<int64_t>(address & ((uintptr_t{1} << kBlockShift) - 1));
  if (block >= memory_.size()) {
    violation("an address that is nobody's");
    return "?";
  }
  const Memory& memory = memory_[block];
  const std::string place = offset == 0 ? memory.name : cat(memory.name, "+", offset);
  if (offset + bytes > memory.bytes) {
    violation(cat("an access of ", bytes, " bytes at ", place, " beyond the ", memory.bytes,
                  " bytes that are there"));
  }
  return place;
}

cudaStream_t Record::new_stream(std::string name) {
  streams_.push_back({.name = std::move(name)});
  return handle_of<cudaStream_t>(streams_.size() - 1);
}

cudaEvent_t Record::new_event(bool timed) {
  events_.push_back({.timed = timed});
  return handle_of<cudaEvent_t>(events_.size() - 1);
}

Stream& Record::stream(cudaStream_t handle) {
  return streams_.at(index_of(handle));
}

EventState& Record::event(cudaEvent_t handle) {
  return events_.at(index_of(handle));
}

void Record::operation(cudaStream_t handle, const std::string& text) {
  if (!on || !in_call_) return;
  const size_t index = index_of(handle);
  Stream& stream = this->stream(handle);
  if (stream.capture != capture_) {
    violation(cat("'", text, "' on ", stream.name, ", which the capture does not hold"));
  }
  operations_[index].push_back({text, before(stream)});
  before(stream)[index] = ++stream.operations;
}

void Record::host(const std::string& text) {
  if (!on || !in_call_) return;
  if (capture_ != 0) violation(cat("'", text, "' in a capture"));
}

void Record::free() {
  if (on && in_call_) violation("memory is freed in a call");
}

void Record::synchronize(cudaStream_t handle) {
  if (!on || !in_call_) return;
  Stream& awaited = stream(handle);
  host(cat("synchronizes with ", awaited.name));
  awaited.ended = awaited.operations;
  for (Stream& stream : streams_) {
    for (size_t i = 0; i < streams_.size(); ++i) {
      before(stream)[i] = std::max(before(stream)[i], before(awaited)[i]);
    }
  }
}

int Record::call_operations() const {
  int count = 0;
  for (const Stream& stream : streams_) {
    count += stream.operations - std::max(stream.before_call, stream.ended);
  }
  return count;
}

void Record::wait(cudaStream_t handle, cudaEvent_t awaited) {
  if (!on) return;
  Stream& stream = this->stream(handle);
  const EventState& event = this->event(awaited);
  if (!event.recorded) return;
  const std::string& other = streams_[static_cast<size_t>(event.stream)].name;
  if (event.capture != capture_) {
    violation(cat(stream.name, " waits for ", other, " across a capture's border"));
  }
  // A stream becomes part of a capture by waiting for one that is.
  if (event.capture != 0) stream.capture = event.capture;
  Clock& clock = before(stream);
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], event.before[i]);
}

void Record::mark(cudaEvent_t handle, cudaStream_t on_stream) {
  if (!on) return;
  EventState& event = this->event(handle);
  if (event.timed && in_call_) {
    if (event.name < 0) event.name = timed_events_++;
    operation(on_stream, cat("time ", event.name));
  }
  Stream& stream = this->stream(on_stream);
  event.recorded = true;
  event.stream = static_cast<int32_t>(index_of(on_stream));
  event.before = before(stream);
  event.capture = stream.capture;
  event.us = now_us;
}

void Record::violation(const std::string& text) {
  violations.push_back(text);
}

void Record::begin_call(cudaStream_t caller, bool captured) {
  in_call_ = true;
  timed_events_ = 0;
  // Captured calls in a row are of one graph.
  if (!captured) ++captures_;
  capture_ = captured ? captures_ + 1 : 0;
  for (Stream& stream : streams_) {
    stream.capture = 0;
    stream.before_call = stream.operations;
    if (captured && capture_ != last_capture_) stream.before[1] = {};
  }
  if (captured) last_capture_ = capture_;
  stream(caller).capture = capture_;
}

void Record::end_call(cudaStream_t caller) {
  if (!on) return;
  const Clock clock = before(stream(caller));
  for (size_t i = 0; i < streams_.size(); ++i) {
    const Stream& stream = streams_[i];
    if (stream.operations > stream.before_call && clock[i] < stream.operations) {
      violation(cat("the call ends before what it enqueued on ", stream.name));
    }
  }
  operation(caller, "the call ends");
  in_call_ = false;
  capture_ = 0;
}

void Record::forget() {
  for (size_t i = 0; i < operations_.size(); ++i) {
    forgotten_[i] += static_cast<int32_t>(operations_[i].size());
    operations_[i].clear();
  }
}

std::string Record::text() const {
  std::string text;
  for (size_t s = 0; s < streams_.size(); ++s) {
    for (size_t i = 0; i < operations_[s].size(); ++i) {
      const Operation& operation = operations_[s][i];
      add(text,
          cat(streams_[s].name, "#", forgotten_[s] + static_cast<int32_t>(i), " ", operation.text));
      for (size_t other = 0; other < streams_.size(); ++other) {
        if (other == s || operation.before[other] == 0) continue;
        add(text, cat(" | ", streams_[other].name, "#", operation.before[other] - 1));
      }
      text += '\n';
    }
  }
  return text;
}

}  // namespace recorder
