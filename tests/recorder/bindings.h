// What a list of steps does not say of a call: where its memory is, and what the framework computes.
#pragma once

#include <functional>

#include "runtime/executor.h"
#include "steps/step.h"

namespace recorder {

struct Bindings {
  const overlap::plan::Plan* plan = nullptr;
  cudaStream_t stream = nullptr;
  int64_t delay_us = 0;
  // Where a buffer of the call begins.
  std::function<const void*(overlap::steps::Buffer buffer, int32_t index)> base = {};
  // The plan's kernel's operands of a weight.
  std::function<const overlap::kernels::GemmParams&(int32_t weight)> gemm = {};
  // Enqueues the framework's GEMM. Returns the product where the GEMM makes its memory, too; else null.
  std::function<void*(const overlap::steps::LibraryGemm& step, const void* input, const void* adds,
                      void* output)>
      library = {};
  bool makes_product = false;  // library does
  std::function<int32_t*()> counters = {};
  const void* bias = nullptr;
};

Bindings bindings_of(const overlap::runtime::ProduceCall& call);
Bindings bindings_of(const overlap::runtime::ConsumeCall& call);
Bindings bindings_of(const overlap::runtime::AllToAllCall& call);
Bindings bindings_of(const overlap::runtime::SequentialCall& call);

}  // namespace recorder
