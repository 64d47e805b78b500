// NCCL as far as csrc/runtime calls it: writes down what is enqueued. In the set-up of a group all ranks bring the
// same.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "driver.h"
#include "record.h"

using recorder::cat;
using recorder::record;

struct ncclComm {
  explicit ncclComm(std::string own_name) : name(std::move(own_name)) {}
  std::string name;
  bool aborted = false;
};

namespace {

struct Format {
  const char* name;
  int64_t bytes;
};

Format format_of(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return {"bfloat16", 2};
    case ncclFloat16:
      return {"float16", 2};
    case ncclFloat32:
      return {"float32", 4};
    case ncclFloat64:
      return {"float64", 8};
    case ncclInt8:
      return {"bytes", 1};
    default:
      record().violation(cat("NCCL's type ", static_cast<int>(type)));
      return {"?", 1};
  }
}

// One collective: `sent` and `received` elements on each rank.
ncclResult_t collective(const char* kind, const void* source, void* destination, size_t sent,
                        size_t received, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream) {
  if (!record().on) return ncclSuccess;
  if (comm->aborted) record().violation(cat(kind, " on an aborted communicator"));
  const Format format = format_of(type);
  const auto source_bytes = static_cast<int64_t>(sent) * format.bytes;
  const auto destination_bytes = static_cast<int64_t>(received) * format.bytes;
  const int64_t most = std::max(source_bytes, destination_bytes);
  record().now_us +=
      record().link_latency_us + static_cast<double>(most) / (record().link_gbps * 1e3);
  record().operation(stream, cat(kind, " ", comm->name, " ", record().at(source, source_bytes),
                                 " -> ", record().at(destination, destination_bytes), ", ",
                                 std::min(sent, received), " ", format.name));
  return ncclSuccess;
}

struct Message {
  const char* verb;
  std::string place;
  size_t bytes;
  int peer;
};
std::vector<Message> messages;
ncclComm_t messages_comm = nullptr;
cudaStream_t messages_stream = nullptr;
bool grouped = false;

ncclResult_t message(const char* verb, const void* data, size_t count, ncclDataType_t type,
                     int peer, ncclComm_t comm, cudaStream_t stream) {
  if (!record().on) return ncclSuccess;
  if (!grouped) record().violation(cat(verb, " outside of a group"));
  if (!messages.empty() && (comm != messages_comm || stream != messages_stream)) {
    record().violation(cat(verb, " beside messages of another communicator or stream"));
  }
  messages_comm = comm;
  messages_stream = stream;
  const size_t bytes = count * static_cast<size_t>(format_of(type).bytes);
  messages.push_back({verb, record().at(data, static_cast<int64_t>(bytes)), bytes, peer});
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId, int rank,
                                    ncclConfig_t* config) {
  static std::deque<ncclComm> all;  // as long as the program: a group may end after its case
  *comm = &all.emplace_back(record().communicator);
  record().host(cat("makes the communicator ", (*comm)->name, " as rank ", rank, " of ", ranks,
                    ", CTAs ", config->minCTAs, " to ", config->maxCTAs, ", clusters of ",
                    config->cgaClusterSize, ", blocking ", config->blocking));
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  ++recorder::driver().aborted;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = record().nccl_failed ? ncclRemoteError : ncclSuccess;
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
  const size_t bytes = count * static_cast<size_t>(format_of(type).bytes);
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
  const auto world = static_cast<size_t>(record().world);
  return collective("reduce_scatter", source, destination, world * count, count, type, comm,
                    stream);
}

ncclResult_t ncclGroupStart() {
  if (grouped) record().violation("a group in a group");
  grouped = true;
  messages.clear();
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return message("send", data, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return message("receive", data, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupEnd() {
  grouped = false;
  if (messages.empty()) return ncclSuccess;
  std::string text = cat("messages ", messages_comm->name);
  for (const Message& one : messages) {
    text += cat("; ", one.verb, " ", one.bytes, " bytes ", one.verb[0] == 's' ? "to " : "from ",
                one.peer, ", ", one.place);
  }
  record().operation(messages_stream, text);
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  if (recorder::driver().full) return ncclUnhandledCudaError;
  const int before = record().count("window");
  const std::string name = before == 0 ? "window" : cat("window", before + 1);
  record().host(cat("allocates ", bytes, " bytes, ", name));
  *pointer = record().allocate(name, static_cast<int64_t>(bytes));
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void*) {
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* pointer, size_t bytes,
                                    ncclWindow_t* window, int) {
  if (!record().windows) return ncclInvalidUsage;
  record().host(cat("registers ", record().at(pointer, static_cast<int64_t>(bytes)), ", ", bytes,
                    " bytes, with ", comm->name));
  *window = reinterpret_cast<ncclWindow_t>(pointer);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return ncclSuccess;
}
