#include "runtime/striped_memory.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>

namespace overlap::runtime {
namespace {

constexpr int kPatienceS = 20;

// A call of the system's, again if a signal (a profiler's) interrupts it.
template <typename Ask>
ssize_t again(Ask ask) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kPatienceS);
  while (true) {
    const ssize_t result = ask();
    if (result >= 0 || errno != EINTR || std::chrono::steady_clock::now() >= end) return result;
  }
}

// The driver is not linked: a machine without one imports this library, too.
struct Driver {
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 to_descriptor = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 from_descriptor = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve = nullptr;
  PFN_cuMemAddressFree_v10020 free = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  bool complete = true;

  Driver() {
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemExportToShareableHandle", to_descriptor);
    find("cuMemImportFromShareableHandle", from_descriptor);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
  }

 private:
  template <typename Function>
  void find(const char* name, Function& function) {
    constexpr unsigned int kSinceCuda12 = 12000;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &address, kSinceCuda12, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    function = reinterpret_cast<Function>(usable ? address : nullptr);
    complete = complete && function != nullptr;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

std::string failed(const char* what, CUresult result) {
  return result == CUDA_SUCCESS ? ""
                                : std::string(what) + " gave the error " + std::to_string(result);
}
std::string failed(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// A socket of datagrams with a name that no file has. Closed with this object.
class Socket {
 public:
  Socket() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    std::random_device random;
    name_ = "overlap_torch-" + std::to_string(random()) + "-" + std::to_string(random());
    const timeval patience = {kPatienceS, 0};
    const auto [address, length] = address_of(name_);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    works_ = socket_ >= 0 && ::bind(socket_, generic, length) == 0 &&
             ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) == 0 &&
             ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) == 0;
  }
  ~Socket() {
    if (socket_ >= 0) ::close(socket_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int get() const { return socket_; }
  bool works() const { return works_; }
  const std::string& name() const { return name_; }

  static std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // after a zero: in no folder
    const size_t length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
    return {address, static_cast<socklen_t>(length)};
  }

 private:
  int socket_ = -1;
  bool works_ = false;
  std::string name_;
};

// A message with descriptors.
struct Envelope {
  // A rank's own rows, and all ranks' in a page that it shares.
  static constexpr size_t kMost = StripedMemory::kTurns * (2 + plan::kMaxPeers);

  int32_t rank = 0;
  iovec data = {&rank, sizeof(rank)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMost * sizeof(int))] = {};
  msghdr header = {};

  explicit Envelope(size_t descriptors = kMost) {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
  }
};

int64_t page_of(int64_t byte) {
  return byte / plan::kStripePage;
}

}  // namespace

std::unique_ptr<StripedMemory> StripedMemory::make(const ByteAllGather& all_gather, int rank,
                                                   int world_size, int64_t part_bytes,
                                                   std::string* why) {
  std::unique_ptr<StripedMemory> memory(new StripedMemory(rank, world_size, part_bytes));
  const std::string fault = memory->map(all_gather);
  memory->release();
  // Memory that some ranks cannot map is used by none.
  std::array<char, 160> own = {};
  fault.copy(own.data(), own.size() - 1);
  const auto all = all_gather_values(all_gather, own);
  for (size_t of = 0; of < all.size(); ++of) {
    const std::string text = all[of].data();
    if (text.empty()) continue;
    if (memory != nullptr && why != nullptr) *why = "on rank " + std::to_string(of) + " " + text;
    memory.reset();
  }
  return memory;
}

// Every rank takes part in the all-gather, whatever went wrong before.
std::string StripedMemory::map(const ByteAllGather& all_gather) {
  struct Offer {
    std::array<char, 40> host;
    char name[64];
    int32_t works;
  };
  const Socket socket;
  std::string fault = socket.works() ? create() : failed("a socket of the host");
  Offer own = {host_id(), {}, fault.empty()};
  socket.name().copy(own.name, sizeof(own.name) - 1);
  std::vector<std::string> names;
  for (const Offer& offer : all_gather_values(all_gather, own)) {
    if (offer.works == 0) return fault;  // and says so itself
    if (offer.host != own.host)
      return "memory is on another host than that of rank " + std::to_string(names.size());
    names.emplace_back(offer.name);
  }
  fault = exchange(socket.get(), names);
  for (int turn = 0; turn < kTurns && fault.empty(); ++turn) fault = map_turn(turn);
  return fault;
}

size_t StripedMemory::matrix_bytes() const {
  return static_cast<size_t>(plan::pages_of(world_size_ * part_bytes_) * plan::kStripePage);
}

size_t StripedMemory::terms_bytes() const {
  return static_cast<size_t>(world_size_ * plan::stripe_stride(part_bytes_));
}

size_t StripedMemory::bytes_of(const Piece& piece) const {
  const int64_t begin = piece.owner * part_bytes_;
  const int64_t end = begin + part_bytes_;
  const bool shares = begin % plan::kStripePage != 0;
  if (piece.shared) return shares ? plan::kStripePage : 0;
  const int64_t last = piece.owner + 1 == world_size_ ? plan::pages_of(end) : page_of(end);
  return static_cast<size_t>((last - page_of(begin) - (shares ? 1 : 0)) * plan::kStripePage);
}

int64_t StripedMemory::bytes() const {
  size_t bytes = 0;
  for (const bool shared : {true, false}) bytes += bytes_of({0, rank_, 0, shared});
  return kTurns * world_size_ * static_cast<int64_t>(bytes);
}

std::vector<StripedMemory::Piece> StripedMemory::mapped_by(int rank, int owner) const {
  std::vector<Piece> pieces;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int source = 0; source < world_size_; ++source) {
      for (const bool shared : {true, false}) {
        const Piece piece = {turn, owner, source, shared};
        const bool reads = rank == owner || (shared && rank + 1 == owner);
        if ((reads || rank == source) && bytes_of(piece) > 0) pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

// Own memory for each source.
std::string StripedMemory::create() {
  if (!driver().complete) return "the driver has no virtual memory management";
  if (cudaGetDevice(&device_) != cudaSuccess) return "there is no device";
  CUmemAllocationProp what = {};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.requestedHandleTypes = kDescriptor;
  what.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  for (const Piece& piece : mapped_by(rank_, rank_)) {
    const CUresult result = driver().create(&handles_[piece], bytes_of(piece), &what, 0);
    if (result != CUDA_SUCCESS) {
      handles_.erase(piece);
      return failed("making memory that other processes map", result);
    }
  }
  return "";
}

std::string StripedMemory::exchange(int socket, const std::vector<std::string>& names) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const std::string fault = send(socket, peer, names[static_cast<size_t>(peer)]);
    if (!fault.empty()) return fault;
  }
  for (int i = 0; i + 1 < world_size_; ++i) {
    const std::string fault = receive(socket);
    if (!fault.empty()) return fault;
  }
  return "";
}

// The memory here that the peer maps.
std::string StripedMemory::send(int socket, int peer, const std::string& name) const {
  std::vector<int> descriptors;
  std::string fault;
  for (const Piece& piece : mapped_by(peer, rank_)) {
    int descriptor = -1;
    fault = failed("a descriptor of memory",
                   driver().to_descriptor(&descriptor, handles_.at(piece), kDescriptor, 0));
    if (!fault.empty()) break;
    descriptors.push_back(descriptor);
  }
  auto [address, length] = Socket::address_of(name);
  const size_t bytes = descriptors.size() * sizeof(int);
  Envelope message(descriptors.size());
  message.rank = rank_;
  message.header.msg_name = &address;
  message.header.msg_namelen = length;
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(control), descriptors.data(), bytes);
  if (fault.empty() && again([&] { return ::sendmsg(socket, &message.header, 0); }) < 0) {
    fault = failed("a descriptor could not be sent to another process");
  }
  for (const int descriptor : descriptors) ::close(descriptor);
  return fault;
}

std::string StripedMemory::receive(int socket) {
  Envelope message;
  if (again([&] { return ::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC); }) < 0) {
    return failed("no descriptor came from another process");
  }
  const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  const bool known = message.rank >= 0 && message.rank < world_size_;
  const std::vector<Piece> pieces = known ? mapped_by(rank_, message.rank) : std::vector<Piece>{};
  std::vector<int> descriptors(pieces.size());
  const size_t bytes = descriptors.size() * sizeof(int);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS || !known ||
      control->cmsg_len != CMSG_LEN(bytes)) {
    return "a message without the descriptors came from another process";
  }
  std::memcpy(descriptors.data(), CMSG_DATA(control), bytes);
  std::string fault;
  for (size_t i = 0; i < pieces.size(); ++i) {
    Handle handle = 0;
    void* const descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(descriptors[i]));
    const CUresult result = driver().from_descriptor(&handle, descriptor, kDescriptor);
    if (result == CUDA_SUCCESS) handles_[pieces[i]] = handle;
    if (fault.empty()) fault = failed("another process's memory", result);
    ::close(descriptors[i]);
  }
  return fault;
}

std::string StripedMemory::map_turn(int turn) {
  const auto index = static_cast<size_t>(turn);
  CUdeviceptr& matrix = matrices_[index];
  CUdeviceptr& terms = terms_[index];
  std::string fault =
      failed("reserving addresses", driver().reserve(&matrix, matrix_bytes(), 0, 0, 0));
  if (fault.empty()) {
    fault = failed("reserving addresses", driver().reserve(&terms, terms_bytes(), 0, 0, 0));
  }
  CUdeviceptr at = matrix;
  for (int owner = 0; owner < world_size_ && fault.empty(); ++owner) {
    for (const bool shared : {true, false}) {
      if (fault.empty()) fault = map_piece({turn, owner, rank_, shared}, at);
    }
  }
  for (int source = 0; source < world_size_ && fault.empty(); ++source) {
    at = terms + static_cast<size_t>(source * plan::stripe_stride(part_bytes_));
    for (const bool shared : {true, false}) {
      if (fault.empty()) fault = map_piece({turn, rank_, source, shared}, at);
    }
    if (fault.empty() && rank_ + 1 < world_size_) {
      fault = map_piece({turn, rank_ + 1, source, true}, at);
    }
  }
  return fault;
}

// Maps a piece, and goes on after it.
std::string StripedMemory::map_piece(const Piece& piece, CUdeviceptr& at) {
  const size_t bytes = bytes_of(piece);
  if (bytes == 0) return "";
  const CUresult result = driver().map(at, bytes, 0, handles_.at(piece), 0);
  if (result != CUDA_SUCCESS) return failed("mapping memory", result);
  mapped_.push_back({at, bytes});
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const std::string fault = failed("access to memory", driver().set_access(at, bytes, &access, 1));
  at += bytes;
  return fault;
}

// Mappings stay without their handles.
void StripedMemory::release() {
  for (const auto& [piece, handle] : handles_) driver().release(handle);
  handles_.clear();
}

StripedMemory::~StripedMemory() {
  if (leaked_) return;
  for (const Mapped& one : mapped_) driver().unmap(one.at, one.bytes);
  for (const CUdeviceptr matrix : matrices_) {
    if (matrix != 0) driver().free(matrix, matrix_bytes());
  }
  for (const CUdeviceptr terms : terms_) {
    if (terms != 0) driver().free(terms, terms_bytes());
  }
}

}  // namespace overlap::runtime
