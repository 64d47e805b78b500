#include "runtime/group.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "kernels/gemm/gemm.h"
#include "plan/message.h"
#include "runtime/device_state.h"
#include "runtime/error.h"
#include "runtime/window_addresses.h"

namespace overlap::runtime {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxPending = 256;
constexpr int kPreparedPending = 64;
constexpr std::chrono::milliseconds kFirstPoll{1};  // of the store
constexpr std::chrono::milliseconds kLastPoll{20};
constexpr std::chrono::microseconds kFirstQuery{5};  // of the device
// Preparations (measuring, connecting) may take longer than a short deadline of calls.
constexpr std::chrono::milliseconds kReadyPatience{60'000};

// Dense 16-bit tensor-core operations of one SM and clock, by architecture; the profile says how much is sustained.
double tensor_flop_per_clock(int arch) {
  if (arch == 100 || arch == 103) return 8192;
  if (arch == 90) return 4096;
  if (arch == 80) return 2048;
  return 1024;
}

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
  if (!leaked_) cudaFreeHost(report_);
}

Group::Group(GroupOptions options) : options_(std::move(options)), device_(DeviceState::current()) {
  machine_.arch = device_.arch();
  machine_.sm_count = device_.sm_count();
  if (options_.profile != nullptr) machine_.profile = options_.profile;
  machine_.sm_gflops = tensor_flop_per_clock(device_.arch()) *
                       machine_.profile->gemm.sustained_rate * device_.clock_khz() * 1e3 / 1e9;
  if (options_.sm_gflops > 0.0) machine_.sm_gflops = options_.sm_gflops;
  machine_.kernel_arch = kernels::kernel_arch(device_.arch());
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
  if (options_.world_size == 1) return;
  try {
    measure_link();
    measure_peers();
    agree_on_machine();
  } catch (...) {
    // NCCL's kernels may wait for a rank that has died, and what frees memory waits for them.
    if (peers_ != nullptr) peers_->leak();
    abort_communicators();
    throw;
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
    throw Error(
        "overlap_torch: group '" + options_.name + "' has no communicator with " +
        (key.max_ctas == 0 ? std::string("NCCL's own") : std::to_string(key.max_ctas)) +
        " CTAs, and none can be made while a CUDA graph is captured. Call the op once with the "
        "same shapes, dtype and group before the capture (torch.cuda.graph's warm-up).");
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
  await(device_.side[0].get());
  forget(id_key(key));
  return *(communicators_[key] = std::move(communicator));
}

void Group::prepare(const plan::Plan& plan) {
  if (plan::over_peers(plan)) {
    (void)peers(plan, plan::peer_slot_bytes(plan), false);
    if (!plan::hierarchical(plan)) return;
  }
  for (int chunk = 0; chunk < static_cast<int>(plan.chunks.size()); ++chunk) {
    (void)communicator(communicator_of(plan, chunk), false);
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
  return await_key(key, 0);  // which rank 0 sets once all have come
}

// Polls: the store's own wait would keep the watchdog from asking it, which finds out why a peer does not come.
std::vector<uint8_t> Group::await_key(const std::string& key, int peer) {
  const bool others = peer == 0 && options_.world_size > 2;
  poll([&] { return options_.bootstrap.has(key); }, options_.timeout, kFirstPoll, kLastPoll,
       "rank " + std::to_string(peer) + (others ? ", or a rank that it waits for," : "") +
           " did not come to make communicators, map memory or compare messages",
       "Every rank of the group has to call the op with the same shapes, dtype and plan.");
  return options_.bootstrap.get(key);
}

// Polls, as a rank that has come to `meet` may die after it.
void Group::await(cudaStream_t stream) {
  const LetCapturesBe let_captures_be;
  const auto ended = [&] {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) {
      check_cuda(state, "cudaStreamQuery");
      return true;
    }
    (void)cudaGetLastError();  // PyTorch would find it
    return false;
  };
  poll(ended, std::max(options_.timeout, kReadyPatience), kFirstQuery, kFirstPoll,
       "a collective that makes ready for calls did not end", "A rank died, or its network did.");
}

// A copy into memory that is not pinned waits for the stream within the driver, where no deadline ends it. NCCL's kernels
// that wait for a rank that has died are ended, as all that frees memory, on the way to who catches this, waits for them.
void Group::bring_back(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  try {
    await(stream);
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    await(stream);
  } catch (const Error&) {
    fail("a collective that makes ready for calls failed, or did not end in time.");
    abort_communicators();
    throw;
  }
}

void Group::poll(const std::function<bool()>& ready, std::chrono::milliseconds patience,
                 std::chrono::microseconds pause, std::chrono::microseconds last_pause,
                 const std::string& what, const std::string& why) {
  const Clock::time_point deadline = Clock::now() + patience;
  while (!ready()) {
    if (failed_) check();
    if (Clock::now() >= deadline) {
      throw Error("overlap_torch: group '" + options_.name + "', rank " +
                  std::to_string(options_.rank) + ": " + what + " within " +
                  plan::in_seconds(patience) + ". " + why);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, last_pause);
  }
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
  bring_back(all.data(), scratch.get(), all.size(), stream);
  forget(key);
  return all;
}

std::string Group::id_key(CommunicatorKey key) const {
  return "overlap_torch/" + options_.name + "/nccl_id/" + std::to_string(key.max_ctas) + "." +
         std::to_string(key.lane);
}

// On all ranks or on none: the others would wait in NCCL for one that has no memory left.
std::unique_ptr<Staging> Group::make_staging(int64_t bytes) {
  std::unique_ptr<Staging> made;
  std::string why;
  try {
    made = std::make_unique<Staging>(bytes);
  } catch (const Error& error) {
    why = error.what();
  }
  const std::vector<uint16_t> answers = all_gather(static_cast<uint16_t>(made != nullptr));
  const auto missing = std::find(answers.begin(), answers.end(), 0);
  if (missing == answers.end()) return made;
  throw Error("overlap_torch: group '" + options_.name + "': rank " +
              std::to_string(missing - answers.begin()) + " cannot allocate " +
              std::to_string(bytes >> 20) + " MiB that NCCL reaches" +
              (why.empty() ? "" : " (" + why + ")") +
              ". Free some (torch.cuda.empty_cache() gives back what PyTorch keeps), or set plans "
              "without a window.");
}

void* Group::staging(int64_t bytes, const std::vector<CommunicatorKey>& keys) {
  if (staging_ == nullptr || staging_->bytes() < bytes) {
    int64_t rounded = int64_t{1} << 21;
    while (rounded < bytes) rounded *= 2;
    // The old memory may be in use, and waiting for the device is not allowed here: it is kept. All
    // of it together is less than the new one.
    std::unique_ptr<Staging> larger = make_staging(rounded);
    if (staging_ != nullptr) outgrown_.push_back(std::move(staging_));
    staging_ = std::move(larger);
    staging_bytes_ += rounded;
  }
  for (const CommunicatorKey& key : keys) {
    if (staging_->windows.contains(key)) continue;
    staging_->windows[key] =
        communicator(key, false).register_window(staging_->pointer(), staging_->bytes());
  }
  return staging_->pointer();
}

Peers& Group::peers(const plan::Plan& plan, int64_t slot_bytes, bool capturing,
                    int64_t stripe_bytes) {
  const int ranks = peers_ == nullptr ? 1 : peers_->clique().count;
  if (ranks != 1 && ranks != plan::peer_ranks(plan)) {
    throw Error("overlap_torch: group '" + options_.name + "' runs a plan in which " +
                std::to_string(plan::peer_ranks(plan)) + " ranks map each other's memory, but " +
                std::to_string(ranks) +
                " of its ranks do: set a plan with the collective hierarchical for hosts of so "
                "many ranks, or with the transport nccl.");
  }
  return peers(slot_bytes, capturing, stripe_bytes);
}

Peers& Group::peers(int64_t slot_bytes, bool capturing, int64_t stripe_bytes) {
  if (peers_ == nullptr) {
    throw Error(
        "overlap_torch: group '" + options_.name +
        "' runs a plan with the transport peer, but its ranks map no memory of each other: " +
        peer_memory_ + ". Set a plan with the transport nccl.");
  }
  const bool stripes = stripe_bytes > 0;
  if (capturing && (!peers_->fits(slot_bytes) || (stripes && !peers_->has_stripes(stripe_bytes)))) {
    throw Error("overlap_torch: group '" + options_.name + "' has not mapped slots of " +
                std::to_string(slot_bytes) +
                " bytes of its ranks' memory, and none can be mapped while a CUDA graph is "
                "captured. Call the op once with the same shapes before the capture.");
  }
  peers_->reserve(slot_bytes);
  if (stripes) peers_->reserve_stripes(stripe_bytes);
  return *peers_;
}

int64_t Group::longest_message(int64_t own_bytes, bool capturing) {
  own_longest_message_ = std::max(own_longest_message_, own_bytes);
  if (capturing || !std::has_single_bit(++message_calls_)) return longest_message_;
  check();
  for (const int64_t theirs : all_gather(own_longest_message_)) {
    longest_message_ = std::max(longest_message_, theirs);
  }
  return longest_message_;
}

// Returns true if the ranks see each other's memory, so that NCCL takes its window kernels: on all of them
// or on none.
bool Group::windows_work() {
  constexpr int64_t kBytes = int64_t{1} << 21;
  const CommunicatorKey key;
  float* flag = static_cast<float*>(staging(kBytes, {key}));
  float works = staging_->windows.at(key) != nullptr ? 1.0f : 0.0f;
  const cudaStream_t stream = device_.side[0].get();
  check_cuda(cudaMemcpyAsync(flag, &works, sizeof(works), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  communicator(key, false).all_reduce(flag, flag, 1, plan::DType::kFloat32, stream);
  bring_back(&works, flag, sizeof(works), stream);
  return works == static_cast<float>(options_.world_size);
}

bool Group::has_symmetric_window() const {
  return is_symmetric(staging_->windows.at(CommunicatorKey{}));
}

void Group::track(cudaStream_t stream, int chunks) {
  std::unique_ptr<Pending> entry;
  {
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    if (pending_.size() >= kMaxPending) {
      // Calls end in their order: the newest stands for the one before it. The observer holds the oldest.
      entry = std::move(pending_.back());
      pending_.pop_back();
    } else if (!idle_.empty()) {
      entry = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (entry == nullptr) entry = std::make_unique<Pending>();
  entry->done.record(stream);  // may wait for the device, and the watchdog must not wait for that
  entry->call = history_->calls();
  entry->chunks = chunks;
  entry->deadline = Clock::now() + options_.timeout;
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  pending_.push_back(std::move(entry));
}

void Group::mark_captured() {
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  for (auto& [key, communicator] : communicators_) communicator->mark_captured();
  if (peers_ != nullptr) peers_->mark_captured();
  report_.leak();
}

bool Group::idle() {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  return failed_ ? aborted_.load() : pending_.empty();
}

std::vector<int64_t> Group::memory() {
  const std::lock_guard<std::mutex> lock(communicators_mutex_);
  const auto count = static_cast<int64_t>(communicators_.size());
  return {count, staging_bytes_ + (peers_ == nullptr ? 0 : peers_->bytes())};
}

}  // namespace overlap::runtime
