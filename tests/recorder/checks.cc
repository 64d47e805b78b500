// Checks on calls made by hand: the record finds what it is there to find, and a group finds failures while the driver is
// busy, agrees on memory where one rank has none left, and finds a way to map its peers'.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "record.h"
#include "runtime/call_history.h"
#include "runtime/error.h"
#include "runtime/group.h"

namespace recorder {
namespace {

namespace runtime = overlap::runtime;
using namespace std::chrono_literals;
using Calls = std::function<void(cudaStream_t caller, cudaStream_t side)>;

std::vector<std::string> failures;

void expect(bool holds, const std::string& what) {
  if (!holds) failures.push_back(what);
}

// The text of a call; its violations lie in the record.
std::string text_of(const Calls& calls, bool captured = false) {
  record().begin_case(2, 0);
  const cudaStream_t caller = record().new_stream("caller");
  const cudaStream_t side = record().new_stream("side");
  record().begin_call(caller, captured);
  calls(caller, side);
  record().end_call(caller);
  return record().text();
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

void check_record() {
  const std::string plain = text_of(call(1, 1));
  expect(plain.find("B | caller#0") != std::string::npos, "an operation names what it comes after");
  expect(text_of(call(2, 1)) == plain, "a redundant wait does not show");
  expect(text_of(call(0, 1)) != plain, "a wait left out shows");
  expect(text_of(call(0, 1)) == text_of(call(0, 1, true)), "the host's turns do not show");

  const auto finds = [](size_t count, const Calls& calls, bool captured, const char* what) {
    (void)text_of(calls, captured);
    expect(record().violations.size() == count, what);
  };
  const Calls waits = [](cudaStream_t, cudaStream_t) { record().host("the host waits"); };
  const Calls frees = [](cudaStream_t, cudaStream_t) { record().free(); };
  const Calls reaches = [](cudaStream_t, cudaStream_t) {
    const auto* block = static_cast<const char*>(record().allocate("block", 64));
    for (const int offset : {48, 56}) (void)at(block + offset, 16);
  };
  finds(0, call(1, 1), true, "a captured call is sound");
  finds(1, call(1, 0), false, "a call that is not joined is found");
  finds(1, reaches, false, "an access beyond its memory is found");
  finds(2, call(0, 1), true, "an operation that no capture holds is found, and the wait for it");
  finds(1, waits, true, "a host that waits in a capture is found");
  finds(1, frees, false, "memory that is freed in a call is found");
}

// All ranks come, and call the same; `left`: what the other rank says when it leaves a call.
std::shared_ptr<runtime::Group> group_of(const std::string& name, int64_t timeout_ms,
                                         const std::string& left = "") {
  record().begin_case(2, 0);
  runtime::GroupOptions options = options_of(name, timeout_ms);
  options.bootstrap.get = [left, get = options.bootstrap.get](const std::string& key) {
    if (key.ends_with("/abandoned")) return std::vector<uint8_t>(left.begin(), left.end());
    return get(key);
  };
  options.bootstrap.has = [left](const std::string& key) {
    if (key.ends_with("/abandoned")) return !left.empty();
    return key.find("/calls/") == std::string::npos && !key.ends_with("/disagreement");
  };
  return std::make_shared<runtime::Group>(std::move(options));
}

// Has a call in flight from now on, and is watched until the program ends.
void call(const std::shared_ptr<runtime::Group>& group) {
  overlap::plan::Problem problem;
  problem.m = problem.n = problem.k = 64;
  problem.world_size = 2;
  group->add_call(problem);
  group->track(nullptr, 2);
  runtime::watch_group(group);
}

void expect_soon(const std::function<bool()>& holds, const std::string& what) {
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (!holds() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(2ms);
  expect(holds(), what);
}

// The calls throw an error that says this part; "": none.
void expect_failure(const std::string& part, const std::function<void()>& calls) {
  std::string said;
  try {
    calls();
  } catch (const runtime::Error& error) {
    said = error.what();
  }
  expect(part.empty() ? said.empty() : said.find(part) != std::string::npos,
         "'" + part + "' is not in '" + said + "'");
}

void expect_ended(runtime::Group& group, const std::string& part, const std::string& what) {
  expect_soon([&] { return group.idle(); }, what);
  expect_failure(part, [&] { group.check(); });
}

// A forked child exits, and is not kept until the alarm.
bool child_exits() {
  constexpr unsigned int kAlarmSeconds = 5;
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    (void)alarm(kAlarmSeconds);
    std::exit(0);
  }
  int status = -1;
  (void)waitpid(child, &status, 0);
  return status == 0;
}

void check_groups() {
  Driver& cuda = driver;
  const auto full = group_of("full", 60'000);
  const auto staging = [&](int64_t mib) { return full->staging(mib << 20, {{}}); };
  void* const before = staging(1);
  cuda.full = true;
  expect_failure("rank 0 cannot allocate 64 MiB", [&] { (void)staging(64); });
  expect(staging(1) == before, "what was there stays");
  cuda.full = false;
  const int64_t held = full->memory()[1];
  expect(staging(64) != before, "it is taken once it is there");
  expect(full->memory()[1] - held == 64 << 20, "memory that is outgrown is held as well");

  const auto left = group_of("left", 60'000, "rank 1 left a call by an exception.");
  const auto many = group_of("many", 300);
  const auto unseen = group_of("unseen", 300);
  const auto late = group_of("late", 300);
  const auto ended = group_of("ended", 300);
  record().on = false;  // it is of one thread
  const std::string kLate = "did not finish within";

  cuda.ends = false;
  cuda.busy = true;
  call(left);
  expect_soon([&] { return cuda.kept == 1; }, "one thread asks the driver, and is kept");
  expect_ended(*left, "rank 1 left a call",
               "a rank that left is found while the driver keeps the observer, and all is aborted");
  expect(cuda.aborted > 0, "communicators are aborted");
  expect(cuda.kept == 1, "who watches is not kept");
  expect(child_exits(), "a forked child does not wait for threads that stayed with its parent");

  const auto begin = std::chrono::steady_clock::now();
  call(unseen);
  expect_ended(*unseen, kLate, "a call that cannot be looked at is late at last");
  expect(std::chrono::steady_clock::now() - begin >= 500ms, "but not at its deadline");

  cuda.busy = false;
  cuda.busy.notify_all();
  call(late);
  expect_ended(*late, kLate, "a call is late at its deadline");

  cuda.ends = true;
  cuda.stuck = reinterpret_cast<cudaStream_t>(&cuda);
  for (int i = 1; i < 300; ++i) many->track(nullptr, 1);
  many->track(cuda.stuck, 1);
  call(many);
  cuda.stuck = nullptr;
  std::this_thread::sleep_for(200ms);
  expect(!many->idle(), "the last of many calls is waited for");
  expect_ended(*many, kLate, "the last of many calls is late at its deadline");

  call(ended);
  expect_soon([&] { return ended->idle(); }, "a call that has ended is forgotten");
  std::this_thread::sleep_for(600ms);
  expect_failure("", [&] { ended->check(); });
}

void check_ways_to_peers() {
  using overlap::plan::PeerSource;
  const auto way = [](bool ipc, int team, PeerSource source, bool captured = false) {
    record().begin_case(2, 0);
    record().maps_peers = ipc;
    record().team = team;
    runtime::GroupOptions options = options_of("way", 60'000);
    options.peer_source = source;
    const auto group = std::make_unique<runtime::Group>(std::move(options));
    driver.report = group->report();
    if (captured) group->mark_captured();
    return group->peer_memory();
  };
  const auto expect_way = [](const std::string& found, const std::string& begin,
                             const std::string& part) {
    expect(found.starts_with(begin) && found.find(part) != std::string::npos,
           "'" + begin + "' and '" + part + "' are not in '" + found + "'");
  };
  const std::string kRefused = "CUDA IPC is refused: on rank 0, whose device has 65536 MiB free";
  expect_way(way(true, 2, PeerSource::kAny), "CUDA IPC", "");
  expect(record().windows == 1, "only the staging memory's window is there");
  expect_way(way(false, 2, PeerSource::kAny), "NCCL windows; ", kRefused);
  expect(record().windows == 1, "windows of peers' memory are taken back");
  expect_way(way(true, 2, PeerSource::kNccl), "NCCL windows (OVERLAP_PEER_MEMORY=nccl)", "");
  expect_way(way(false, 2, PeerSource::kIpc), "none: CUDA IPC (OVERLAP_PEER_MEMORY=ipc)",
             "refuses");
  expect_way(way(false, 1, PeerSource::kAny), "none: NCCL windows: as NCCL sees it, 1 ", kRefused);
  expect_way(way(true, 0, PeerSource::kNccl), "none: ", "rank 0 has an NCCL without");
  const int aborted = driver.aborted;
  expect(driver.freed, "a group's report ends with it");
  driver.freed = false;
  expect_way(way(false, 2, PeerSource::kAny, true), "NCCL windows; ", kRefused);
  expect(record().windows == 3 && driver.aborted == aborted,
         "a graph keeps the windows, and their communicator");
  expect(!driver.freed, "a graph keeps the report of its waits");
  expect(record().violations.empty(), "windows end before their communicator");
}

// Ranks that share a store, and what each has called.
class Ranks {
 public:
  explicit Ranks(int ranks) {
    runtime::Bootstrap store;
    store.set = [this](const std::string& key, const std::vector<uint8_t>& value) {
      const std::lock_guard<std::mutex> lock(mutex_);
      values_[key] = value;
    };
    store.get = [this](const std::string& key) {
      const std::lock_guard<std::mutex> lock(mutex_);
      return values_.at(key);
    };
    store.has = [this](const std::string& key) {
      const std::lock_guard<std::mutex> lock(mutex_);
      return values_.count(key) > 0;
    };
    for (int rank = 0; rank < ranks; ++rank) {
      histories.push_back(std::make_unique<runtime::CallHistory>("ranks", rank, ranks, store));
    }
  }

  // Calls [first, last] of a rank, each with its number as M, but for one.
  void call(int rank, int64_t first, int64_t last, int64_t other = 0) {
    for (int64_t number = first; number <= last; ++number) {
      overlap::plan::Problem problem;
      problem.m = number == other ? 999'999 : number;
      problem.n = problem.k = 64;
      problem.world_size = 2;
      histories[static_cast<size_t>(rank)]->add(problem);
    }
  }

  // All ranks say this soon.
  void expect_said(const std::string& part) {
    for (const auto& history : histories) {
      expect_soon(
          [&] {
            for (const auto& one : histories) (void)one->look(true);
            const auto said = history->look(true);
            return said && said->find(part) != std::string::npos;
          },
          "'" + part + "' is said on every rank");
    }
  }

  std::vector<std::unique_ptr<runtime::CallHistory>> histories;

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

// Ranks whose calls differ are found by the hashes that rank 0 compares, and the first call that differs is named. Threads
// that ask a store live on, and so do the stores.
void check_histories() {
  Ranks& together = *new Ranks(3);
  for (int rank = 0; rank < 3; ++rank) together.call(rank, 1, 700, rank == 2 ? 301 : 0);
  together.expect_said("in call 301 rank 0 called gemm_allreduce");
  together.expect_said(", rank 2 called gemm_allreduce m=999999");
  const std::string peers = together.histories[1]->describe_peers();
  expect(peers == "rank 0 700, rank 2 700", "a rank knows the others' numbers of calls: " + peers);

  // Rank 1 is ahead. Its first number is compared once rank 0 gets there, though rank 1 has published another since.
  Ranks& apart = *new Ranks(2);
  apart.call(1, 1, 40, 33);
  apart.histories[1]->publish();
  // Rank 0 has ended its first look when it publishes again.
  for (int64_t number = 20; number <= 21; ++number) {
    apart.call(0, number == 20 ? 1 : number, number);
    expect_soon(
        [&] {
          (void)apart.histories[0]->look(true);
          return apart.histories[1]->describe_peers() == "rank 0 " + std::to_string(number);
        },
        "a rank's calls are published");
  }
  apart.call(1, 41, 600);
  apart.histories[1]->publish();
  apart.call(0, 22, 50);
  apart.expect_said("in call 33 rank 0 called");

  // A rank that leaves a call says so to all, and what it says is what they find.
  apart.histories[1]->abandon("rank 1 left");
  expect(apart.histories[0]->abandoned() == "rank 1 left", "a rank hears of another that left");
}

// The device fails at each point of a group's set-up.
void check_failed_set_up() {
  bool fails = true;
  int points = 0;
  for (; fails; ++points) {
    record().begin_case(2, 0);
    driver.answers = points;
    try {
      const runtime::Group group(options_of("set up", 60'000));
      fails = false;
    } catch (const runtime::Error&) {
    }
    driver.answers = -1;
    driver.failed = false;
    for (const std::string& what : record().violations) expect(false, cat(points, ": ", what));
  }
  expect(points > 10, "there are many points");
}

}  // namespace

std::vector<std::string> failed_checks() {
  check_record();
  check_ways_to_peers();
  check_failed_set_up();
  check_histories();
  check_groups();
  return failures;
}

}  // namespace recorder
