#include "runtime/window_addresses.h"

#include <nccl_device.h>

// A weak symbol: this library loads beside an NCCL that lacks it.
extern "C" __attribute__((weak)) ncclTeam_t ncclTeamLsa(ncclComm_t);

namespace overlap::runtime {
namespace {

constexpr int kPatches = 100;  // of one release, by NCCL's version numbers

__global__ void window_addresses_kernel(ncclWindow_t window, int first, int count,
                                        char** addresses) {
  const int place = static_cast<int>(threadIdx.x);
  if (place < count) {
    addresses[place] = static_cast<char*>(ncclGetPeerPointer(window, 0, first + place));
  }
}

}  // namespace

int load_store_ranks(ncclComm_t comm) {
  ncclTeam_t (*const team_of)(ncclComm_t) = &ncclTeamLsa;
  int version = 0;
  if (team_of == nullptr || ncclGetVersion(&version) != ncclSuccess ||
      version / kPatches != NCCL_VERSION_CODE / kPatches) {
    return 0;
  }
  return team_of(comm).nRanks;
}

bool is_symmetric(ncclWindow_t window) {
  cudaPointerAttributes attributes = {};
  const bool known =
      window != nullptr && cudaPointerGetAttributes(&attributes, window) == cudaSuccess;
  return known && attributes.type == cudaMemoryTypeDevice;
}

cudaError_t write_window_addresses(ncclWindow_t window, int first, int count, char** addresses,
                                   cudaStream_t stream) {
  window_addresses_kernel<<<1, count, 0, stream>>>(window, first, count, addresses);
  return cudaGetLastError();
}

}  // namespace overlap::runtime
