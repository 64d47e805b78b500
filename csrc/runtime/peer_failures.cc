#include "runtime/peer_failures.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "runtime/device_state.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

constexpr std::chrono::microseconds kPoll{5};
constexpr int kAnyPriority = 0;

}  // namespace

PeerFailures::PeerFailures(const uint64_t* own, const std::vector<uint64_t*>& theirs,
                           kernels::WaitReport* report)
    : own_(own), theirs_(theirs), report_(report), stream_(kAnyPriority) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, kernels::kMaxPeers * sizeof(uint64_t), cudaHostAllocPortable),
             "cudaHostAlloc");
  words_ = static_cast<uint64_t*>(memory);
  std::fill_n(words_, kernels::kMaxPeers, 0);
  std::copy(theirs_.begin(), theirs_.end(), report_->tell);
}

PeerFailures::~PeerFailures() {
  std::fill_n(report_->tell, kernels::kMaxPeers - 1, nullptr);
  cudaStreamSynchronize(stream_.get());
  cudaFreeHost(words_);
}

std::optional<PeerFailures::Failure> PeerFailures::known() const {
  for (int rank = 0; rank < kernels::kMaxPeers; ++rank) {
    const uint64_t word = std::atomic_ref<uint64_t>(words_[rank]).load();
    if (word != 0) return Failure{rank, kernels::unpack(word)};
  }
  return std::nullopt;
}

void PeerFailures::look(std::chrono::microseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  const std::unique_lock<std::timed_mutex> lock(mutex_, end);
  if (!lock.owns_lock()) return;  // another thread looks, and the driver keeps it
  const LetCapturesBe let_captures_be;
  const auto copied = [&] {
    while (cudaEventQuery(copied_.get()) == cudaErrorNotReady) {
      (void)cudaGetLastError();  // PyTorch would find it
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(kPoll);
    }
    return true;
  };
  if (!copied()) return;
  const cudaError_t error = cudaMemcpyAsync(words_, own_, kernels::kMaxPeers * sizeof(uint64_t),
                                            cudaMemcpyDeviceToHost, stream_.get());
  if (error != cudaSuccess) return;  // whatever it is, the ops report it
  copied_.record(stream_.get());
  (void)copied();
}

void PeerFailures::tell() {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  const LetCapturesBe let_captures_be;
  for (uint64_t* const word : theirs_) {
    (void)cudaMemcpyAsync(word, &report_->failure, sizeof(*word), cudaMemcpyDefault, stream_.get());
  }
}

}  // namespace overlap::runtime
