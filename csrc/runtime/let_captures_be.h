// Calls of a thread that others' captures must not notice.
#pragma once

#include <cuda_runtime_api.h>

namespace overlap::runtime {

// While it lives, this thread's calls may come between another's capture, or its own: none of them is part of it.
class LetCapturesBe {
 public:
  LetCapturesBe() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~LetCapturesBe() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  LetCapturesBe(const LetCapturesBe&) = delete;
  LetCapturesBe& operator=(const LetCapturesBe&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace overlap::runtime
