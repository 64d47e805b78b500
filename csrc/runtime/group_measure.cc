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
    check_cuda(cudaMemcpyAsync(&time, scratch.get(), sizeof(time), cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    await(stream);
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
  const ByteAllGather bytes = [this](const auto& own) { return all_gather_bytes(own); };
  const std::vector<uint16_t> wanted = all_gather(static_cast<uint16_t>(options_.peers));
  clique_ = find_clique(bytes, options_.rank, kernels::kMaxPeers);
  if (std::find(wanted.begin(), wanted.end(), 0) != wanted.end()) return;
  peers_ = Peers::make(bytes, clique_, device_.side[0].get());
  if (peers_ == nullptr) return;
  try {
    peers_->reserve(kCopiedBytes);
  } catch (const Error&) {
    peers_.reset();
    return;
  }
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
