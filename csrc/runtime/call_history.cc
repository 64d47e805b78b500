#include "runtime/call_history.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <type_traits>
#include <utility>

namespace overlap::runtime {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPeriod{1};
constexpr std::chrono::milliseconds kPeriodOnceFound{100};
constexpr int kQuietPeriods =
    30;  // without a call made or in flight: then there is nothing to compare
constexpr std::chrono::seconds kPatience{2};

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

// The answer of a thread of its own, which asks the store; none where the store is gone or hangs.
template <typename Ask>
std::optional<std::invoke_result_t<Ask>> answer_in_time(Ask ask) {
  std::packaged_task<std::invoke_result_t<Ask>()> task(std::move(ask));
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  try {
    if (answer.wait_for(kPatience) == std::future_status::ready) return answer.get();
  } catch (const std::exception&) {
    // The store is gone.
  }
  return std::nullopt;
}

// A call's place in a rank's calls, and the hash of all up to there.
struct Mark {
  int64_t call = 0;
  uint64_t hash = 0;
};

std::string print(const std::vector<Mark>& marks) {
  std::ostringstream out;
  for (const Mark& mark : marks) out << mark.call << ' ' << mark.hash << ' ';
  return out.str();
}

std::vector<Mark> read_marks(const std::string& text) {
  std::istringstream in(text);
  std::vector<Mark> marks;
  Mark mark;
  while (in >> mark.call >> mark.hash) marks.push_back(mark);
  return marks;
}

std::map<int64_t, std::string> read_calls(const std::string& text) {
  std::istringstream in(text);
  std::map<int64_t, std::string> calls;
  int64_t number = 0;
  std::string problem;
  while (in >> number && std::getline(in >> std::ws, problem)) calls[number] = problem;
  return calls;
}

}  // namespace

void CallLog::add(const plan::Problem& problem) {
  // The order counts, too.
  hash_ = (hash_ ^ plan::hash(problem)) * 0x100000001b3 + 1;
  ++calls_;
  recent_[static_cast<size_t>(calls_ % kRecent)] = {hash_, problem};
  if (calls_ % kCheckpoint == 0) {
    checkpoints_[static_cast<size_t>(calls_ / kCheckpoint % kCheckpoints)] = hash_;
  }
}

std::optional<uint64_t> CallLog::hash_after(int64_t call) const {
  if (call == 0) return 0;
  if (call < 0 || call > calls_) return std::nullopt;
  if (call > calls_ - kRecent) return recent_[static_cast<size_t>(call % kRecent)].hash;
  if (call % kCheckpoint != 0 || last_checkpoint() - call >= kCheckpoint * kCheckpoints) {
    return std::nullopt;
  }
  return checkpoints_[static_cast<size_t>(call / kCheckpoint % kCheckpoints)];
}

std::vector<CallLog::Call> CallLog::range(int64_t first, int64_t last) const {
  std::vector<Call> calls;
  first = std::max({first, calls_ - kRecent + 1, int64_t{1}});
  for (int64_t call = first; call <= std::min(last, calls_); ++call) {
    calls.push_back({call, recent_[static_cast<size_t>(call % kRecent)].problem});
  }
  return calls;
}

struct CallHistory::State {
  std::string prefix;
  int rank = 0;
  int world_size = 1;
  Bootstrap bootstrap;

  std::atomic<bool> asking{false};
  std::mutex mutex;  // guards what follows; never held while the store is asked
  CallLog log;
  Clock::time_point asked_at;
  int64_t published = 0;
  int64_t seen = 0;  // calls at the last look
  int quiet = 0;     // looks without a call
  std::optional<std::string> found;

  // The state of the thread that asks, one at a time.
  struct Disagreement {
    int64_t agreed = 0;  // the last call that is known to be the same
    int64_t differs = 0;
    int peer = 0;  // from rank 0
  };
  std::atomic<bool> known{false};
  std::atomic<bool> gone{false};  // the store, with its process
  Disagreement disagreement;
  bool told = false;
  std::vector<int64_t> agreed;              // rank 0: by peer
  std::vector<std::vector<Mark>> awaiting;  // rank 0: of peers that were ahead

  std::string key(const std::string& what, int of) const {
    return prefix + "/" + what + "/" + std::to_string(of);
  }
  std::string read(const std::string& name) const {
    const std::vector<uint8_t> value = bootstrap.get(name);
    return {value.begin(), value.end()};
  }

  void publish() {
    std::vector<Mark> marks;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (log.calls() == published) return;
      for (const int64_t call : {log.calls(), log.last_checkpoint()}) {
        marks.push_back({call, *log.hash_after(call)});
      }
      published = log.calls();
    }
    bootstrap.set(key("calls", rank), bytes_of(print(marks)));
  }

  // Where the peer's calls are found to be other ones than this rank's.
  std::optional<Disagreement> compare(int peer, const std::vector<Mark>& marks) {
    const auto at = static_cast<size_t>(peer);
    const std::lock_guard<std::mutex> lock(mutex);
    std::optional<Disagreement> found_here;
    for (const Mark& mark : marks) {
      if (mark.call > log.calls() && awaiting[at].empty()) awaiting[at] = {mark};
      const std::optional<uint64_t> own = log.hash_after(mark.call);
      if (!own || mark.call <= agreed[at]) continue;
      if (*own == mark.hash) {
        agreed[at] = mark.call;
      } else if (!found_here || mark.call < found_here->differs) {
        found_here = Disagreement{0, mark.call, peer};
      }
    }
    if (found_here) found_here->agreed = agreed[at];
    return found_here;
  }

  void compare_all() {
    for (int peer = 1; peer < world_size && !known; ++peer) {
      if (!bootstrap.has(key("calls", peer))) continue;
      std::vector<Mark> marks = read_marks(read(key("calls", peer)));
      // Calls that were ahead of this rank are compared when it gets there.
      std::vector<Mark>& before = awaiting[static_cast<size_t>(peer)];
      marks.insert(marks.begin(), before.begin(), before.end());
      before.clear();
      if (const auto differs = compare(peer, marks)) {
        std::ostringstream out;
        out << differs->agreed << ' ' << differs->differs << ' ' << differs->peer;
        bootstrap.set(prefix + "/disagreement", bytes_of(out.str()));
        return;
      }
    }
  }

  void tell() {
    std::ostringstream out;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      for (const CallLog::Call& call : log.range(disagreement.agreed + 1, disagreement.differs)) {
        out << call.number << ' ' << call.problem.to_string() << '\n';
      }
    }
    bootstrap.set(key("history", rank), bytes_of(out.str()));
    told = true;
  }

  std::string describe() const {
    const auto first = read_calls(read(key("history", 0)));
    const auto second = read_calls(read(key("history", disagreement.peer)));
    std::string since = "one of the calls " + std::to_string(disagreement.agreed + 1) + " to " +
                        std::to_string(disagreement.differs);
    std::string which = "in " + since;
    for (const auto& [number, problem] : first) {
      const auto other = second.find(number);
      if (other == second.end() || other->second == problem) continue;
      since = "call " + std::to_string(number);
      which = "in " + since + " rank 0 called " + problem + ", rank " +
              std::to_string(disagreement.peer) + " called " + other->second;
      break;
    }
    return "ranks disagree about what they call: " + which +
           ". All ranks must call the same ops with the same M, N, K and dtype, in the same order. "
           "Results of its ops are undefined since " +
           since + ".";
  }

  void ask() {
    if (bootstrap.has(prefix + "/abandoned")) {
      std::string text = read(prefix + "/abandoned");
      const std::lock_guard<std::mutex> lock(mutex);
      found = std::move(text);
      return;
    }
    publish();
    if (rank == 0 && !known) compare_all();
    if (!known && bootstrap.has(prefix + "/disagreement")) {
      std::istringstream in(read(prefix + "/disagreement"));
      in >> disagreement.agreed >> disagreement.differs >> disagreement.peer;
      known = true;
    }
    if (!known) return;
    if (!told && (rank == 0 || rank == disagreement.peer)) tell();
    if (!bootstrap.has(key("history", 0)) || !bootstrap.has(key("history", disagreement.peer))) {
      return;
    }
    std::string text = describe();
    const std::lock_guard<std::mutex> lock(mutex);
    found = std::move(text);
  }
};

CallHistory::CallHistory(const std::string& prefix, int rank, int world_size, Bootstrap bootstrap)
    : state_(std::make_shared<State>()) {
  state_->prefix = prefix;
  state_->rank = rank;
  state_->world_size = world_size;
  state_->bootstrap = std::move(bootstrap);
  state_->agreed.resize(static_cast<size_t>(world_size));
  state_->awaiting.resize(static_cast<size_t>(world_size));
}

void CallHistory::add(const plan::Problem& problem) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->log.add(problem);
}

int64_t CallHistory::calls() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->log.calls();
}

// The store may hang with the process that holds it, and a watchdog must not: a thread of its own asks, which
// owns all it touches.
std::optional<std::string> CallHistory::look(bool in_flight) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->found) return state_->found;
    const Clock::time_point now = Clock::now();
    const auto period =
        state_->known ? Clock::duration(kPeriodOnceFound) : Clock::duration(kPeriod);
    if (state_->log.calls() == 0 || now - state_->asked_at < period) return std::nullopt;
    if (state_->gone || state_->asking) return std::nullopt;
    state_->asked_at = now;
    state_->quiet = in_flight || state_->log.calls() != state_->seen ? 0 : state_->quiet + 1;
    state_->seen = state_->log.calls();
    if (state_->quiet > kQuietPeriods || state_->asking.exchange(true)) return std::nullopt;
  }
  begin(&State::ask);
  return std::nullopt;
}

void CallHistory::publish() {
  if (!state_->asking.exchange(true)) begin(&State::publish);  // else it does that first
}

void CallHistory::begin(void (State::*work)()) {
  std::thread([state = state_, work] {
    try {
      (*state.*work)();
    } catch (const std::exception&) {
      state->gone = true;  // deadlines still report
    }
    state->asking = false;
  }).detach();
}

void CallHistory::abandon(const std::string& text) {
  (void)answer_in_time([state = state_, text] {
    state->bootstrap.set(state->prefix + "/abandoned", bytes_of(text));
    return true;
  });
}

std::optional<std::string> CallHistory::abandoned() {
  const auto answer = answer_in_time([state = state_] {
    const std::string name = state->prefix + "/abandoned";
    return state->bootstrap.has(name) ? std::optional(state->read(name)) : std::nullopt;
  });
  return answer.value_or(std::nullopt);
}

std::string CallHistory::describe_peers() {
  const auto answer = answer_in_time([state = state_] {
    std::string text;
    for (int peer = 0; peer < state->world_size; ++peer) {
      if (peer == state->rank) continue;
      const std::string name = state->key("calls", peer);
      std::string calls = "none";
      if (state->bootstrap.has(name)) {
        const std::vector<Mark> marks = read_marks(state->read(name));
        if (!marks.empty()) calls = std::to_string(marks.front().call);
      }
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(peer) + " " + calls;
    }
    return text;
  });
  return answer.value_or("unknown, as the store does not answer");
}

}  // namespace overlap::runtime
