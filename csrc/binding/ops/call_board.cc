#include "binding/ops/call_board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>

#include "binding/ops/environment.h"
#include "cpu/torch_version.h"
#include "plan/message.h"

namespace overlap::binding {
namespace {

using Clock = std::chrono::steady_clock;

// The first interval between looks at the store.
constexpr std::chrono::milliseconds kFirstPoll{1};
constexpr std::chrono::milliseconds kLastPoll{20};

// How often a wait looks whether those that it waits for still live.
constexpr std::chrono::milliseconds kLook{100};

struct Line {
  alignas(64) std::atomic<uint32_t> calls;  // announced; woken up at each
  CallNote notes[2];  // of calls by turns: who writes the next but one has heard of everyone's next
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void wait_for_change(std::atomic<uint32_t>& value, uint32_t seen) {
  constexpr timespec kTime{0, std::chrono::nanoseconds(kLook).count()};
  (void)syscall(SYS_futex, &value, FUTEX_WAIT, seen, &kTime, nullptr, 0);
}

void wake(std::atomic<uint32_t>& value) {
  (void)syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Each rank holds a lock on its byte of the file while it lives, whatever namespace its process is in.
flock byte_lock(int rank, short type) {
  flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

// A file's name ends with the scope: those that have opened it keep it.
struct Unlinked {
  std::string name;
  ~Unlinked() { (void)shm_unlink(name.c_str()); }
};

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

// The lines, in a file of /dev/shm that has no name once all ranks have opened it.
class SharedNotes {
 public:
  // Null where that cannot be.
  static std::unique_ptr<SharedNotes> make(const std::string& name, bool create, int rank,
                                           int world_size) {
    std::unique_ptr<SharedNotes> notes(new SharedNotes());
    notes->file_ = shm_open(name.c_str(), (create ? O_CREAT | O_EXCL : 0) | O_RDWR | O_CLOEXEC,
                            S_IRUSR | S_IWUSR);
    if (notes->file_ < 0) return nullptr;
    notes->bytes_ = sizeof(Line) * static_cast<size_t>(world_size);
    // With its memory: a page that /dev/shm has no room for ends the process where it is touched.
    if (create && posix_fallocate(notes->file_, 0, static_cast<off_t>(notes->bytes_)) != 0) {
      return nullptr;
    }
    void* memory =
        mmap(nullptr, notes->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, notes->file_, 0);
    if (memory == MAP_FAILED) return nullptr;
    notes->lines_ = static_cast<Line*>(memory);  // zero, as files begin
    flock lock = byte_lock(rank, F_WRLCK);
    if (fcntl(notes->file_, F_OFD_SETLK, &lock) != 0) return nullptr;
    return notes;
  }
  ~SharedNotes() {
    if (lines_ != nullptr) munmap(lines_, bytes_);
    if (file_ >= 0) close(file_);
  }
  SharedNotes(const SharedNotes&) = delete;
  SharedNotes& operator=(const SharedNotes&) = delete;

  // [C] The note is seen by whoever sees the call.
  void announce(int rank, uint32_t call, const CallNote& note) {
    Line& line = lines_[rank];
    line.notes[call % 2] = note;
    line.calls.store(call, std::memory_order_release);
    wake(line.calls);
  }

  enum class Came { kYes, kLate, kDead };

  // [C] Waits for the call of this rank.
  Came await(int rank, uint32_t call, Clock::time_point deadline) {
    std::atomic<uint32_t>& calls = lines_[rank].calls;
    while (true) {
      const uint32_t seen = calls.load(std::memory_order_acquire);
      if (static_cast<int32_t>(seen - call) >= 0) return Came::kYes;
      if (Clock::now() >= deadline) return Came::kLate;
      flock lock = byte_lock(rank, F_WRLCK);
      if (fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) {
        // The notes that it announced before it went are there.
        const bool came = static_cast<int32_t>(calls.load(std::memory_order_acquire) - call) >= 0;
        return came ? Came::kYes : Came::kDead;
      }
      wait_for_change(calls, seen);
    }
  }

  const CallNote& note(int rank, uint32_t call) const { return lines_[rank].notes[call % 2]; }

 private:
  SharedNotes() = default;
  int file_ = -1;
  size_t bytes_ = 0;
  Line* lines_ = nullptr;
};

CallBoard::CallBoard(Options options) : options_(std::move(options)) {
  try {
    meet();
  } catch (const std::exception& error) {  // every call says it
    error_ = error.what();
    shared_.reset();
  }
}

void CallBoard::meet() {
  // Rank 0 makes the file, the others open it and say whether they could, rank 0 says whether all could.
  const std::string key = "overlap_torch/call_board";
  // Polls: the store's own wait would keep other threads, and so other groups, from asking it.
  const auto get = [&](const std::string& what, int peer) {
    const Clock::time_point deadline = Clock::now() + options_.timeout;
    std::chrono::milliseconds pause = kFirstPoll;
    while (!options_.store->check({what})) {
      if (Clock::now() < deadline) {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLastPoll);
        continue;
      }
      const bool others = peer == 0 && options_.world_size > 2;
      throw std::runtime_error(failure(
          "rank " + std::to_string(peer) + (others ? ", or a rank that it waits for," : "") +
          " has not made its first call on CPU within " + plan::in_seconds(options_.timeout) +
          ". It died, hangs, or calls something else."));
    }
    return text_of(options_.store->get(what));
  };
  const auto set = [&](const std::string& what, const std::string& value) {
    options_.store->set(what, std::vector<uint8_t>(value.begin(), value.end()));
  };
  if (options_.rank == 0) {
    std::random_device random;
    const std::string name = "/overlap_torch-" + std::to_string(getpid()) + "-" +
                             std::to_string(random()) + std::to_string(random());
    const Unlinked unlinked{name};
    shared_ = SharedNotes::make(name, true, 0, options_.world_size);
    set(key, name);
    bool all = shared_ != nullptr;
    for (int peer = 1; peer < options_.world_size; ++peer) {
      const std::string answer = key + "/" + std::to_string(peer);
      all = get(answer, peer) == "1" && all;
      options_.store->deleteKey(answer);
    }
    set(key + "/all", all ? "1" : "0");
    if (!all) shared_.reset();
    return;
  }
  shared_ = SharedNotes::make(get(key, 0), false, options_.rank, options_.world_size);
  set(key + "/" + std::to_string(options_.rank), shared_ != nullptr ? "1" : "0");
  if (get(key + "/all", 0) != "1") shared_.reset();
  // A later group of the same name on the same store must not find them.
  if (options_.store->add(key + "/left", 1) == options_.world_size - 1) {
    for (const char* last : {"", "/all", "/left"}) options_.store->deleteKey(key + last);
  }
}

CallBoard::~CallBoard() = default;

void CallBoard::announce(const std::string& problem, uint64_t plan, const RowCounts& rows) {
  try {
    agree();  // of a call that failed here before it communicated
  } catch (const c10::Error&) {
    // All ranks have an error of that call. They go on to this one, and this rank with them, unless a rank is missing.
  }
  if (!error_.empty()) communication_failed(error_);
  own_ = {};
  own_.plan = plan;
  problem.copy(own_.problem, sizeof(own_.problem) - 1);
  const auto note = [](at::IntArrayRef counts, int64_t* to) {
    std::copy_n(counts.begin(), std::min(counts.size(), CallNote::kRanks), to);
  };
  note(rows.sent, own_.sent);
  note(rows.received, own_.received);
  ++call_;
  pending_ = true;
  if (shared_ != nullptr) {
    shared_->announce(options_.rank, call_, own_);
  } else {
    gather();
  }
}

void CallBoard::gather() {
  const auto group = options_.group.lock();
  TORCH_CHECK(group, "overlap_torch: group '", options_.name, "' no longer exists");
  at::Tensor own = at::from_blob(&own_, {static_cast<int64_t>(sizeof(own_))}, at::kByte).clone();
  gathered_ = at::empty({own.numel() * options_.world_size}, at::kByte);
  c10d::AllgatherOptions options;
  options.timeout = options_.timeout;
  gathering_ = cpu::all_gather_single(*group, gathered_, own, options);
}

void CallBoard::agree() {
  if (!pending_) return;
  pending_ = false;
  std::vector<CallNote> notes(static_cast<size_t>(options_.world_size));
  if (shared_ == nullptr) {
    try {
      gathering_->wait(options_.timeout);
    } catch (const std::exception& error) {
      fail("chunk 0 of call " + std::to_string(call_) + ", " + own_.problem +
           ", could not be sent: a rank died, hangs, or has not made this call. (" + error.what() +
           ")");
    }
    std::memcpy(notes.data(), gathered_.const_data_ptr(), notes.size() * sizeof(CallNote));
    compare(notes);
    return;
  }
  const Clock::time_point start = Clock::now();
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const SharedNotes::Came came = shared_->await(rank, call_, start + options_.timeout);
    if (came != SharedNotes::Came::kYes) {
      const std::string what = "chunk 0 of call " + std::to_string(call_) + ", " + own_.problem +
                               ", could not be sent: rank " + std::to_string(rank);
      const std::chrono::duration<double> waited = Clock::now() - start;
      fail(came == SharedNotes::Came::kDead
               ? what + " has ended, or destroyed the group, and has not made this call."
               : what + " has not made this call within " +
                     c10::str(std::round(waited.count() * 10) / 10) +
                     " s. It hangs, or made fewer calls.");
    }
    notes[static_cast<size_t>(rank)] = shared_->note(rank, call_);
  }
  compare(notes);
}

// Every rank sees the same notes, and says the same.
void CallBoard::compare(const std::vector<CallNote>& notes) const {
  const auto differs = [&](const CallNote& note) {
    return note.plan != notes.front().plan || std::strcmp(note.problem, notes.front().problem) != 0;
  };
  const auto other = std::find_if(notes.begin(), notes.end(), differs);
  if (other == notes.end()) return compare_rows(notes);
  const bool same_problem = std::strcmp(other->problem, notes.front().problem) == 0;
  communication_failed(
      c10::str("overlap_torch: ranks of group '", options_.name, "' disagree about call ", call_,
               ": rank 0 called ", notes.front().problem, ", rank ", other - notes.begin(),
               " called ", other->problem, same_problem ? " by another plan" : "",
               ". Nothing was communicated for this call. All ranks must call the same ops with "
               "the same M, N, K and dtype, in the same order, and set the same plans."));
}

void CallBoard::compare_rows(const std::vector<CallNote>& notes) const {
  const size_t ranks = std::min(notes.size(), CallNote::kRanks);
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int64_t sent = notes[from].sent[to];
      const int64_t expected = notes[to].received[from];
      if (sent == expected) continue;
      communication_failed(
          c10::str("overlap_torch: ranks of group '", options_.name,
                   "' disagree about the rows of call ", call_, ", ", own_.problem, ": rank ", from,
                   " sends ", sent, " rows to rank ", to, ", which expects ", expected,
                   ". Nothing was communicated for this call. Exchange the counts before the call, "
                   "so that recv_rows are the other ranks' send_rows."));
    }
  }
}

std::string CallBoard::failure(const std::string& message) const {
  return c10::str("overlap_torch: group '", options_.name, "', rank ", options_.rank, ": ", message,
                  " Destroy the process group and make a new one to go on.");
}

void CallBoard::fail(const std::string& message) {
  error_ = failure(message);
  communication_failed(error_);
}

}  // namespace overlap::binding
