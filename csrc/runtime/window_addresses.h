// The peers' addresses of a symmetric window, which only NCCL's device interface knows.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace overlap::runtime {

// Ranks in a row that load and store each other's windows, as NCCL sees it: this rank's team, as large as every other's.
// 0 where the NCCL in this process has no such teams, or is of another release than the one that this file was compiled
// with, whose windows are laid out in another way.
int load_store_ranks(ncclComm_t comm);

// True if kernels can read the window. Where NCCL has no window kernels it may give a handle of its own.
bool is_symmetric(ncclWindow_t window);

// Enqueues a kernel that writes the beginnings of the window in the memory of `count` ranks, from rank `first` on, all in
// this rank's team. The addresses lie in memory of the device, and hold for it.
cudaError_t write_window_addresses(ncclWindow_t window, int first, int count, char** addresses,
                                   cudaStream_t stream);

}  // namespace overlap::runtime
