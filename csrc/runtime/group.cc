#include "runtime/group.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "plan/agreement.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxPending = 256;
constexpr int kPreparedPending = 64;
constexpr std::chrono::milliseconds kFirstPoll{1};  // of the store
constexpr std::chrono::milliseconds kLastPoll{20};
constexpr std::chrono::milliseconds kPeerPatience{50};  // for a copy, which takes some 20 us
// How long a sign that a peer has failed waits for the cause: histories are compared within some seconds, and who
// finds that they differ fails first.
constexpr std::chrono::milliseconds kCausePatience{3000};

// Dense 16-bit tensor-core operations of one SM and clock, by architecture; the profile says how much is sustained.
double tensor_flop_per_clock(int arch) {
  if (arch == 100 || arch == 103) return 8192;
  if (arch == 90) return 4096;
  if (arch == 80) return 2048;
  return 1024;
}

double elapsed_us(const Event& begin, const Event& end) {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
  return milliseconds * 1000.0;
}

// Device memory of a measurement. Stream-ordered: cudaFree would wait for the whole device, where a
// foreign collective may be waiting for a peer that waits for this rank.
class Scratch {
 public:
  Scratch(size_t bytes, cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&pointer_, bytes, stream), "cudaMallocAsync");
  }
  ~Scratch() { cudaFreeAsync(pointer_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

class Staging {
 public:
  explicit Staging(int64_t bytes) : bytes_(bytes) {
    check_nccl(ncclMemAlloc(&pointer_, static_cast<size_t>(bytes)), "ncclMemAlloc");
  }
  ~Staging() { ncclMemFree(pointer_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  void* pointer() const { return pointer_; }
  int64_t bytes() const { return bytes_; }
  std::map<CommunicatorKey, ncclWindow_t> windows;  // of the communicators that know it

 private:
  void* pointer_ = nullptr;
  int64_t bytes_ = 0;
};

HostReport::HostReport() {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(kernels::WaitReport), cudaHostAllocPortable),
             "cudaHostAlloc");
  report_ = new (memory) kernels::WaitReport();
}

HostReport::~HostReport() {
  cudaFreeHost(report_);
}

Group::Group(GroupOptions options) : options_(std::move(options)), device_(DeviceState::current()) {
  machine_.arch = device_.arch();
  machine_.sm_count = device_.sm_count();
  if (options_.profile != nullptr) machine_.profile = options_.profile;
  machine_.sm_gflops = tensor_flop_per_clock(device_.arch()) *
                       machine_.profile->gemm.sustained_rate * device_.clock_khz() * 1e3 / 1e9;
  if (options_.sm_gflops > 0.0) machine_.sm_gflops = options_.sm_gflops;
#if defined(OVERLAP_WITH_SM80)
  machine_.has_sm80_kernels = device_.arch() >= 80;
#endif
#if defined(OVERLAP_WITH_SM90)
  machine_.has_sm90_kernels = device_.arch() == 90;
#endif
  // Nothing is made once warm: events for what is in flight between two looks of the watchdog.
  for (int i = 0; i < kPreparedPending; ++i) idle_.push_back(std::make_unique<Pending>());
  // Known by the first communicator: a later group of the same name on the same store has another one.
  uint64_t id = 0;
  if (options_.world_size > 1) {
    const ncclUniqueId unique = unique_id({});
    for (const char byte : unique.internal) id = id * 131 + static_cast<uint8_t>(byte);
    make_communicator({}, unique);
  }
  history_ =
      std::make_unique<CallHistory>("overlap_torch/" + options_.name + "/" + std::to_string(id),
                                    options_.rank, options_.world_size, options_.bootstrap);
  if (options_.world_size > 1) {
    measure_link();
    measure_peers();
    agree_on_machine();
  }
}

Group::~Group() {
  if (failed_ && peers_ != nullptr) peers_->leak();
  peer_failures_.reset();
  peers_.reset();
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  communicators_.clear();
}

Communicator& Group::communicator(CommunicatorKey key, bool capturing) {
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  if (const auto found = communicators_.find(key); found != communicators_.end()) {
    return *found->second;
  }
  if (capturing) {
    throw Error("overlap_torch: group '" + options_.name + "' has no communicator with " +
                (key.max_ctas == 0 ? std::string("NCCL's own") : std::to_string(key.max_ctas)) +
                " CTAs, and none can be made while a CUDA graph is captured. Call the op once with "
                "the same shapes, "
                "dtype and group before the capture (torch.cuda.graph's warm-up).");
  }
  return make_communicator(key, unique_id(key));
}

Communicator& Group::make_communicator(CommunicatorKey key, const ncclUniqueId& id) {
  Communicator::Options communicator_options;
  communicator_options.rank = options_.rank;
  communicator_options.world_size = options_.world_size;
  communicator_options.max_ctas = key.max_ctas;
  auto communicator = std::make_unique<Communicator>(id, communicator_options);
  // The first collective connects the ranks: here, so that no later call blocks the host.
  const Scratch scratch(sizeof(float), device_.side[0].get());
  communicator->all_reduce(scratch.get(), scratch.get(), 1, plan::DType::kFloat32,
                           device_.side[0].get());
  check_cuda(cudaStreamSynchronize(device_.side[0].get()), "cudaStreamSynchronize");
  forget(id_key(key));
  return *(communicators_[key] = std::move(communicator));
}

void Group::prepare(const plan::Plan& plan) {
  if (plan::over_peers(plan)) {
    (void)peers(plan::peer_slot_bytes(plan), false);
    return;
  }
  for (int chunk = 0; chunk < static_cast<int>(plan.chunks.size()); ++chunk) {
    (void)communicator(communicator_of(plan, chunk), false);
  }
  for (int32_t lane = 0; lane < plan::streams(plan.program); ++lane) {
    (void)communicator({plan.chunks[0].max_ctas, lane}, false);
  }
}

// All ranks have come here, or the store's deadline passes and says who has not: making a
// communicator has no deadline of its own. Returns what rank 0 brought.
std::vector<uint8_t> Group::meet(const std::string& key, const std::vector<uint8_t>& brought) {
  if (options_.rank == 0) {
    for (int peer = 1; peer < options_.world_size; ++peer) {
      const std::string ready = key + "/" + std::to_string(peer);
      (void)await_key(ready, peer);
      options_.bootstrap.remove(ready);
    }
    options_.bootstrap.set(key, brought);
    return brought;
  }
  options_.bootstrap.set(key + "/" + std::to_string(options_.rank), {1});
  return await_key(key, 0);
}

// Polls: the store's own wait would keep the watchdog from asking it, which finds out why a peer does not come.
std::vector<uint8_t> Group::await_key(const std::string& key, int peer) {
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  std::chrono::milliseconds pause = kFirstPoll;
  while (!options_.bootstrap.has(key)) {
    if (failed_) check();
    if (Clock::now() >= deadline) {
      throw Error("overlap_torch: group '" + options_.name + "', rank " +
                  std::to_string(options_.rank) + ": rank " + std::to_string(peer) +
                  " did not come to make communicators, map memory or compare messages within " +
                  std::to_string(options_.timeout.count() / 1000.0) +
                  " s. Every rank of the group has to call the op with the same shapes, dtype and "
                  "plan.");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLastPoll);
  }
  return options_.bootstrap.get(key);
}

// After a collective call all ranks have read what rank 0 brought; a later group of the same name on
// the same store must not find it.
void Group::forget(const std::string& key) {
  if (options_.rank == 0) options_.bootstrap.remove(key);
}

ncclUniqueId Group::unique_id(CommunicatorKey key) {
  ncclUniqueId id = {};
  std::vector<uint8_t> bytes(sizeof(id));
  if (options_.rank == 0) {
    check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    std::memcpy(bytes.data(), &id, sizeof(id));
  }
  bytes = meet(id_key(key), bytes);
  if (bytes.size() != sizeof(id))
    throw Error("overlap_torch: the store's NCCL id has a wrong size");
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::vector<uint8_t> Group::all_gather_bytes(const std::vector<uint8_t>& own) {
  const std::string key =
      "overlap_torch/" + options_.name + "/bytes/" + std::to_string(byte_gathers_++);
  (void)meet(key, {1});
  // As 16-bit words, which NCCL does not look at.
  const size_t words = (own.size() + 1) / 2;
  std::vector<uint8_t> all(words * 2 * static_cast<size_t>(options_.world_size));
  std::copy(own.begin(), own.end(), all.begin() + words * 2 * static_cast<size_t>(options_.rank));
  const cudaStream_t stream = device_.side[0].get();
  const Scratch scratch(all.size(), stream);
  check_cuda(cudaMemcpyAsync(scratch.get(), all.data(), all.size(), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  communicator({}, false).all_gather_in_place(scratch.get(), words, plan::DType::kBFloat16, stream);
  check_cuda(cudaMemcpyAsync(all.data(), scratch.get(), all.size(), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  forget(key);
  return all;
}

std::string Group::id_key(CommunicatorKey key) const {
  return "overlap_torch/" + options_.name + "/nccl_id/" + std::to_string(key.max_ctas) + "." +
         std::to_string(key.lane);
}

void* Group::staging(int64_t bytes, const std::vector<CommunicatorKey>& keys, bool capturing) {
  if (staging_ == nullptr || staging_->bytes() < bytes) {
    if (capturing) {
      throw Error("overlap_torch: group '" + options_.name +
                  "' has no registered staging memory of " + std::to_string(bytes) +
                  " bytes, and none can be registered while a CUDA graph is captured. Call the op "
                  "once with the same "
                  "shapes before the capture.");
    }
    int64_t rounded = int64_t{1} << 21;
    while (rounded < bytes) rounded *= 2;
    // The old memory may be in use, and waiting for the device is not allowed here: it is kept. All
    // of it together is less than the new one.
    if (staging_ != nullptr) outgrown_.push_back(std::move(staging_));
    staging_ = std::make_unique<Staging>(rounded);
  }
  for (const CommunicatorKey& key : keys) {
    if (staging_->windows.contains(key)) continue;
    staging_->windows[key] =
        communicator(key, capturing).register_window(staging_->pointer(), staging_->bytes());
  }
  return staging_->pointer();
}

Peers& Group::peers(int64_t slot_bytes, bool capturing) {
  if (peers_ == nullptr) {
    throw Error(
        "overlap_torch: group '" + options_.name +
        "' runs a plan with the transport peer, but its ranks cannot map each other's memory "
        "(CUDA IPC): they are on different hosts, share a process, their devices have no peer "
        "access, or one of them has OVERLAP_PEERS=0 or NCCL_P2P_DISABLE=1. Set a plan with the "
        "transport nccl.");
  }
  if (capturing && !peers_->fits(slot_bytes)) {
    throw Error("overlap_torch: group '" + options_.name + "' has not mapped slots of " +
                std::to_string(slot_bytes) +
                " bytes of its ranks' memory, and none can be mapped while a CUDA graph is "
                "captured. Call the op once with the same shapes before the capture.");
  }
  peers_->reserve(slot_bytes);
  return *peers_;
}

int64_t Group::longest_message(int64_t own_bytes, bool capturing) {
  own_longest_message_ = std::max(own_longest_message_, own_bytes);
  if (capturing || !std::has_single_bit(++message_calls_)) return longest_message_;
  check();
  std::vector<uint8_t> own(sizeof(int64_t));
  std::memcpy(own.data(), &own_longest_message_, own.size());
  const std::vector<uint8_t> all = all_gather_bytes(own);
  for (size_t at = 0; at < all.size(); at += own.size()) {
    int64_t theirs = 0;
    std::memcpy(&theirs, all.data() + at, sizeof(theirs));
    longest_message_ = std::max(longest_message_, theirs);
  }
  return longest_message_;
}

void Group::measure_link() {
  constexpr size_t kSmallBytes = size_t{1} << 18;
  constexpr size_t kLargeBytes = size_t{1} << 25;
  // The median of `repeats`, each the mean of `calls` back to back. Small ones run behind `lead` large ones, so that
  // the host's time does not count: on a slow host it is three times a small call's.
  struct Effort {
    int repeats;
    int calls;
    int lead;
  };
  constexpr Effort kFull{.repeats = 5, .calls = 8, .lead = 4};
  // Over sockets a large call takes tens of milliseconds: a hundred of them would be felt at each new group.
  constexpr Effort kShort{.repeats = 3, .calls = 2, .lead = 1};
  constexpr double kSlowUs = 3000.0;
  Communicator& nccl = communicator({}, false);
  Event begin(cudaEventDefault);
  Event end(cudaEventDefault);
  const cudaStream_t stream = device_.side[0].get();
  const Scratch scratch(kLargeBytes, stream);
  check_cuda(cudaMemsetAsync(scratch.get(), 0, kLargeBytes, stream), "cudaMemsetAsync");

  const auto all_reduce = [&](size_t bytes, int calls) {
    for (int call = 0; call < calls; ++call) {
      nccl.all_reduce(scratch.get(), scratch.get(), bytes / 4, plan::DType::kFloat32, stream);
    }
  };
  const auto median_us = [&](const Effort& effort, size_t bytes, int lead) {
    std::vector<double> times;
    for (int i = 0; i < effort.repeats; ++i) {
      all_reduce(kLargeBytes, lead);
      begin.record(stream);
      all_reduce(bytes, effort.calls);
      end.record(stream);
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      times.push_back(elapsed_us(begin, end) / effort.calls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  // The same on all ranks, so that they measure and plan alike.
  const auto mean_over_ranks = [&](double time_us) {
    float time = static_cast<float>(time_us);
    check_cuda(cudaMemcpyAsync(scratch.get(), &time, sizeof(time), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    nccl.all_reduce(scratch.get(), scratch.get(), 1, plan::DType::kFloat32, stream);
    check_cuda(cudaMemcpyAsync(&time, scratch.get(), sizeof(time), cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return static_cast<double>(time) / options_.world_size;
  };
  // The first call of a communicator connects the ranks; the second one says how much measuring is worth its time.
  const double first_us =
      mean_over_ranks(median_us({.repeats = 1, .calls = 1, .lead = 0}, kLargeBytes, 1));
  const Effort effort = first_us > kSlowUs ? kShort : kFull;
  if (first_us <= kSlowUs) (void)median_us(effort, kLargeBytes, 1);  // warms up
  const double small_us = mean_over_ranks(median_us(effort, kSmallBytes, effort.lead));
  const double large_us =
      std::max(mean_over_ranks(median_us(effort, kLargeBytes, 1)), small_us + 1.0);
  machine_.windows = windows_work();
  machine_.link_latency_us = small_us;
  machine_.link_gbps = (kLargeBytes - kSmallBytes) / ((large_us - small_us) * 1e3);
}

// Whether the ranks map each other's memory, and how fast copies into it are.
void Group::measure_peers() {
  constexpr int64_t kBytes = int64_t{1} << 25;
  constexpr int kRepeats = 5;
  const auto all_gather = [this](const std::vector<uint8_t>& own) { return all_gather_bytes(own); };
  const auto wanted = static_cast<uint8_t>(options_.peers);
  const std::vector<uint8_t> all = all_gather({wanted, wanted});
  if (std::find(all.begin(), all.end(), 0) != all.end()) return;
  peers_ = Peers::make(all_gather, options_.rank, options_.world_size, device_.side[0].get());
  if (peers_ == nullptr) return;
  float gbps = 0.0f;
  try {
    peers_->reserve(kBytes);
  } catch (const Error&) {
    peers_.reset();
    return;
  }
  const cudaStream_t stream = device_.side[0].get();
  // From one slot into another: nobody reads there. To each rank in turn, as neighbours may be bridged and others not:
  // what plans move to all is as slow as the slowest way.
  char* source = peers_->slot({.slot = 0}, options_.rank);
  Event begin(cudaEventDefault);
  Event end(cudaEventDefault);
  for (int distance = 1; distance < options_.world_size; ++distance) {
    const int peer = (options_.rank + distance) % options_.world_size;
    char* const destination = peers_->slot({.slot = 1}, peer);
    float best = 0.0f;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      begin.record(stream);
      check_cuda(cudaMemcpyAsync(destination, source, kBytes, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
      end.record(stream);
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      best = std::max(best, static_cast<float>(kBytes / (1e3 * elapsed_us(begin, end))));
    }
    gbps = distance == 1 ? best : std::min(gbps, best);
  }
  // The slowest rank's on all of them, so that they plan alike.
  std::vector<uint8_t> bytes(sizeof(gbps));
  std::memcpy(bytes.data(), &gbps, sizeof(gbps));
  bytes = all_gather_bytes(bytes);
  for (int rank = 0; rank < options_.world_size; ++rank) {
    float theirs = 0.0f;
    std::memcpy(&theirs, bytes.data() + sizeof(theirs) * static_cast<size_t>(rank), sizeof(theirs));
    gbps = std::min(gbps, theirs);
  }
  machine_.peer_gbps = gbps;
  peer_failures_ = std::make_unique<PeerFailures>(peers_->failures(), peers_->failures_of_peers(),
                                                  report_.get());
}

// Ranks that plan differently wait for each other until their deadline. Power limits, drivers and clocks may differ: all
// plan for the slowest rank.
void Group::agree_on_machine() {
  int nccl_version = 0;
  check_nccl(ncclGetVersion(&nccl_version), "ncclGetVersion");
  const plan::RankFacts own = plan::facts_of(machine_, nccl_version, plan::kSourceHash);
  std::vector<uint8_t> bytes(sizeof(own));
  std::memcpy(bytes.data(), &own, sizeof(own));
  bytes = all_gather_bytes(bytes);
  std::vector<plan::RankFacts> all(static_cast<size_t>(options_.world_size));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::memcpy(&all[rank], bytes.data() + rank * sizeof(own), sizeof(own));
  }
  const plan::Agreement agreed = plan::agree(machine_, all);
  machine_ = agreed.machine;
  if (agreed.difference.empty() || options_.rank != 0) return;
  std::fprintf(stderr, "overlap_torch: ranks of group '%s' differ: %s\n", options_.name.c_str(),
               agreed.difference.c_str());
}

// Whether the ranks see each other's memory, so that NCCL takes its window kernels: on all of them
// or on none.
bool Group::windows_work() {
  constexpr int64_t kBytes = int64_t{1} << 21;
  const CommunicatorKey key;
  float* flag = static_cast<float*>(staging(kBytes, {key}, false));
  float works = staging_->windows.at(key) != nullptr ? 1.0f : 0.0f;
  const cudaStream_t stream = device_.side[0].get();
  check_cuda(cudaMemcpyAsync(flag, &works, sizeof(works), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  communicator(key, false).all_reduce(flag, flag, 1, plan::DType::kFloat32, stream);
  check_cuda(cudaMemcpyAsync(&works, flag, sizeof(works), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return works == static_cast<float>(options_.world_size);
}

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
    } else if (const auto told = told_failure(kPeerPatience)) {
      told->is_cause ? fail(told->text) : fail_by_sign(told->text);
    }
  }
  check();
}

// The watchdog may find the cause soon, and fails then.
void Group::fail_by_sign(const std::string& sign) {
  const Clock::time_point end = Clock::now() + kCausePatience + kLastPoll;
  while (watched_ && !failed_ && Clock::now() < end) std::this_thread::sleep_for(kFirstPoll);
  fail(sign);
}

void Group::track(cudaStream_t stream, int chunks) {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  if (pending_.size() >= kMaxPending) return;  // the oldest ones stand for it
  std::unique_ptr<Pending> entry;
  if (idle_.empty()) {
    entry = std::make_unique<Pending>();
  } else {
    entry = std::move(idle_.back());
    idle_.pop_back();
  }
  entry->call = history_->calls();
  entry->chunks = chunks;
  entry->deadline = Clock::now() + options_.timeout;
  entry->done.record(stream);
  pending_.push_back(std::move(entry));
}

void Group::abandon(const std::string& why) {
  const std::string text = "rank " + std::to_string(options_.rank) + " left " + why + ".";
  history_->abandon(text);
  fail(text);
}

void Group::mark_captured() {
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  for (auto& [key, communicator] : communicators_) communicator->mark_captured();
  if (peers_ != nullptr) peers_->mark_captured();
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

// What a wait whose deadline passed has left behind: cheap enough for every call, as is what NCCL says.
std::optional<std::string> Group::wait_failure() {
  const kernels::WaitReport* report = report_.get();
  const uint64_t failure = *static_cast<const volatile uint64_t*>(&report->failure);
  if (failure != 0) {
    const kernels::WaitFailure wait = kernels::unpack(failure);
    const std::string deadline =
        " passed its deadline of " + std::to_string(options_.timeout.count() / 1000.0) + " s: ";
    const std::string counts =
        "expected " + std::to_string(wait.expected) + ", saw " + std::to_string(wait.seen) + ".";
    if (wait.peer == kCallersKernel) {
      return "a kernel of the caller's waited for the arrival of chunk " +
             std::to_string(wait.chunk) + " and" + deadline + "it did not arrive. If the kernel " +
             "holds all SMs while it waits, nothing can arrive: launch no more programs than the "
             "job's `programs` (docs/kernels.md).";
    }
    return wait.peer == kernels::kOwnGemm
               ? "the wait for the finished tiles of chunk " + std::to_string(wait.chunk) +
                     " of its own GEMM" + deadline + counts
               : "the wait for chunk " + std::to_string(wait.chunk) + " from rank " +
                     std::to_string(wait.peer) + deadline + counts +
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

// What a peer has told: its waits have failed, and let pass what is not right.
std::optional<Group::Told> Group::told_failure(std::chrono::microseconds patience) {
  if (peer_failures_ == nullptr) return std::nullopt;
  const std::optional<PeerFailures::Failure> told = peer_failures_->look(patience);
  if (!told) return std::nullopt;
  const kernels::WaitFailure& wait = told->wait;
  const std::string chunk = "chunk " + std::to_string(wait.chunk);
  const std::string rank = "rank " + std::to_string(told->rank) + " has failed";
  if (wait.peer == kFoundByHost) {
    return Told{rank + " in or after " + chunk +
                    " of a call, and what it sent since is not right. Its own error says why.",
                false};
  }
  const std::string of = wait.peer == kCallersKernel ? "the arrival of " + chunk
                         : wait.peer == kernels::kOwnGemm
                             ? "the finished tiles of " + chunk
                             : chunk + " from rank " + std::to_string(wait.peer);
  return Told{
      rank + ", and what it sent since is not right: its wait for " + of + " passed its deadline.",
      true};
}

// The chunk that the oldest call in flight has come to. Of one chunk, the collective follows the GEMM on its
// stream: no wait reports it.
int Group::chunk_in_flight() const {
  if (pending_.empty() || pending_.front()->chunks == 1) return 0;
  const int32_t reached = *static_cast<const volatile int32_t*>(&report_.get()->reached);
  return std::max(reached, 0);
}

bool Group::watch() {
  watched_ = true;
  if (!failed_) {
    std::optional<std::string> failure = wait_failure();
    if (!failure) failure = history_->look();
    if (!failure) failure = late_call();
    if (!failure) failure = sign_of_failure();
    // The error can be read from here on, without waiting for the device.
    if (failure) fail(*failure);
  }
  if (failed_ && peer_failures_ != nullptr && !told_) {
    peer_failures_->tell();
    told_ = true;
  }
  return failed_ && !aborted_;
}

// What a peer or NCCL says, once no cause has been found for a while.
std::optional<std::string> Group::sign_of_failure() {
  std::optional<std::string> sign;
  if (const auto told = told_failure({})) {
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
    while (!pending_.empty() && cudaEventQuery(pending_.front()->done.get()) != cudaErrorNotReady) {
      idle_.push_back(std::move(pending_.front()));
      pending_.pop_front();
    }
    if (pending_.empty() || Clock::now() <= pending_.front()->deadline) return std::nullopt;
    call = pending_.front()->call;
    chunk = chunk_in_flight();
  }
  history_->publish();
  return "call " + std::to_string(call) + " did not finish within " +
         std::to_string(options_.timeout.count() / 1000.0) + " s; its chunk " +
         std::to_string(chunk) +
         " was the last to be computed here, and waits for peers to communicate it. Calls made by "
         "the peers, as far as they are known: " +
         history_->describe_peers() + "; by this rank: " + std::to_string(history_->calls()) +
         ". A rank died, hangs, or made different calls.";
}

bool Group::idle() {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  return failed_ ? aborted_.load() : pending_.empty();
}

std::vector<int64_t> Group::memory() {
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  const auto count = static_cast<int64_t>(communicators_.size());
  int64_t bytes = staging_ == nullptr ? 0 : staging_->bytes();
  for (const auto& old : outgrown_) bytes += old->bytes();
  if (peers_ != nullptr) bytes += peers_->bytes();
  return {count, bytes};
}

}  // namespace overlap::runtime
