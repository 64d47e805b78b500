// Two threads watch all groups of the process: one observes what their devices have done, the other finds failures and
// has them aborted. The driver may keep the first for as long as a kernel runs, and must not keep the second, which ends
// kernels that wait for ranks that have failed.
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <set>
#include <thread>

#include "runtime/device_state.h"
#include "runtime/error.h"
#include "runtime/group.h"

namespace overlap::runtime {
namespace {

constexpr std::chrono::milliseconds kPeriod{50};
// How long an exit waits for communicators that are being ended, as they use what it takes down.
constexpr std::chrono::seconds kExitWait{10};

class Watchdog {
 public:
  static Watchdog& instance() {
    static Watchdog* watchdog =
        new Watchdog();  // never destroyed: its thread may outlive static objects
    return *watchdog;
  }

  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(group);
    // Registered after CUDA's own exit handler, hence run before it: no CUDA call of ours may come
    // later.
    if (groups_.size() == 1 && !started_) {
      started_ = true;
      process_ = getpid();
      std::atexit([] { instance().stop(); });
      std::thread([this] { watch(); }).detach();
      std::thread([this] { observe(); }).detach();
    }
  }

 private:
  void stop() {
    // A forked child has none of the threads, and the mutex as one of them had it.
    if (getpid() != process_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    // Bounded: ending a communicator can hang with the device, and an exit must not.
    stopped_.wait_for(lock, kExitWait,
                      [this] { return !watching_ && !observing_ && ending_ == 0; });
  }

  void observe() {
    const LetCapturesBe let_captures_be;
    const auto look = [](const std::shared_ptr<Group>& group) {
      cudaSetDevice(group->device().device());
      group->observe();
    };
    every_period(observing_, look, [] {});
  }

  void watch() {
    std::vector<std::shared_ptr<Group>> failed;
    std::vector<std::shared_ptr<Group>> ended;
    const auto look = [&](const std::shared_ptr<Group>& group) {
      if (group->watch()) {
        failed.push_back(group);
      } else if (!group->alive() && group->idle()) {
        ended.push_back(group);
      }
    };
    every_period(watching_, look, [&] {
      abort(failed);
      if (!observing_) forget(ended);  // else the next time
      failed.clear();
      ended.clear();
    });
  }

  // Again and again: `look(group)` for all groups, with `looking` set, and after them, with mutex_ held, `then()`.
  template <class Look, class Then>
  void every_period(bool& looking, Look look, Then then) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      wake_.wait_for(lock, kPeriod);
      if (stopping_) break;
      looking = true;
      std::vector<std::shared_ptr<Group>> groups = groups_;
      lock.unlock();
      for (const std::shared_ptr<Group>& group : groups) {
        try {
          look(group);
        } catch (const std::exception&) {
          // A failing watch must not end the watch over the others; the group's own calls report
          // the same error.
        }
      }
      groups.clear();  // none ends with it: those that are observed are kept
      lock.lock();
      then();
      looking = false;
      stopped_.notify_all();
    }
  }

  void abort(const std::vector<std::shared_ptr<Group>>& failed) {
    for (const std::shared_ptr<Group>& group : failed) {
      if (aborting_.contains(group.get())) continue;
      aborting_.insert(group.get());
      end_beside([this, group] {
        group->abort_communicators();
        const std::lock_guard<std::mutex> changed(mutex_);
        aborting_.erase(group.get());
      });
    }
  }

  // The communicators of process groups that no longer exist end with them.
  void forget(std::vector<std::shared_ptr<Group>>& ended) {
    std::erase_if(groups_, [&](const std::shared_ptr<Group>& group) {
      return std::find(ended.begin(), ended.end(), group) != ended.end();
    });
    for (std::shared_ptr<Group>& group : ended) {
      end_beside([group = std::move(group)]() mutable {
        cudaSetDevice(group->device().device());
        group.reset();
      });
    }
  }

  // With mutex_ held. Ending communicators frees memory, and so waits for all that runs on the
  // device: it has its own thread, as this one has to find out that another group's kernels will
  // never end.
  void end_beside(std::function<void()> end) {
    auto* kept = new std::function<void()>(std::move(end));
    // An exit waits for nothing that has not begun, and nothing may begin after it.
    if (stopping_) return;
    ++ending_;
    std::thread([this, kept] {
      const LetCapturesBe let_captures_be;
      (*kept)();
      delete kept;
      const std::lock_guard<std::mutex> lock(mutex_);
      --ending_;
      stopped_.notify_all();
    }).detach();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable stopped_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::set<const Group*> aborting_;
  int ending_ = 0;  // threads that end communicators
  bool started_ = false;
  pid_t process_ = 0;  // whose threads they are
  bool stopping_ = false;
  bool watching_ = false;
  bool observing_ = false;  // holds all groups
};

}  // namespace

void watch_group(const std::shared_ptr<Group>& group) {
  Watchdog::instance().add(group);
}

}  // namespace overlap::runtime
