#include "checks.h"

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/call_history.h"

namespace recorder {
namespace {

using overlap::runtime::Bootstrap;
using overlap::runtime::CallHistory;
namespace plan = overlap::plan;

struct Store {
  std::mutex mutex;
  std::map<std::string, std::vector<uint8_t>> values;
  int writes = 0;

  Bootstrap bootstrap() {
    Bootstrap all;
    all.set = [this](const std::string& key, const std::vector<uint8_t>& value) {
      const std::lock_guard<std::mutex> lock(mutex);
      values[key] = value;
      ++writes;
    };
    all.get = [this](const std::string& key) {
      const std::lock_guard<std::mutex> lock(mutex);
      return values.at(key);
    };
    all.has = [this](const std::string& key) {
      const std::lock_guard<std::mutex> lock(mutex);
      return values.contains(key);
    };
    all.remove = [this](const std::string& key) {
      const std::lock_guard<std::mutex> lock(mutex);
      values.erase(key);
    };
    return all;
  }
};

plan::Problem problem_of(int64_t m) {
  plan::Problem problem;
  problem.m = m;
  problem.n = 64;
  problem.k = 32;
  problem.world_size = 3;
  return problem;
}

// Three ranks that make `calls` calls; `other`: the last rank's call of this number is another one, or 0.
class Ranks {
 public:
  Ranks(int calls, int other) {
    for (int rank = 0; rank < 3; ++rank) {
      histories_.push_back(std::make_unique<CallHistory>("group", rank, 3, store_->bootstrap()));
      for (int call = 1; call <= calls; ++call) {
        histories_.back()->add(problem_of(rank == 2 && call == other ? 7 : 100 + call % 5));
      }
    }
  }

  // Each rank's findings within so long.
  std::vector<std::string> look(std::chrono::milliseconds time) {
    std::vector<std::string> found(histories_.size());
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end) {
      bool all = true;
      for (size_t rank = 0; rank < found.size(); ++rank) {
        if (const auto text = histories_[rank]->look()) found[rank] = *text;
        all = all && !found[rank].empty();
      }
      if (all) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return found;
  }

  int writes() {
    const std::lock_guard<std::mutex> lock(store_->mutex);
    return store_->writes;
  }

 private:
  Store* const store_ = new Store();  // threads that ask it may outlive the check
  std::vector<std::unique_ptr<CallHistory>> histories_;
};

}  // namespace

std::vector<std::string> history_check() {
  std::vector<std::string> failures;
  const auto expect = [&](bool holds, const std::string& what) {
    if (!holds) failures.push_back(what);
  };
  for (const std::string& text : Ranks(500, 0).look(std::chrono::milliseconds(1500))) {
    expect(text.empty(), "ranks that call the same find nothing, but: " + text);
  }
  for (const int other : {1, 300}) {
    Ranks ranks(500, other);
    const std::string number = "call " + std::to_string(other);
    for (const std::string& text : ranks.look(std::chrono::seconds(20))) {
      for (const std::string& part :
           {"in " + number + " rank 0 called " + problem_of(100 + other % 5).to_string(),
            "rank 2 called " + problem_of(7).to_string(), "undefined since " + number + "."}) {
        expect(text.find(part) != std::string::npos, "'" + part + "' is not in '" + text + "'");
      }
    }
    // Each rank's number once, the disagreement, and what two ranks called.
    expect(ranks.writes() <= 3 + 1 + 2, "so few writes: " + std::to_string(ranks.writes()));
  }
  return failures;
}

}  // namespace recorder
