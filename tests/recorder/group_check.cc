#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "record.h"
#include "runtime/error.h"
#include "runtime/group.h"
#include "session.h"

namespace recorder {
namespace {

namespace runtime = overlap::runtime;
using namespace std::chrono_literals;

// All ranks come, and call the same; `left`: what the other rank says when it leaves a call.
runtime::Bootstrap store(const std::string& left) {
  runtime::Bootstrap all = bootstrap();
  all.get = [left, get = all.get](const std::string& key) {
    if (key.ends_with("/abandoned")) return std::vector<uint8_t>(left.begin(), left.end());
    return get(key);
  };
  all.has = [left](const std::string& key) {
    if (key.ends_with("/abandoned")) return !left.empty();
    return key.find("/calls/") == std::string::npos && !key.ends_with("/disagreement");
  };
  return all;
}

std::shared_ptr<runtime::Group> group_of(const std::string& name, const std::string& left,
                                         std::chrono::milliseconds timeout) {
  record().begin_case(2, 0);
  runtime::GroupOptions options;
  options.name = name;
  options.world_size = 2;
  options.timeout = timeout;
  options.bootstrap = store(left);
  options.alive = [] { return true; };
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

bool within(std::chrono::milliseconds time, const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

std::string failure_of(runtime::Group& group) {
  try {
    group.check();
  } catch (const runtime::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

std::vector<std::string> group_check() {
  std::vector<std::string> failures;
  const auto expect = [&](bool holds, const std::string& what) {
    if (!holds) failures.push_back(what);
  };
  const auto expect_failure = [&](runtime::Group& group, const std::string& part) {
    const std::string said = failure_of(group);
    expect(said.find(part) != std::string::npos, "'" + part + "' is not in '" + said + "'");
  };
  Driver& cuda = driver();

  const auto full = group_of("full", "", 60s);
  void* const before = full->staging(1, {{}}, false);
  cuda.full = true;
  try {
    (void)full->staging(int64_t{64} << 20, {{}}, false);
    expect(false, "memory that is not there is refused");
  } catch (const runtime::Error& error) {
    const std::string said = error.what();
    expect(said.find("rank 0 cannot allocate 64 MiB") != std::string::npos, "who, not: " + said);
  }
  expect(full->staging(1, {{}}, false) == before, "what was there stays");
  cuda.full = false;
  expect(full->staging(int64_t{64} << 20, {{}}, false) != before, "it is taken once it is there");

  const auto left = group_of("left", "rank 1 left a call by an exception.", 60s);
  const auto unseen = group_of("unseen", "", 300ms);
  const auto late = group_of("late", "", 300ms);
  const auto ended = group_of("ended", "", 300ms);
  record().on = false;  // it is of one thread

  cuda.ends = false;
  cuda.busy = true;
  call(left);
  expect(within(5s, [&] { return cuda.kept == 1; }), "one thread asks the driver, and is kept");
  expect(within(10s, [&] { return left->idle(); }),
         "a rank that left is found while the driver keeps the observer, and all is aborted");
  expect(cuda.aborted > 0, "communicators are aborted");
  expect_failure(*left, "rank 1 left a call");
  expect(cuda.kept == 1, "who watches is not kept");

  const auto begin = std::chrono::steady_clock::now();
  call(unseen);
  expect(within(10s, [&] { return unseen->idle(); }),
         "a call that cannot be looked at is late after a while");
  expect(std::chrono::steady_clock::now() - begin >= 500ms, "but not at its deadline");
  expect_failure(*unseen, "did not finish within");

  cuda.leave();
  call(late);
  expect(within(10s, [&] { return late->idle(); }), "a call is late at its deadline");
  expect_failure(*late, "did not finish within");

  cuda.ends = true;
  call(ended);
  expect(within(5s, [&] { return ended->idle(); }), "a call that has ended is forgotten");
  std::this_thread::sleep_for(600ms);
  expect(failure_of(*ended).empty(), "and is not late");
  return failures;
}

}  // namespace recorder
