#include "runtime/device_state.h"

#include <map>
#include <memory>

#include "kernels/gemm/gemm.h"
#include "kernels/signal/signal.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

int highest_priority() {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  return greatest;
}

int lowest_priority() {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  return least;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// Unlike the handle it never comes back for another stream. A stream that is being captured is not
// asked: its handle is enough, as it lives as long as the capture.
unsigned long long stream_id(cudaStream_t stream, bool captured) {
  if (captured) return reinterpret_cast<unsigned long long>(stream);
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

}  // namespace

Event::Event(unsigned int flags) {
  check_cuda(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void Event::record(cudaStream_t stream) {
  check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
}

void Event::block(cudaStream_t stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

double elapsed_us(const Event& begin, const Event& end) {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
  return milliseconds * 1e3;
}

Stream::Stream(int priority) {
  check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
             "cudaStreamCreateWithPriority");
}

Stream::~Stream() {
  cudaStreamDestroy(stream_);
}

std::optional<unsigned long long> capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr),
             "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) return std::nullopt;
  return id;
}

DeviceState::DeviceState(int device)
    : side{Stream(highest_priority()), Stream(highest_priority()), Stream(highest_priority()),
           Stream(highest_priority())},
      copy(lowest_priority()),
      observer(highest_priority()),
      low_side{Stream(lowest_priority()), Stream(lowest_priority()), Stream(lowest_priority()),
               Stream(lowest_priority())},
      device_(device),
      sm_count_(attribute(cudaDevAttrMultiProcessorCount, device)),
      arch_(attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
            attribute(cudaDevAttrComputeCapabilityMinor, device)),
      clock_khz_(attribute(cudaDevAttrClockRate, device)) {
  check_cuda(kernels::load_kernels(), "loading the GEMM kernels");
  check_cuda(kernels::device_counters(&counters_), "finding the counters");
}

DeviceState& DeviceState::current() {
  static std::mutex mutex;
  static auto* states = new std::map<int, std::unique_ptr<DeviceState>>();
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<DeviceState>& state = (*states)[device];
  if (state == nullptr) state.reset(new DeviceState(device));
  return *state;
}

void DeviceState::check_closed() const {
  if (!open) return;
  throw Error(
      "overlap_torch: an op was called inside `with overlap_torch.produce(...)` or `consume(...)`, "
      "or in an attention's kernel, on the same device; launch the job's kernel there, and call "
      "ops before or after it");
}

void DeviceState::chain(cudaStream_t stream, std::optional<unsigned long long> capture) {
  const Last& last = last_of(capture);
  if (!last.exists || last.capture != capture ||
      last.stream == stream_id(stream, capture.has_value())) {
    return;
  }
  last.event.block(stream);
}

void DeviceState::chained(cudaStream_t stream, std::optional<unsigned long long> capture) {
  Last& last = last_of(capture);
  last.event.record(stream);
  last.capture = capture;
  last.stream = stream_id(stream, capture.has_value());
  last.exists = true;
}

int32_t* DeviceState::zeroed_counters(int32_t count, cudaStream_t stream) {
  if (counters_taken_ + count > kernels::kDeviceCounters) {
    check_cuda(kernels::zero_counters(counters_, kernels::kDeviceCounters, stream),
               "zeroing counters");
    counters_taken_ = 0;
  }
  int32_t* const counters = counters_ + counters_taken_;
  counters_taken_ += count;
  return counters;
}

}  // namespace overlap::runtime
