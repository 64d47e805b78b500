// gemm_allreduce and gemm_reducescatter on CUDA.
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda/cuda_operands.h"

namespace overlap::binding {
namespace {

class Reduction : public CudaOperands {
 public:
  Reduction(const OpCall& call, const CudaCall& cuda)
      : CudaOperands(call, cuda,
                     call.weights.empty()      ? aligned(call.input)
                     : overlapped(cuda.plan()) ? k_contiguous(call.input)
                                               : call.input),
        all_reduces_(plan_.problem.traits().all_reduces()),
        direct_(plan_.collective == plan::Collective::kDirect) {
    makes_product_ = direct_ || !overlapped(plan_);
    if (reads_blocks()) {
      blocks_ = call.blocks;
    } else {
      order_parts();
    }
  }

  at::Tensor run() {
    const bool adds_bias = direct_ || overlapped(plan_);  // its steps do
    at::Tensor bias;
    if (call_.bias().has_value() && adds_bias) {
      bias = direct_ ? aligned(*call_.bias()) : call_.bias()->contiguous();
    }
    steps::Variant variant = {.compute = steps::Compute::kLibrary,
                              .bias = bias.defined(),
                              .captured = plan_.resources.window && captured(),
                              .finish = call_.finish != nullptr};
    if (overlapped(plan_)) {
      make_output();
      gemms_.push_back(operands_of(0));
      variant.compute = steps::kernel_if(kernel_takes(probe(), call_.weight(), plan_));
      if (direct_ && variant.compute == steps::Compute::kLibrary)
        order_parts();  // the framework's product is of all rows
    } else if (direct_ && !all_reduces_) {
      make_output();
    }
    const bool finished = CudaOperands::run(variant, bias);
    // The product of an all-reduce by the framework's GEMM becomes the output.
    const at::Tensor output = outputs_.empty() ? made_ : outputs_[0];
    if (finished) call_.finish->sum = output.data_ptr();
    if (call_.bias().has_value() && !adds_bias) output.add_(*call_.bias());
    return output;
  }

  void* base(steps::Buffer buffer, int32_t index) override {
    // A sequence's is made after the GEMM, which is on its way.
    if (buffer == steps::Buffer::kOutput && outputs_.empty()) make_output();
    return CudaOperands::base(buffer, index);
  }

  void* library(const steps::LibraryGemm& step, const void*, const void* adds,
                void* output) override {
    if (makes_product_) {
      made_ = call_.weights.empty() ? input_
                                    : product(input_, scales_of({0, input_.size(0)}), 0, false);
      return made_.data_ptr();
    }
    const int64_t count = step.rows.end - step.rows.begin;
    if (blocks_ > 1) {
      multiply_blocks(step.rows, 0, false, input_,
                      matrix_at(output, count, plan_.problem.n, options()));
    } else {
      multiply(rows(step.rows), scales_of(step.rows), 0, false, output);
    }
    if (adds == nullptr) return nullptr;
    at::Tensor place = at::from_blob(output, {count, plan_.problem.n}, options());
    place.add_(at::from_blob(const_cast<void*>(adds), {count, plan_.problem.n}, options()));
    return nullptr;
  }

 private:
  // True if the steps take rows in the order of the call's blocks: chunks of a part by a kernel whose tiles fit, or by the
  // framework; and NCCL's collective of each block.
  bool reads_blocks() const {
    if (plan::has_program(plan_)) return false;
    if (!overlapped(plan_)) return !direct_;
    const bool computes_chunks = plan_.kernel == plan::Kernel::kLibrary && !direct_;
    return plan_.layout == plan::Layout::kRowMajor && (computes_chunks || tiles_fit(call_, plan_));
  }

  void order_parts() {
    blocks_ = 1;
    input_ = parts_of_blocks(call_, input_);
    if (!gemms_.empty()) gemms_[0] = operands_of(0);
  }

  void make_output() {
    const int64_t rows = plan_.problem.m / plan::op_row_parts(plan_.problem);
    outputs_.push_back(empty({rows, plan_.problem.n}, options()));
  }

  // Operands as the kernel will have them: not every one adds a source, or stores in two places.
  kernels::GemmParams probe() const {
    kernels::GemmParams gemm = gemms_[0];
    gemm.output = outputs_[0].data_ptr();
    if (plan_.collective == plan::Collective::kRing || direct_) gemm.peers.emplace();
    return gemm;
  }

  const bool all_reduces_;
  const bool direct_;
  at::Tensor made_;  // the product, by library()
};

at::Tensor run(const OpCall& call) {
  const CudaCall cuda(call);
  return Reduction(call, cuda).run();
}

}  // namespace

at::Tensor gemm_allreduce_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_allreduce_composition(call) : run(call);
}

at::Tensor gemm_reducescatter_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_reducescatter_composition(call) : run(call);
}

}  // namespace overlap::binding
