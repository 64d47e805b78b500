// A group measures and agrees when it is made: on its links, its peers' memory, its ranks' machines.
#include <algorithm>
#include <cstdio>

#include "plan/agreement.h"
#include "runtime/device_state.h"
#include "runtime/error.h"
#include "runtime/group.h"

namespace overlap::runtime {
namespace {

constexpr int64_t kCopiedBytes = int64_t{1} << 25;  // to measure copies into peers' memory

}  // namespace

void Group::measure_link() {
  constexpr size_t kSmallBytes = size_t{1} << 18;
  constexpr size_t kLargeBytes = size_t{1} << 25;
  // The median of `repeats`, each the mean of `calls` back to back. Small ones run after `lead` large ones, so that
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
      await(stream);
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
    bring_back(&time, scratch.get(), sizeof(time), stream);
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

// Finds out which ranks map each other's memory, and how fast copies into it are.
void Group::measure_peers() {
  const int32_t source = options_.peers ? static_cast<int32_t>(options_.peer_source) : -1;
  const std::string forbidden = plan::why_no_peers(all_gather(source));
  clique_ = find_clique([this](const auto& own) { return all_gather_bytes(own); }, options_.rank,
                        kernels::kMaxPeers);
  if (forbidden.empty()) {
    map_peers();
  } else {
    peer_memory_ = "none: " + forbidden;
  }
  if (peers_ == nullptr) return;
  // The slowest rank's on all of them, so that they plan alike.
  const float gbps = least_of_all(measure_copies());
  peers_->know_link(gbps);
  peer_failures_ = std::make_unique<PeerFailures>(peers_->failures(), peers_->failures_of_peers(),
                                                  report_.get());
  if (clique_.count == options_.world_size) {
    machine_.peer_gbps = gbps;
    return;
  }
  machine_.clique = clique_.count;
  machine_.clique_gbps = gbps;
  measure_across();
}

// Through CUDA IPC, or else by windows.
void Group::map_peers() {
  using plan::PeerSource;
  const std::string setting =
      std::string(" (OVERLAP_PEER_MEMORY=") + plan::name(options_.peer_source) + ")";
  std::string why_no_ipc;
  if (options_.peer_source != PeerSource::kNccl) {
    why_no_ipc = map_peers_by(clique_, false);
    if (peers_ != nullptr || options_.peer_source == PeerSource::kIpc) {
      peer_memory_ =
          peers_ != nullptr ? "CUDA IPC" : "none: CUDA IPC" + setting + ": " + why_no_ipc;
      return;
    }
    why_no_ipc = "CUDA IPC is refused: " + why_no_ipc;
  }
  const std::string why = map_windows();
  const std::string by = why_no_ipc.empty() ? "NCCL windows" + setting : "NCCL windows";
  const std::string other = why_no_ipc.empty() ? "" : "; " + why_no_ipc;
  peer_memory_ = peers_ != nullptr ? by + other : "none: " + by + ": " + why + other;
}

// Why there are none; else "".
std::string Group::map_peers_by(const Clique& clique, bool windows) {
  std::string why;
  std::unique_ptr<Communicator> of_windows;
  if (windows) {
    // One of their own: a group that fails aborts the others while peers may still store.
    constexpr CommunicatorKey kWindows = {.max_ctas = 1, .lane = -1};
    try {
      of_windows = std::make_unique<Communicator>(
          unique_id(kWindows), Communicator::Options{.rank = options_.rank,
                                                     .world_size = options_.world_size,
                                                     .max_ctas = kWindows.max_ctas});
    } catch (const Error& error) {
      why = error.what();
    }
    forget(id_key(kWindows));
    if (least_of_all(why.empty() ? 1.0f : 0.0f) == 0.0f) {
      return why.empty() ? "a rank has no communicator for windows" : why;
    }
  }
  peers_ = Peers::make([this](const auto& own) { return all_gather_bytes(own); }, clique,
                       device_.side[0].get(), std::move(of_windows), &why);
  if (peers_ == nullptr) return why;
  try {
    peers_->reserve(kCopiedBytes);
  } catch (const Error& error) {
    peers_.reset();
    return error.what();
  }
  return "";
}

// The same by windows, where NCCL sees them.
std::string Group::map_windows() {
  const std::vector<int32_t> teams = all_gather(communicator({}, false).load_store_ranks());
  // Before anything is made for this.
  if (least_of_all(has_symmetric_window() ? 1.0f : 0.0f) == 0.0f) return kNoWindow;
  if (const auto none = std::find(teams.begin(), teams.end(), 0); none != teams.end()) {
    return "rank " + std::to_string(none - teams.begin()) +
           " has an NCCL without load/store teams, or of another release than " +
           std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) +
           ", which overlap_torch was built with";
  }
  const int count =
      plan::ranks_of_windows(clique_.count, teams[0], options_.world_size, kernels::kMaxPeers);
  if (count == 1) {
    return "as NCCL sees it, " + std::to_string(teams[0]) +
           " ranks load and store each other's memory, which is neither all of the group's " +
           std::to_string(options_.world_size) + " nor all of a host's " +
           std::to_string(clique_.count);
  }
  const Clique clique = {options_.rank / count * count, count, options_.rank};
  const std::string why = map_peers_by(clique, true);
  if (peers_ != nullptr) clique_ = clique;
  return why;
}

// From one slot into another: nobody reads there. To each rank in turn, as neighbours may be bridged and others not:
// what plans move to all is as slow as the slowest way.
float Group::measure_copies() {
  constexpr int kRepeats = 5;
  float gbps = 0.0f;
  const cudaStream_t stream = device_.side[0].get();
  char* const source = peers_->slot({.slot = 0}, options_.rank);
  Event begin(cudaEventDefault);
  Event end(cudaEventDefault);
  for (int distance = 1; distance < clique_.count; ++distance) {
    const int peer = clique_.first + (clique_.place() + distance) % clique_.count;
    char* const destination = peers_->slot({.slot = 1}, peer);
    float best = 0.0f;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      begin.record(stream);
      check_cuda(
          cudaMemcpyAsync(destination, source, kCopiedBytes, cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
      end.record(stream);
      await(stream);
      best = std::max(best, static_cast<float>(kCopiedBytes / (1e3 * elapsed_us(begin, end))));
    }
    gbps = distance == 1 ? best : std::min(gbps, best);
  }
  return gbps;
}

// Each rank sends to its counterpart on the next host, and receives from the one before: all of a host's links at once.
void Group::measure_across() {
  constexpr size_t kSmallBytes = size_t{1} << 14;
  constexpr size_t kLargeBytes = size_t{1} << 24;
  constexpr int kRepeats = 5;
  const int next = (options_.rank + clique_.count) % options_.world_size;
  const int before = (options_.rank + options_.world_size - clique_.count) % options_.world_size;
  const cudaStream_t stream = device_.side[0].get();
  char* const own = peers_->slot({.slot = 0}, options_.rank);
  char* const received = peers_->slot({.slot = 1}, options_.rank);
  Event begin(cudaEventDefault);
  Event end(cudaEventDefault);
  const auto median_us = [&](size_t bytes) {
    std::vector<double> times;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      begin.record(stream);
      communicator({}, false).send_receive({{next, own, bytes}}, {{before, received, bytes}},
                                           stream);
      end.record(stream);
      await(stream);
      times.push_back(elapsed_us(begin, end));
    }
    std::sort(times.begin(), times.end());
    return times[kRepeats / 2];
  };
  (void)median_us(kLargeBytes);  // connects them
  const double small_us = median_us(kSmallBytes);
  const double large_us = std::max(median_us(kLargeBytes), small_us + 1.0);
  const auto gbps = static_cast<float>((kLargeBytes - kSmallBytes) / ((large_us - small_us) * 1e3));
  machine_.across_gbps = least_of_all(gbps);
  machine_.across_latency_us = -least_of_all(static_cast<float>(-small_us));
}

// The least of all ranks' numbers. Collective.
float Group::least_of_all(float number) {
  const std::vector<float> all = all_gather(number);
  return *std::min_element(all.begin(), all.end());
}

// Ranks that plan differently wait for each other until their deadline. Power limits, drivers and clocks may differ: all
// plan for the slowest rank.
void Group::agree_on_machine() {
  int nccl_version = 0;
  check_nccl(ncclGetVersion(&nccl_version), "ncclGetVersion");
  const plan::RankFacts own =
      plan::facts_of(machine_, nccl_version, plan::kSourceHash, options_.serial);
  const plan::Agreement agreed = plan::agree(machine_, all_gather(own));
  machine_ = agreed.machine;
  if (options_.rank != 0) return;
  if (!agreed.difference.empty()) {
    std::fprintf(stderr, "overlap_torch: ranks of group '%s' differ: %s\n", options_.name.c_str(),
                 agreed.difference.c_str());
  }
  if (!agreed.why_serial.empty()) {
    std::fprintf(stderr,
                 "overlap_torch: kernels of group '%s' run one at a time (%s): every call runs the "
                 "sequence, as nothing can overlap, and a kernel that waits for a peer's might "
                 "wait for ever\n",
                 options_.name.c_str(), agreed.why_serial.c_str());
  }
}

}  // namespace overlap::runtime
