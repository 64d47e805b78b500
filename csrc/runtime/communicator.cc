#include "runtime/communicator.h"

#include <thread>

#include "runtime/error.h"

namespace overlap::runtime {
namespace {

using Clock = std::chrono::steady_clock;

ncclDataType_t nccl_dtype(plan::DType dtype) {
  switch (dtype) {
    case plan::DType::kBFloat16:
      return ncclBfloat16;
    case plan::DType::kFloat16:
      return ncclFloat16;
    case plan::DType::kFloat32:
      return ncclFloat32;
    case plan::DType::kFloat64:
      return ncclFloat64;
  }
  throw Error("overlap_torch: unknown dtype");
}

}  // namespace

Communicator::Communicator(const ncclUniqueId& id, const Options& options) : options_(options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  // NCCL's kernels run beside a persistent GEMM: as clusters of 4 they would need 4 free SMs of one GPC at once, and
  // start only when the GEMM ends.
  config.cgaClusterSize = 0;
  if (options.max_ctas > 0) {
    config.minCTAs = 1;
    config.maxCTAs = options.max_ctas;
  }
  try {
    finish(ncclCommInitRankConfig(&comm_, options.world_size, id, options.rank, &config),
           "ncclCommInitRankConfig");
  } catch (...) {
    if (comm_ != nullptr) ncclCommAbort(comm_);
    throw;
  }
}

Communicator::~Communicator() {
  if (!captured_) abort();
}

void Communicator::finish(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  while (result == ncclInProgress) {
    if (aborted_) throw Error(std::string("overlap_torch: ") + what + ": the communicator was aborted");
    if (Clock::now() > deadline) {
      throw Error(std::string("overlap_torch: ") + what + " on rank " +
                  std::to_string(options_.rank) + " did not finish within " +
                  std::to_string(options_.timeout.count() / 1000.0) +
                  " s: not all " + std::to_string(options_.world_size) +
                  " ranks of the group made the same call");
    }
    if (comm_ != nullptr) check_nccl(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
    if (result == ncclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  check_nccl(result, what);
}

void Communicator::all_reduce(const void* source, void* destination, size_t count, plan::DType dtype,
                              cudaStream_t stream) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  if (aborted_) throw Error("overlap_torch: all-reduce on an aborted communicator");
  finish(ncclAllReduce(source, destination, count, nccl_dtype(dtype), ncclSum, comm_, stream),
         "ncclAllReduce");
}

bool Communicator::register_window(void* pointer, size_t bytes) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  if (aborted_) return false;
  ncclWindow_t window = nullptr;
  finish(ncclCommWindowRegister(comm_, pointer, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
         "ncclCommWindowRegister");
  return window != nullptr;
}

std::optional<std::string> Communicator::async_error() {
  if (aborted_) return std::nullopt;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
  if (result != ncclSuccess) state = result;
  if (state == ncclSuccess || state == ncclInProgress) return std::nullopt;
  const char* detail = ncclGetLastError(comm_);
  return std::string("NCCL reports: ") + ncclGetErrorString(state) +
         (detail != nullptr && *detail != '\0' ? std::string(" (") + detail + ")" : std::string());
}

void Communicator::abort() {
  if (aborted_.exchange(true)) return;
  // A call that is waiting in finish() sees the flag and leaves; one stuck inside NCCL is what abort is for.
  std::unique_lock<std::timed_mutex> lock(mutex_, std::defer_lock);
  (void)lock.try_lock_for(std::chrono::seconds(2));
  ncclCommAbort(comm_);
}

}  // namespace overlap::runtime
