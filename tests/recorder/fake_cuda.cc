// The CUDA runtime as far as csrc/runtime calls it: writes down what is enqueued. Nothing runs; in the set-up of a
// group, copies to and from the host do what they say, and calls take the time of a link.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "record.h"

using recorder::at;
using recorder::cat;
using recorder::driver;
using recorder::record;

namespace {

constexpr double kCopyGbps = 365.0;  // between ranks

cudaError_t copy(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  auto& contents = record().contents;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* data = static_cast<const uint8_t*>(source);
    contents[destination].assign(data, data + bytes);
  } else if (kind == cudaMemcpyDeviceToHost) {
    std::memset(destination, 0, bytes);
    const auto found = contents.find(source);
    if (found == contents.end()) return cudaSuccess;
    std::memcpy(destination, found->second.data(), std::min(bytes, found->second.size()));
  }
  return cudaSuccess;
}

}  // namespace

// A function that succeeds, and what it does.
#define FAKE(function, parameters, ...) \
  cudaError_t function parameters {     \
    __VA_ARGS__;                        \
    return cudaSuccess;                 \
  }

FAKE(cudaEventDestroy, (cudaEvent_t))
FAKE(cudaStreamDestroy, (cudaStream_t))
FAKE(cudaThreadExchangeStreamCaptureMode, (cudaStreamCaptureMode*))
FAKE(cudaIpcCloseMemHandle, (void*))
FAKE(cudaGetLastError, ())
FAKE(cudaGetDevice, (int* device), *device = record().device)
FAKE(cudaSetDevice, (int), driver().enter())
FAKE(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), *least = 0, *greatest = -5)
FAKE(cudaMemGetInfo, (size_t* free, size_t* all), *free = *all = size_t{1} << 36)
FAKE(cudaHostAlloc, (void** pointer, size_t bytes, unsigned int), *pointer = std::calloc(1, bytes))
FAKE(cudaFreeHost, (void* pointer), std::free(pointer))
FAKE(cudaFree, (void*), record().free())
FAKE(cudaFreeAsync, (void* pointer, cudaStream_t), record().host(cat("frees ", at(pointer))))
FAKE(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), record().mark(event, stream))
FAKE(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned int),
     record().wait(stream, event))
FAKE(cudaEventSynchronize, (cudaEvent_t), record().host("waits for an event"))
FAKE(cudaStreamSynchronize, (cudaStream_t stream), record().synchronize(stream))
FAKE(cudaStreamQuery, (cudaStream_t stream), record().synchronize(stream))

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 132
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrClockRate              ? 1980000
                                                            : 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  *event = record().new_event((flags & cudaEventDisableTiming) == 0);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) {
  driver().enter();
  record().host("asks for an event");
  return driver().ends ? cudaSuccess : cudaErrorNotReady;
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

// The ranks map these of each other: their flags first, then slots, and larger ones in their place.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const int generation = record().count("peer memory");
  const std::string name = generation == 0   ? "flags"
                           : generation == 1 ? "slots"
                                             : cat("slots", generation);
  record().host(cat("allocates ", name));
  record().next_peer = 0;
  *pointer = record().allocate(cat(name, "@", record().rank), static_cast<int64_t>(bytes));
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  record().host("allocates scratch");
  *pointer = record().allocate("scratch", static_cast<int64_t>(bytes));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  const std::string place = at(pointer, static_cast<int64_t>(bytes));
  record().operation(stream, cat("set ", bytes, " bytes at ", place, " to ", value));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  record().host("copies, and waits");
  return copy(destination, source, bytes, kind);
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  driver().enter();
  if (!record().on) return cudaSuccess;
  if (kind != cudaMemcpyDeviceToDevice) {
    const char* const way = kind == cudaMemcpyHostToDevice ? "from" : "to";
    record().operation(stream, cat("copy ", way, " the host, ", bytes, " bytes"));
    return copy(destination, source, bytes, kind);
  }
  const auto size = static_cast<int64_t>(bytes);
  record().now_us += static_cast<double>(bytes) / (kCopyGbps * 1e3);
  record().operation(
      stream, cat("copy ", at(source, size), " -> ", at(destination, size), ", ", bytes, " bytes"));
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_stride, const void* source,
                              size_t source_stride, size_t width, size_t height, cudaMemcpyKind,
                              cudaStream_t stream) {
  const auto place = [&](const void* pointer, size_t stride) {
    return at(pointer, static_cast<int64_t>((height - 1) * stride + width));
  };
  record().operation(
      stream, cat("copy ", height, " rows of ", width, " bytes, ", place(source, source_stride),
                  " by ", source_stride, " -> ", place(destination, destination_stride), " by ",
                  destination_stride));
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &pointer, sizeof(pointer));
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
