#include "runtime/communicator.h"

#include "runtime/error.h"
#include "runtime/window_addresses.h"

namespace overlap::runtime {
namespace {

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
    case plan::DType::kFloat8E4M3:
    case plan::DType::kFloat8E5M2:
      return ncclUint8;  // gathered, never added up
  }
  throw Error("overlap_torch: unknown dtype");
}

}  // namespace

Communicator::Communicator(const ncclUniqueId& id, const Options& options)
    : rank_(options.rank), world_size_(options.world_size) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // Non-blocking communicators hand every call to a thread of their own, which takes longer than the call.
  config.blocking = 1;
  if (options.max_ctas > 0) {
    // These run beside a persistent GEMM: launched as clusters of 4, as NCCL does on Hopper, they
    // would need 4 free SMs of one GPC at once, and start only when the GEMM ends. A collective
    // that has the GPU to itself is faster with clusters.
    config.cgaClusterSize = 0;
    config.minCTAs = 1;
    config.maxCTAs = options.max_ctas;
  }
  check_nccl(ncclCommInitRankConfig(&comm_, options.world_size, id, options.rank, &config),
             "ncclCommInitRankConfig");
}

Communicator::~Communicator() {
  if (!captured_) abort();
}

void Communicator::all_reduce(const void* source, void* destination, size_t count,
                              plan::DType dtype, cudaStream_t stream) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("all-reduce");
  check_nccl(ncclAllReduce(source, destination, count, nccl_dtype(dtype), ncclSum, comm_, stream),
             "ncclAllReduce");
}

void Communicator::all_gather_in_place(void* destination, size_t count, plan::DType dtype,
                                       cudaStream_t stream) {
  const size_t bytes = count * static_cast<size_t>(plan::element_bytes(dtype));
  all_gather(static_cast<const char*>(destination) + bytes * static_cast<size_t>(rank_),
             destination, count, dtype, stream);
}

namespace {

// A collective of each of several blocks, as one call; `call(block)`.
template <typename Call>
ncclResult_t for_blocks(int blocks, const Call& call) {
  if (blocks == 1) return call(0);
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  for (int block = 0; block < blocks && result == ncclSuccess; ++block) result = call(block);
  const ncclResult_t ended = ncclGroupEnd();
  return result != ncclSuccess ? result : ended;
}

}  // namespace

void Communicator::all_gather(const void* source, void* destination, size_t count,
                              plan::DType dtype, cudaStream_t stream, int blocks) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("all-gather");
  const size_t each = count / static_cast<size_t>(blocks);
  const size_t bytes = each * static_cast<size_t>(plan::element_bytes(dtype));
  const auto gather = [&](int block) {
    const size_t offset = static_cast<size_t>(block) * bytes;
    return ncclAllGather(
        static_cast<const char*>(source) + offset,
        static_cast<char*>(destination) + offset * static_cast<size_t>(world_size_), each,
        nccl_dtype(dtype), comm_, stream);
  };
  check_nccl(for_blocks(blocks, gather), "ncclAllGather");
}

void Communicator::reduce_scatter(const void* source, void* destination, size_t count,
                                  plan::DType dtype, cudaStream_t stream, int blocks) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("reduce-scatter");
  const size_t each = count / static_cast<size_t>(blocks);
  const size_t bytes = each * static_cast<size_t>(plan::element_bytes(dtype));
  const auto scatter = [&](int block) {
    const size_t offset = static_cast<size_t>(block) * bytes;
    return ncclReduceScatter(
        static_cast<const char*>(source) + offset * static_cast<size_t>(world_size_),
        static_cast<char*>(destination) + offset, each, nccl_dtype(dtype), ncclSum, comm_, stream);
  };
  check_nccl(for_blocks(blocks, scatter), "ncclReduceScatter");
}

void Communicator::send_receive(const std::vector<Message>& sends,
                                const std::vector<Message>& receives, cudaStream_t stream) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("all-to-all");
  check_nccl(ncclGroupStart(), "ncclGroupStart");
  ncclResult_t result = ncclSuccess;
  for (const Message& send : sends) {
    if (result != ncclSuccess) break;
    result = ncclSend(send.data, send.bytes, ncclInt8, send.peer, comm_, stream);
  }
  for (const Message& receive : receives) {
    if (result != ncclSuccess) break;
    result = ncclRecv(receive.data, receive.bytes, ncclInt8, receive.peer, comm_, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  check_nccl(result, "ncclSend or ncclRecv");
  check_nccl(ended, "ncclGroupEnd");
}

void Communicator::check_alive(const char* call) const {
  if (aborted_) throw Error(std::string("overlap_torch: ") + call + " on an aborted communicator");
}

ncclWindow_t Communicator::register_window(void* pointer, size_t bytes) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("window");
  ncclWindow_t window = nullptr;
  const ncclResult_t result =
      ncclCommWindowRegister(comm_, pointer, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  return result == ncclSuccess ? window : nullptr;
}

void Communicator::deregister_window(ncclWindow_t window) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  if (!aborted_) (void)ncclCommWindowDeregister(comm_, window);
}

int Communicator::load_store_ranks() {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  check_alive("team");
  return runtime::load_store_ranks(comm_);
}

std::optional<std::string> Communicator::async_error() {
  // A thread that is in a call sees the error itself.
  const std::unique_lock<std::timed_mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || aborted_) return std::nullopt;
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
  // A call that only enqueues leaves soon; one stuck inside NCCL is what abort is for.
  std::unique_lock<std::timed_mutex> lock(mutex_, std::defer_lock);
  (void)lock.try_lock_for(std::chrono::seconds(2));
  ncclCommAbort(comm_);
}

}  // namespace overlap::runtime
