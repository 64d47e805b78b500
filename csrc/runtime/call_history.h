// A rank's calls on a group, compared with the others': a running hash of its calls, which the
// watchdog puts into the group's store, once a second at most, and compares. It costs a call nothing that
// could be measured, and finds a difference some seconds later.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace overlap::runtime {

// How ranks exchange bytes before they have a communicator: the process group's store.
struct Bootstrap {
  std::function<void(const std::string& key, const std::vector<uint8_t>& value)> set;
  std::function<std::vector<uint8_t>(const std::string& key)> get;  // of a key that is there
  std::function<bool(const std::string& key)> has;
  std::function<void(const std::string& key)> remove;
};

// The calls of one rank, numbered from 1. Not thread-safe.
class CallLog {
 public:
  static constexpr int64_t kRecent = 2048;      // calls that are known one by one
  static constexpr int64_t kCheckpoint = 256;   // every so many calls ...
  static constexpr int64_t kCheckpoints = 512;  // ... the hash is kept longer

  void add(const plan::Problem& problem);

  int64_t calls() const { return calls_; }
  // The hash of all calls up to this one, if it is still known.
  std::optional<uint64_t> hash_after(int64_t call) const;
  int64_t last_checkpoint() const { return calls_ / kCheckpoint * kCheckpoint; }
  // The calls from `first` to `last` that are still known.
  struct Call {
    int64_t number = 0;
    plan::Problem problem;
  };
  std::vector<Call> range(int64_t first, int64_t last) const;

 private:
  struct Entry {
    uint64_t hash = 0;
    plan::Problem problem;
  };
  int64_t calls_ = 0;
  uint64_t hash_ = 0;
  std::vector<Entry> recent_ = std::vector<Entry>(kRecent);
  std::vector<uint64_t> checkpoints_ = std::vector<uint64_t>(kCheckpoints);
};

// The log and its comparison with the other ranks'. Rank 0 compares all; when two differ, both say what they
// called, and every rank reads that.
class CallHistory {
 public:
  // `prefix`: of its keys in the store, the same on all ranks and of no group before.
  CallHistory(const std::string& prefix, int rank, int world_size, Bootstrap bootstrap);

  // A call, before anything of it is launched; one that is captured counts once.
  void add(const plan::Problem& problem);

  int64_t calls() const;

  // Called by the watchdog: publishes and compares if it is time, without waiting for the store. The point that the ranks
  // disagree about, as a sentence, once it is known. `in_flight`: calls of this rank have not ended.
  std::optional<std::string> look(bool in_flight);

  // The other ranks' numbers of calls, as far as they are known.
  std::string describe_peers();

  // Publishes the number of calls now.
  void publish();

  // Tells all ranks that this one left a call half-way: what look() returns on them from then on. Waits for the store,
  // for two seconds at most.
  void abandon(const std::string& text);

  // The message that a rank has left, if the store answers within two seconds.
  std::optional<std::string> abandoned();

 private:
  struct State;
  // Begins what only one thread does at a time, and asks the store.
  void begin(void (State::*work)());

  std::shared_ptr<State> state_;  // shared with the thread that asks the store
};

}  // namespace overlap::runtime
