// How a group learns that a call has failed, what it says then, and how the ranks' kernels are told to end.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "kernels/moe/moe.h"
#include "plan/message.h"
#include "runtime/error.h"
#include "runtime/group.h"

namespace overlap::runtime {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{1};           // for what the watchdog finds
constexpr std::chrono::milliseconds kPeerPatience{50};  // for a copy, which takes some 20 us
// How long a sign that a peer has failed waits for the cause: histories are compared within some seconds, and who
// finds that they differ fails first.
constexpr std::chrono::milliseconds kCausePatience{3000};

}  // namespace

void Group::check() {
  if (!failed_) {
    if (const auto failure = wait_failure()) {
      fail(*failure);
    } else if (const auto sign = nccl_failure()) {
      fail_by_sign(*sign);
    }
  }
  if (!failed_) return;
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  throw Error(error_);
}

void Group::check_peers() {
  if (!failed_) {
    if (const auto failure = wait_failure()) {
      fail(*failure);
    } else if (peer_failures_ != nullptr) {
      peer_failures_->look(kPeerPatience);
      const auto told = told_failure();
      if (told) told->is_cause ? fail(told->text) : fail_by_sign(told->text);
    }
  }
  check();
}

// The watchdog may find the cause soon, and fails then.
void Group::fail_by_sign(const std::string& sign) {
  const Clock::time_point end = Clock::now() + kCausePatience + 20 * kPoll;
  while (watched_ && !failed_ && Clock::now() < end) std::this_thread::sleep_for(kPoll);
  fail(sign);
}

void Group::abandon(const std::string& why) {
  const std::string text = "rank " + std::to_string(options_.rank) + " left " + why + ".";
  history_->abandon(text);
  fail(text);
}

void Group::fail(const std::string& found) {
  if (failed_) return;
  // A rank that has left a call says why; what others find, NCCL's error say, follows from that and may be found first.
  std::optional<std::string> left;
  if (history_ != nullptr) left = history_->abandoned();
  const std::string message = left.value_or(found);
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  if (failed_) return;
  error_ = "overlap_torch: group '" + options_.name + "', rank " + std::to_string(options_.rank) +
           ": " + message +
           " Its communicators are aborted, and results of its ops are undefined from then on. "
           "Destroy the process group and make a new one to go on.";
  if (options_.abort_on_failure) {
    std::fprintf(stderr, "%s (OVERLAP_ON_FAILURE=abort)\n", error_.c_str());
    std::abort();
  }
  failed_ = true;
  // Kernels that wait see it, too, and end.
  uint64_t nothing = 0;
  std::atomic_ref<uint64_t>(report_.get()->failure)
      .compare_exchange_strong(
          nothing,
          kernels::pack({.chunk = chunk_in_flight(), .peer = kFoundByHost, .expected = 1}));
}

// In one NCCL group: all kernels are told to end before any memory is freed. One by one, the first communicator's free
// waits for the second one's kernel, which nobody has told.
void Group::abort_communicators() {
  {
    const std::lock_guard<std::mutex> lock(communicators_mutex_);
    (void)ncclGroupStart();
    for (auto& [key, communicator] : communicators_) communicator->abort();
    (void)ncclGroupEnd();
  }
  aborted_ = true;
}

// The report of a wait whose deadline passed: cheap enough to read at every call, as NCCL's errors are.
std::optional<std::string> Group::wait_failure() {
  const kernels::WaitReport* report = report_.get();
  const uint64_t failure = *static_cast<const volatile uint64_t*>(&report->failure);
  if (failure != 0) {
    const kernels::WaitFailure wait = kernels::unpack(failure);
    const std::string deadline =
        " passed its deadline of " + plan::in_seconds(options_.timeout) + ": ";
    const std::string counts =
        "expected " + std::to_string(wait.expected) + ", saw " + std::to_string(wait.seen) + ".";
    if (wait.peer == kCallersKernel) {
      return "a kernel of the caller's waited for the arrival of chunk " +
             std::to_string(wait.chunk) + " and" + deadline + "it did not arrive. If the kernel " +
             "holds all SMs while it waits, nothing can arrive: launch no more programs than the "
             "job's `programs` (docs/kernels.md).";
    }
    if (wait.peer == kernels::kTooManyRows) {
      return "its experts got " + std::to_string(wait.seen) +
             " rows, more than max_rows=" + std::to_string(wait.expected) +
             ". Give room for the most that may come, or leave max_rows out.";
    }
    return wait.peer == kernels::kOwnGemm
               ? "the wait for the finished tiles of chunk " + std::to_string(wait.chunk) +
                     " of its own GEMM" + deadline + counts
               : "the wait for chunk " + std::to_string(wait.chunk) + " from " +
                     name_of(clique_.first + wait.peer) + deadline + counts +
                     " That rank died, hangs, or made different calls.";
  }
  return std::nullopt;
}

std::optional<std::string> Group::nccl_failure() {
  std::optional<std::string> error;
  {
    // Another communicator may be in the making, which takes as long as its slowest rank.
    const std::unique_lock<std::mutex> lock(communicators_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;
    for (auto& [key, communicator] : communicators_) {
      if (!error) error = communicator->async_error();
    }
  }
  if (!error) return std::nullopt;
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  return *error + ", in or after chunk " + std::to_string(chunk_in_flight()) +
         " of its oldest call in flight. A rank died, or its network did.";
}

// "rank 5", and its host where there are several.
std::string Group::name_of(int rank) const {
  const std::string text = "rank " + std::to_string(rank);
  if (machine_.clique == 0) return text;
  return text + " (on host " + std::to_string(rank / machine_.clique) + ")";
}

// A peer's report: its waits have failed, and let wrong data pass.
std::optional<Group::Told> Group::told_failure() const {
  if (peer_failures_ == nullptr) return std::nullopt;
  const std::optional<PeerFailures::Failure> told = peer_failures_->known();
  if (!told) return std::nullopt;
  const kernels::WaitFailure& wait = told->wait;
  const std::string chunk = "chunk " + std::to_string(wait.chunk);
  const std::string rank = name_of(clique_.first + told->rank) + " has failed";
  if (wait.peer == kFoundByHost) {
    return Told{rank + " in or after " + chunk +
                    " of a call, and what it sent since is not right. Its own error says why.",
                false};
  }
  if (wait.peer == kernels::kTooManyRows) {
    return Told{rank + ", and what it sent since is not right: its experts got " +
                    std::to_string(wait.seen) +
                    " rows, more than max_rows=" + std::to_string(wait.expected) + ".",
                true};
  }
  const std::string of = wait.peer == kCallersKernel ? "the arrival of " + chunk
                         : wait.peer == kernels::kOwnGemm
                             ? "the finished tiles of " + chunk
                             : chunk + " from " + name_of(clique_.first + wait.peer);
  return Told{
      rank + ", and what it sent since is not right: its wait for " + of + " passed its deadline.",
      true};
}

// The chunk that the oldest call in flight has come to. If there is one chunk, the collective
// follows the GEMM on its stream: no wait reports it.
int Group::chunk_in_flight() const {
  if (pending_.empty() || pending_.front()->chunks == 1) return 0;
  const int32_t reached = *static_cast<const volatile int32_t*>(&report_.get()->reached);
  return std::max(reached, 0);
}

bool Group::watch() {
  watched_ = true;
  if (!failed_) {
    std::optional<std::string> failure = wait_failure();
    if (!failure) failure = history_->look(!idle());
    if (!failure) failure = late_call();
    if (!failure) failure = sign_of_failure();
    // The error can be read from here on, without waiting for the device.
    if (failure) fail(*failure);
  }
  return failed_ && !aborted_;
}

void Group::observe() {
  forget_ended_calls();
  if (peer_failures_ == nullptr) return;
  if (!failed_) peer_failures_->look({});
  if (failed_ && !told_) {
    peer_failures_->tell();
    told_ = true;
  }
}

// No other thread takes calls out.
void Group::forget_ended_calls() {
  const Clock::time_point begin = Clock::now();
  while (true) {
    Pending* oldest = nullptr;
    {
      const std::lock_guard<std::mutex> lock(watch_mutex_);
      if (!pending_.empty()) oldest = pending_.front().get();
    }
    // Without the lock: the driver may keep this thread.
    const bool ended = oldest != nullptr && cudaEventQuery(oldest->done.get()) != cudaErrorNotReady;
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    if (!ended) {
      observed_ = begin;
      return;
    }
    idle_.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

// The word of a peer or of NCCL, once no cause has been found for a while.
std::optional<std::string> Group::sign_of_failure() {
  std::optional<std::string> sign;
  if (const auto told = told_failure()) {
    if (told->is_cause) return told->text;
    sign = told->text;
  }
  if (!sign) sign = nccl_failure();
  if (!sign) return std::nullopt;
  if (!first_sign_) first_sign_ = Clock::now();
  return Clock::now() - *first_sign_ >= kCausePatience ? sign : std::nullopt;
}

std::optional<std::string> Group::late_call() {
  int64_t call = 0;
  int chunk = 0;
  {
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    if (pending_.empty()) return std::nullopt;
    // It was looked at after its deadline; or the driver has kept the observer as long again, which something on the
    // device must be the reason of.
    const Clock::time_point deadline = pending_.front()->deadline;
    if (observed_ <= deadline && Clock::now() <= deadline + options_.timeout) return std::nullopt;
    call = pending_.front()->call;
    chunk = chunk_in_flight();
  }
  history_->publish();
  return "call " + std::to_string(call) + " did not finish within " +
         plan::in_seconds(options_.timeout) + "; its chunk " + std::to_string(chunk) +
         " was the last to be computed here, and waits for peers to communicate it. Calls made by "
         "the peers, as far as they are known: " +
         history_->describe_peers() + "; by this rank: " + std::to_string(history_->calls()) +
         ". A rank died, hangs, or made different calls.";
}

}  // namespace overlap::runtime
