#include "bindings.h"

#include "record.h"

namespace recorder {
namespace {

namespace kernels = overlap::kernels;
namespace plan = overlap::plan;
namespace runtime = overlap::runtime;
namespace steps = overlap::steps;
using steps::Buffer;

const void* nobodys(Buffer buffer) {
  record().violation(cat("a step names the ", steps::name(buffer), ", which the call has not"));
  return nullptr;
}

// The framework's GEMM takes rows of operands: where they lie must be what the step says.
void expect(bool holds, const char* what) {
  if (!holds) record().violation(cat("a step of the framework's GEMM has another ", what));
}

}  // namespace

Bindings bindings_of(const runtime::ProduceCall& call) {
  Bindings made = {.plan = call.plan, .stream = call.stream, .delay_us = call.delay_us};
  made.base = [&call](Buffer buffer, int32_t) -> const void* {
    switch (buffer) {
      case Buffer::kInput:
        return call.gemm.input;
      case Buffer::kOutput:
        return call.output;
      case Buffer::kStaging:
        return call.buffer;
      case Buffer::kProduct:
      case Buffer::kPartial:
        return call.library_rows;
      default:
        return nobodys(buffer);
    }
  };
  made.gemm = [&call](int32_t) -> const kernels::GemmParams& { return call.gemm; };
  made.library = [&call](const steps::LibraryGemm& step, const void*, const void* adds,
                         void* output) -> void* {
    const plan::Plan& plan = *call.plan;
    const int64_t row_bytes = plan.problem.k * plan::element_bytes(plan.problem.dtype);
    expect(step.input == steps::Where{Buffer::kInput, step.rows.begin * row_bytes}, "input");
    if (plan.collective == plan::Collective::kDirect) {
      expect(step.rows.begin == 0 && step.rows.end == plan.problem.m, "number of rows");
      expect(step.output.where == steps::Where{Buffer::kProduct}, "output");
      return call.library_product();
    }
    if (plan.collective == plan::Collective::kRing) {
      call.library_phase(step.rows, adds, output);
    } else {
      call.library_gemm(step.rows, output);
    }
    return nullptr;
  };
  made.makes_product = call.plan->collective == plan::Collective::kDirect;
  made.counters = call.counters;
  made.bias = call.bias;
  return made;
}

Bindings bindings_of(const runtime::ConsumeCall& call) {
  Bindings made = {.plan = call.plan, .stream = call.stream, .delay_us = call.delay_us};
  made.base = [&call](Buffer buffer, int32_t index) -> const void* {
    switch (buffer) {
      case Buffer::kInput:
        return call.input;
      case Buffer::kOutput:
        return call.gemms.at(static_cast<size_t>(index)).params.output;
      case Buffer::kGathered:
        return call.gathered;
      case Buffer::kStaging:
        return call.buffer;
      default:
        return nobodys(buffer);
    }
  };
  made.gemm = [&call](int32_t weight) -> const kernels::GemmParams& {
    return call.gemms.at(static_cast<size_t>(weight)).params;
  };
  made.library = [&call](const steps::LibraryGemm& step, const void* input, const void*,
                         void*) -> void* {
    const auto weight = static_cast<size_t>(step.weight);
    const int64_t element = plan::element_bytes(call.plan->problem.dtype);
    const int64_t offset = step.rows.begin * call.gemms.at(weight).params.n * element;
    expect(step.output.where == steps::Where{Buffer::kOutput, offset, step.weight}, "output");
    call.library_gemm(weight, input, step.rows);
    return nullptr;
  };
  return made;
}

Bindings bindings_of(const runtime::AllToAllCall& call) {
  Bindings made = {.plan = call.plan, .stream = call.stream, .delay_us = call.delay_us};
  made.base = [&call, product = static_cast<void*>(nullptr)](Buffer buffer,
                                                             int32_t) mutable -> const void* {
    switch (buffer) {
      case Buffer::kInput:
        return call.gemm.input;
      case Buffer::kOutput:
        return call.output;
      case Buffer::kProduct:
        if (product == nullptr) product = call.product();
        return product;
      default:
        return nobodys(buffer);
    }
  };
  made.gemm = [&call](int32_t) -> const kernels::GemmParams& { return call.gemm; };
  made.library = [&call](const steps::LibraryGemm& step, const void*, const void*,
                         void* output) -> void* {
    const plan::Problem& problem = call.plan->problem;
    const int64_t row_bytes = problem.k * plan::element_bytes(problem.dtype);
    expect(step.input == steps::Where{Buffer::kInput, step.rows.begin * row_bytes}, "input");
    call.library_gemm(step.rows, output);
    return nullptr;
  };
  return made;
}

Bindings bindings_of(const runtime::SequentialCall& call) {
  Bindings made = {.plan = call.plan, .stream = call.stream};
  made.base = [&call](Buffer buffer, int32_t) -> const void* {
    switch (buffer) {
      case Buffer::kInput:
        return call.input;
      case Buffer::kGathered:
      case Buffer::kOutput:
        return call.output;
      default:
        return nobodys(buffer);
    }
  };
  made.library = [&call](const steps::LibraryGemm& step, const void*, const void*, void*) -> void* {
    const bool gathers = call.plan->problem.op == plan::Op::kAllGatherGemm;
    expect(step.rows.begin == 0 && step.rows.end == call.plan->problem.m, "number of rows");
    expect(step.input == steps::Where{gathers ? Buffer::kGathered : Buffer::kInput}, "input");
    expect(step.output.where == steps::Where{gathers ? Buffer::kOutput : Buffer::kProduct},
           "output");
    expect((step.weight == steps::LibraryGemm::kAllWeights) == gathers, "weight");
    return call.gemm();
  };
  made.makes_product = true;
  return made;
}

}  // namespace recorder
