// The CUDA runtime as far as csrc/runtime calls it: writes down what is enqueued. Nothing runs; in the set-up of a
// group, copies to and from the host do what they say, and calls take the time of a link.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "record.h"

using recorder::cat;
using recorder::record;

namespace {

constexpr int kMultiprocessors = 132;
constexpr int kClockKhz = 1980000;

const char* direction(cudaMemcpyKind kind) {
  if (kind == cudaMemcpyHostToDevice) return "copy from the host";
  return kind == cudaMemcpyDeviceToHost ? "copy to the host" : "copy";
}

void copy_now(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  auto& contents = record().contents;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* data = static_cast<const uint8_t*>(source);
    contents[destination].assign(data, data + bytes);
  } else if (kind == cudaMemcpyDeviceToHost) {
    std::memset(destination, 0, bytes);
    const auto found = contents.find(source);
    if (found == contents.end()) return;
    std::memcpy(destination, found->second.data(), std::min(bytes, found->second.size()));
  }
}

}  // namespace

#define OVERLAP_SUCCEEDS(function, ...) \
  cudaError_t function(__VA_ARGS__) {   \
    return cudaSuccess;                 \
  }
OVERLAP_SUCCEEDS(cudaEventDestroy, cudaEvent_t)
OVERLAP_SUCCEEDS(cudaStreamDestroy, cudaStream_t)
OVERLAP_SUCCEEDS(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*)
OVERLAP_SUCCEEDS(cudaIpcCloseMemHandle, void*)
OVERLAP_SUCCEEDS(cudaGetLastError)
#undef OVERLAP_SUCCEEDS

cudaError_t cudaGetDevice(int* device) {
  *device = record().device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
  recorder::driver().enter();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? kMultiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrClockRate              ? kClockKhz
                                                            : 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  *event = record().new_event((flags & cudaEventDisableTiming) == 0);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record().mark(event, stream);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  record().wait(stream, event);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) {
  recorder::driver().enter();
  record().host("asks for an event");
  return recorder::driver().ends ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  record().host("waits for an event");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (!record().event(begin).recorded || !record().event(end).recorded) {
    return cudaErrorInvalidResourceHandle;
  }
  *milliseconds = static_cast<float>((record().event(end).us - record().event(begin).us) * 1e-3);
  return cudaSuccess;
}

// DeviceState makes four side streams, then these, and at last four in place of the first, of low priority; a group over
// peers one to read what they tell about failures.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  const int index = record().count("stream");
  const std::string name = index < 4    ? cat("side", index)
                           : index == 4 ? "copy"
                           : index == 5 ? "observer"
                           : index < 10 ? cat("low_side", index - 6)
                                        : "failures";
  const bool low = index == 4 || index > 5;
  if ((priority == 0) != low) {
    record().violation(cat(name, " has the priority ", priority, ", and kernels of others wait"));
  }
  *stream = record().new_stream(name);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  record().synchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  record().synchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *id = record().stream(stream).capture;
  *status = *id != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// No driver: nothing that is recorded asks it.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = nullptr;
  return cudaErrorNotSupported;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *free = *all = size_t{1} << 36;
  return cudaSuccess;
}

// The ranks map these of each other: their flags first, then slots, and larger ones in their place.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const int generation = record().count("peer memory");
  const std::string name = generation == 0   ? "flags"
                           : generation == 1 ? "slots"
                                             : cat("slots", generation);
  record().host(cat("allocates ", bytes, " bytes, ", name));
  record().next_peer = 0;
  *pointer = record().allocate(cat(name, "@", record().rank), static_cast<int64_t>(bytes));
  return cudaSuccess;
}

cudaError_t cudaFree(void*) {
  record().host("frees memory");
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  *pointer = record().allocate("scratch", static_cast<int64_t>(bytes));
  record().host(cat("allocates ", bytes, " bytes on ", record().stream(stream).name));
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  record().host(cat("frees ", record().at(pointer), " on ", record().stream(stream).name));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int) {
  *pointer = std::calloc(1, bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  record().operation(stream, cat("set ", bytes, " bytes at ",
                                 record().at(pointer, static_cast<int64_t>(bytes)), " to ", value));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  record().host(cat(direction(kind), ", ", bytes, " bytes, and waits"));
  copy_now(destination, source, bytes, kind);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  recorder::driver().enter();
  if (!record().on) return cudaSuccess;
  const auto size = static_cast<int64_t>(bytes);
  if (kind != cudaMemcpyDeviceToDevice) {
    record().operation(stream, cat(direction(kind), ", ", bytes, " bytes"));
    copy_now(destination, source, bytes, kind);
    return cudaSuccess;
  }
  record().now_us += static_cast<double>(bytes) / (record().peer_gbps * 1e3);
  record().operation(stream, cat("copy ", record().at(source, size), " -> ",
                                 record().at(destination, size), ", ", bytes, " bytes"));
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_stride, const void* source,
                              size_t source_stride, size_t width, size_t height, cudaMemcpyKind,
                              cudaStream_t stream) {
  if (!record().on) return cudaSuccess;
  const auto last = static_cast<int64_t>(height) - 1;
  const auto bytes = static_cast<int64_t>(width);
  const auto from = record().at(source, last * static_cast<int64_t>(source_stride) + bytes);
  const auto to = record().at(destination, last * static_cast<int64_t>(destination_stride) + bytes);
  record().operation(stream, cat("copy ", height, " rows of ", width, " bytes, ", from, " by ",
                                 source_stride, " -> ", to, " by ", destination_stride));
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &pointer, sizeof(pointer));
  return cudaSuccess;
}

// The peers' handles are copies of the own one, in the ranks' order.
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned int) {
  if (record().peer_gbps == 0.0) return cudaErrorPeerAccessUnsupported;
  void* own = nullptr;
  std::memcpy(&own, &handle, sizeof(own));
  int& peer = record().next_peer;
  if (peer == record().rank) ++peer;
  const std::string name = record().at(own);
  constexpr int64_t kRoom = int64_t{1} << 38;
  *pointer = record().allocate(cat(name.substr(0, name.find('@')), "@", peer++), kRoom);
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorOfTheFake";
}

const char* cudaGetErrorString(cudaError_t) {
  return "the fake refuses";
}
