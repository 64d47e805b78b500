// The CUDA runtime and NCCL as far as csrc/runtime calls them: they write down what is enqueued. Nothing runs; in the
// set-up of a group the host gets back what all ranks, which bring the same, make of it, and calls take a link's time.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "record.h"
#include "runtime/window_addresses.h"

using recorder::at;
using recorder::cat;
using recorder::driver;
using recorder::record;

struct ncclComm {
  std::string name;
  bool aborted = false;
};

namespace {

constexpr double kCopyGbps = 365.0;  // between ranks
constexpr double kLatencyUs = 9.0;
constexpr double kLinkGbps = 260.0;

void copy(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  std::vector<uint8_t>& brought = record().brought;
  if (kind == cudaMemcpyHostToDevice) {
    brought.assign(bytes, 0);
    std::memcpy(brought.data(), source, bytes);
  } else if (kind == cudaMemcpyDeviceToHost) {
    brought.resize(bytes);
    std::memcpy(destination, brought.data(), bytes);
    brought.clear();
  }
}

// All cases are of bfloat16; the set-up of a group brings float32 and bytes, too.
int64_t bytes_of(size_t count, ncclDataType_t type) {
  const int64_t element = type == ncclFloat32 ? 4 : type == ncclInt8 ? 1 : 2;
  if (element == 2 && type != ncclBfloat16) record().violation("NCCL's type");
  return static_cast<int64_t>(count) * element;
}

size_t world() {
  return static_cast<size_t>(record().world);
}

// All ranks bring the same.
void add_brought() {
  std::vector<uint8_t>& brought = record().brought;
  float sum = 0.0f;
  if (brought.size() != sizeof(sum)) return;
  std::memcpy(&sum, brought.data(), sizeof(sum));
  sum *= static_cast<float>(world());
  std::memcpy(brought.data(), &sum, sizeof(sum));
}
void gather_brought() {
  const std::vector<uint8_t> before = record().brought;
  const size_t part = before.size() / world();
  for (size_t i = 0; i < before.size(); ++i) {
    record().brought[i] = before[part * static_cast<size_t>(record().rank) + i % part];
  }
}

// One collective: `sent` and `received` elements on each rank.
void collective(const char* kind, const void* source, void* destination, size_t sent,
                size_t received, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  if (comm->aborted) record().violation(cat(kind, " on an aborted communicator"));
  record().meets(stream);
  const int64_t from = bytes_of(sent, type);
  const int64_t to = bytes_of(received, type);
  record().now_us += kLatencyUs + static_cast<double>(std::max(from, to)) / (kLinkGbps * 1e3);
  record().operation(stream, cat(kind, " ", comm->name, " ", std::min(from, to), " bytes, ",
                                 at(source, from), " -> ", at(destination, to)));
}

void free_memory() {
  record().free();
  if (driver.failed) record().violation("memory is freed while NCCL's kernels may wait");
}

// The messages of the open group.
bool grouped = false;
std::string messages;
ncclComm_t by = nullptr;
cudaStream_t on = nullptr;

void message(const char* verb, const void* data, size_t count, ncclDataType_t type, int peer,
             ncclComm_t comm, cudaStream_t stream) {
  const bool alone = !messages.empty() && (comm != by || stream != on);
  if (!grouped || alone) record().violation(cat(verb, " outside of its stream's group"));
  by = comm;
  on = stream;
  const int64_t bytes = bytes_of(count, type);
  messages += cat("; ", verb, " ", peer, " ", bytes, " bytes, ", at(data, bytes));
}

}  // namespace

#define CUDA(...) FAKE_OF(cudaError_t, cudaSuccess, __VA_ARGS__)
#define NCCL(...) FAKE_OF(ncclResult_t, ncclSuccess, __VA_ARGS__)

FAKE_OF(const char*, "cudaErrorOfTheFake", cudaGetErrorName, (cudaError_t))
FAKE_OF(const char*, "the fake refuses", cudaGetErrorString, (cudaError_t))
FAKE_OF(const char*, "the fake refuses", ncclGetErrorString, (ncclResult_t))
FAKE_OF(const char*, "", ncclGetLastError, (ncclComm_t))
CUDA(cudaEventDestroy, (cudaEvent_t))
CUDA(cudaStreamDestroy, (cudaStream_t))
CUDA(cudaThreadExchangeStreamCaptureMode, (cudaStreamCaptureMode*))
CUDA(cudaIpcCloseMemHandle, (void*))
CUDA(cudaGetLastError, ())
CUDA(cudaDeviceSynchronize, ())
CUDA(cudaPointerGetAttributes, (cudaPointerAttributes * attributes, const void*),
     attributes->type = cudaMemoryTypeDevice)
CUDA(cudaGetDevice, (int* device), *device = record().device)
CUDA(cudaSetDevice, (int), driver.enter())
CUDA(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), *least = 0, *greatest = -5)
CUDA(cudaMemGetInfo, (size_t* free, size_t* all), *free = *all = size_t{1} << 36)
CUDA(cudaHostAlloc, (void** pointer, size_t bytes, unsigned int), *pointer = std::calloc(1, bytes))
CUDA(cudaFreeHost, (void* pointer), driver.freed = driver.freed || pointer == driver.report,
     std::free(pointer))
CUDA(cudaFree, (void*), free_memory())
CUDA(cudaFreeAsync, (void*, cudaStream_t), record().host("memory is freed"))
CUDA(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), record().mark(event, stream),
     stream != nullptr&& stream == driver.stuck ? driver.never = event : nullptr)
CUDA(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned int),
     record().wait(stream, event))
CUDA(cudaEventSynchronize, (cudaEvent_t), record().host("the host waits"))
CUDA(cudaStreamSynchronize, (cudaStream_t stream), record().synchronize(stream))
CUDA(cudaStreamGetId, (cudaStream_t stream, unsigned long long* id),
     *id = reinterpret_cast<unsigned long long>(stream))
CUDA(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned int flags),
     *event = record().new_event((flags & cudaEventDisableTiming) == 0))
CUDA(cudaDeviceGetAttribute, (int* value, cudaDeviceAttr attribute, int),
     *value = attribute == cudaDevAttrMultiProcessorCount      ? 132
              : attribute == cudaDevAttrComputeCapabilityMajor ? 9
              : attribute == cudaDevAttrClockRate              ? 1980000
                                                               : 0)
CUDA(cudaMallocAsync, (void** pointer, size_t bytes, cudaStream_t), record().host("memory is made"),
     *pointer = record().allocate("scratch", static_cast<int64_t>(bytes)))
CUDA(cudaMemsetAsync, (void* pointer, int value, size_t bytes, cudaStream_t stream),
     record().operation(stream, cat("set ", bytes, " bytes at ",
                                    at(pointer, static_cast<int64_t>(bytes)), " to ", value)))
CUDA(cudaMemcpy, (void* destination, const void* source, size_t bytes, cudaMemcpyKind kind),
     record().host("the host waits"), copy(destination, source, bytes, kind))
CUDA(cudaIpcGetMemHandle, (cudaIpcMemHandle_t * handle, void* pointer),
     std::memset(handle, 0, sizeof(*handle)), std::memcpy(handle, &pointer, sizeof(pointer)))

cudaError_t cudaEventQuery(cudaEvent_t event) {
  driver.enter();
  record().host("an event is asked for");
  return driver.ends && event != driver.never ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  record().synchronize(stream);
  if (driver.answers >= 0 && driver.answers-- == 0) driver.failed = true;
  return driver.failed ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const double from = record().us_of(begin), to = record().us_of(end);
  *milliseconds = static_cast<float>((to - from) * 1e-3);
  return from < 0 || to < 0 ? cudaErrorInvalidResourceHandle : cudaSuccess;
}

// DeviceState makes four side streams, then these, and at last four in place of the first, of low priority; a group over
// peers one to read what they tell about failures.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  constexpr const char* kNames[] = {"side0",     "side1",     "side2",     "side3",
                                    "copy",      "observer",  "low_side0", "low_side1",
                                    "low_side2", "low_side3", "failures"};
  const int index = record().count("stream");
  if ((priority == 0) != (index == 4 || index > 5)) record().violation("a stream's priority");
  *stream = record().new_stream(kNames[index]);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *id = record().capture_of(stream);
  *status = *id != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// No driver: nothing that is recorded asks it.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = nullptr;
  return cudaErrorNotSupported;
}

// The ranks map these of each other: their flags first, then slots, and larger ones in their place.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const int slots = record().count("peer memory");
  const std::string name = slots == 0 ? "flags" : slots == 1 ? "slots" : cat("slots", slots);
  record().host("memory is made");
  record().next_peer = 0;
  *pointer = record().allocate(cat(name, "@", record().rank), static_cast<int64_t>(bytes));
  return cudaSuccess;
}

// The peers' handles are copies of the own one, in the ranks' order.
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned int) {
  if (!record().maps_peers) return cudaErrorPeerAccessUnsupported;
  void* own = nullptr;
  std::memcpy(&own, &handle, sizeof(own));
  int& peer = record().next_peer;
  if (peer == record().rank) ++peer;
  const std::string name = at(own);
  *pointer = record().allocate(cat(name.substr(0, name.find('@')), "@", peer++));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  driver.enter();
  if (!record().on) return cudaSuccess;
  if (kind == cudaMemcpyDeviceToHost) record().bring(stream);
  copy(destination, source, bytes, kind);
  record().now_us += static_cast<double>(bytes) / (kCopyGbps * 1e3);
  const auto place = [&](const void* pointer, cudaMemcpyKind by_host) {
    return kind == by_host ? "host" : at(pointer, static_cast<int64_t>(bytes));
  };
  record().operation(stream, cat("copy ", bytes, " bytes, ", place(source, cudaMemcpyHostToDevice),
                                 " -> ", place(destination, cudaMemcpyDeviceToHost)));
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t to_stride, const void* source,
                              size_t from_stride, size_t width, size_t height, cudaMemcpyKind,
                              cudaStream_t stream) {
  record().operation(stream, cat("copy ", height, " rows of ", width, " bytes, ", at(source),
                                 " by ", from_stride, " -> ", at(destination), " by ", to_stride));
  return cudaSuccess;
}

overlap::runtime::GroupOptions recorder::options_of(const std::string& name, int64_t timeout_ms) {
  overlap::runtime::GroupOptions options;
  options.name = name;
  options.rank = record().rank;
  options.world_size = record().world;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.bootstrap.set = [](const std::string&, const std::vector<uint8_t>&) {};
  options.bootstrap.get = [](const auto&) { return std::vector<uint8_t>(sizeof(ncclUniqueId)); };
  options.bootstrap.has = [](const std::string&) { return true; };
  options.bootstrap.remove = [](const std::string&) {};
  options.alive = [] { return true; };
  return options;
}

NCCL(ncclGetUniqueId, (ncclUniqueId * id), std::memset(id, 0, sizeof(*id)))
NCCL(ncclGetVersion, (int* version), *version = NCCL_VERSION_CODE)
NCCL(ncclMemFree, (void*), free_memory())
NCCL(ncclCommAbort, (ncclComm_t comm), comm->aborted = true, driver.failed = false,
     ++driver.aborted)
NCCL(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t* result),
     *result = record().nccl_failed ? ncclRemoteError : ncclSuccess)
NCCL(ncclGroupStart, (), grouped = true, messages.clear())
NCCL(ncclCommWindowRegister, (ncclComm_t, void* pointer, size_t bytes, ncclWindow_t* window, int),
     record().host("a window is registered"), (void)at(pointer, static_cast<int64_t>(bytes)),
     ++record().windows, *window = reinterpret_cast<ncclWindow_t>(pointer))
NCCL(ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t),
     comm->aborted ? record().violation("a window of an aborted communicator") : void(),
     --record().windows)

// Named after its CTA limit and its number among those of the same limit, which is its lane.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int,
                                    ncclConfig_t* config) {
  static std::deque<ncclComm> all;  // as long as the program: a group may end after its case
  const std::string limit = cat(std::max(0, config->maxCTAs), ".");
  *comm = &all.emplace_back(ncclComm{cat(limit, record().count(limit))});
  record().host("a communicator is made");
  return ncclSuccess;
}

NCCL(ncclAllReduce,
     (const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t,
      ncclComm_t comm, cudaStream_t stream),
     add_brought(), collective("all_reduce", source, destination, count, count, type, comm, stream))
NCCL(ncclAllGather,
     (const void* source, void* destination, size_t count, ncclDataType_t type, ncclComm_t comm,
      cudaStream_t stream),
     gather_brought(),
     collective("all_gather", source, destination, count, world() * count, type, comm, stream))
NCCL(ncclReduceScatter,
     (const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t,
      ncclComm_t comm, cudaStream_t stream),
     collective("reduce_scatter", source, destination, world() * count, count, type, comm, stream))
NCCL(ncclSend,
     (const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
      cudaStream_t stream),
     message("send to", data, count, type, peer, comm, stream))
NCCL(ncclRecv,
     (void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
      cudaStream_t stream),
     message("receive from", data, count, type, peer, comm, stream))
NCCL(ncclGroupEnd, (), grouped = false,
     messages.empty() ? void() : record().operation(on, cat("messages ", by->name, messages)))

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  if (driver.full) return ncclUnhandledCudaError;
  record().host("memory is made");
  *pointer =
      record().allocate(cat("window", record().count("window") + 1), static_cast<int64_t>(bytes));
  return ncclSuccess;
}

int overlap::runtime::load_store_ranks(ncclComm_t) {
  return record().team;
}

bool overlap::runtime::is_symmetric(ncclWindow_t window) {
  return window != nullptr;
}

cudaError_t overlap::runtime::write_window_addresses(ncclWindow_t window, int first, int count,
                                                     char**, cudaStream_t) {
  std::vector<void*> found;
  for (int rank = first; rank < first + count; ++rank) {
    found.push_back(record().allocate(cat(at(window), "@", rank)));
  }
  record().brought.resize(found.size() * sizeof(void*));
  std::memcpy(record().brought.data(), found.data(), record().brought.size());
  return cudaSuccess;
}
