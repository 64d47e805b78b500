// Failed CUDA and NCCL calls become exceptions that say which call failed and why.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <stdexcept>
#include <string>

namespace overlap::runtime {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory of each other that the ranks cannot have; all of them know.
class PeerMemoryError : public Error {
 public:
  using Error::Error;
};

inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw Error(std::string("overlap_torch: ") + what + " failed: " + cudaGetErrorName(result) +
              ": " + cudaGetErrorString(result));
}

inline void check_nccl(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  throw Error(std::string("overlap_torch: ") + what + " failed: " + ncclGetErrorString(result));
}

}  // namespace overlap::runtime
