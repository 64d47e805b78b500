// NCCL as far as csrc/runtime calls it: writes down what is enqueued. In the set-up of a group all ranks bring the
// same.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "record.h"

using recorder::at;
using recorder::cat;
using recorder::driver;
using recorder::record;

struct ncclComm {
  std::string name;
  bool aborted = false;
};

namespace {

constexpr double kLatencyUs = 9.0;
constexpr double kLinkGbps = 260.0;

// All cases are of bfloat16; the set-up of a group brings float32 and bytes, too.
int64_t bytes_of(size_t count, ncclDataType_t type) {
  const bool wide = type == ncclFloat32, narrow = type == ncclInt8;
  if (!wide && !narrow && type != ncclBfloat16) {
    record().violation(cat("NCCL's type ", static_cast<int>(type)));
  }
  return static_cast<int64_t>(count) * (wide ? 4 : narrow ? 1 : 2);
}

// One collective: `sent` and `received` elements on each rank.
ncclResult_t collective(const char* kind, const void* source, void* destination, size_t sent,
                        size_t received, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream) {
  if (comm->aborted) record().violation(cat(kind, " on an aborted communicator"));
  const int64_t from = bytes_of(sent, type);
  const int64_t to = bytes_of(received, type);
  record().now_us += kLatencyUs + static_cast<double>(std::max(from, to)) / (kLinkGbps * 1e3);
  record().operation(stream, cat(kind, " ", comm->name, " ", at(source, from), " -> ",
                                 at(destination, to), ", ", std::min(from, to), " bytes"));
  return ncclSuccess;
}

struct Messages {
  std::string text;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};
bool grouped = false;
Messages messages;  // of the group

ncclResult_t message(const char* verb, const void* data, size_t count, ncclDataType_t type,
                     int peer, ncclComm_t comm, cudaStream_t stream) {
  if (!grouped) record().violation(cat(verb, " outside of a group"));
  if (!messages.text.empty() && (comm != messages.comm || stream != messages.stream)) {
    record().violation(cat(verb, " beside messages of another communicator or stream"));
  }
  messages.comm = comm;
  messages.stream = stream;
  const int64_t bytes = bytes_of(count, type);
  messages.text += cat("; ", verb, " ", peer, " ", bytes, " bytes, ", at(data, bytes));
  return ncclSuccess;
}

}  // namespace

// A function that succeeds, and what it does.
#define FAKE(function, parameters, ...) \
  ncclResult_t function parameters {    \
    __VA_ARGS__;                        \
    return ncclSuccess;                 \
  }

FAKE(ncclGetUniqueId, (ncclUniqueId * id), std::memset(id, 0, sizeof(*id)))
FAKE(ncclGetVersion, (int* version), *version = NCCL_VERSION_CODE)
FAKE(ncclMemFree, (void*), record().free())
FAKE(ncclCommAbort, (ncclComm_t comm), comm->aborted = true, ++driver().aborted)
FAKE(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t* result),
     *result = record().nccl_failed ? ncclRemoteError : ncclSuccess)

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t*) {
  static std::deque<ncclComm> all;  // as long as the program: a group may end after its case
  *comm = &all.emplace_back(ncclComm{record().communicator});
  record().host(cat("makes the communicator ", (*comm)->name));
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) {
  return "the fake refuses";
}

const char* ncclGetLastError(ncclComm_t) {
  return "";
}

ncclResult_t ncclAllReduce(const void* source, void* destination, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  const auto found = record().contents.find(destination);
  if (type == ncclFloat32 && found != record().contents.end()) {
    std::vector<uint8_t>& bytes = found->second;
    for (size_t i = 0; i + sizeof(float) <= std::min(bytes.size(), 4 * count); i += sizeof(float)) {
      float value = 0.0f;
      std::memcpy(&value, bytes.data() + i, sizeof(value));
      value *= static_cast<float>(record().world);
      std::memcpy(bytes.data() + i, &value, sizeof(value));
    }
  }
  return collective("all_reduce", source, destination, count, count, type, comm, stream);
}

ncclResult_t ncclAllGather(const void* source, void* destination, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto world = static_cast<size_t>(record().world);
  const auto found = record().contents.find(destination);
  const auto bytes = static_cast<size_t>(bytes_of(count, type));
  if (found != record().contents.end() && found->second.size() >= world * bytes) {
    uint8_t* const all = found->second.data();
    const uint8_t* const own = all + bytes * static_cast<size_t>(record().rank);
    for (size_t rank = 0; rank < world; ++rank) std::memmove(all + rank * bytes, own, bytes);
  }
  return collective("all_gather", source, destination, count, world * count, type, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* source, void* destination, size_t count,
                               ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
  const size_t all = static_cast<size_t>(record().world) * count;
  return collective("reduce_scatter", source, destination, all, count, type, comm, stream);
}

ncclResult_t ncclGroupStart() {
  if (grouped) record().violation("a group in a group");
  grouped = true;
  messages = {};
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return message("send to", data, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return message("receive from", data, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupEnd() {
  grouped = false;
  if (messages.text.empty()) return ncclSuccess;
  record().operation(messages.stream, cat("messages ", messages.comm->name, messages.text));
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  if (driver().full) return ncclUnhandledCudaError;
  const int before = record().count("window");
  const std::string name = before == 0 ? "window" : cat("window", before + 1);
  record().host(cat("allocates ", name));
  *pointer = record().allocate(name, static_cast<int64_t>(bytes));
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t, void* pointer, size_t bytes, ncclWindow_t* window,
                                    int) {
  record().host(cat("registers ", at(pointer, static_cast<int64_t>(bytes))));
  *window = reinterpret_cast<ncclWindow_t>(pointer);
  return ncclSuccess;
}
