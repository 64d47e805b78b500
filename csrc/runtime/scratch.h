// Device memory for the length of a scope.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "runtime/error.h"

namespace overlap::runtime {

// Stream-ordered: cudaFree would wait for the whole device, where a
// foreign collective may be waiting for a peer that waits for this rank.
class Scratch {
 public:
  Scratch(size_t bytes, cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&pointer_, bytes, stream), "cudaMallocAsync");
  }
  ~Scratch() { cudaFreeAsync(pointer_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace overlap::runtime
