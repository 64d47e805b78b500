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
    if (!overlapped(plan_) && plan_.kernel != plan::Kernel::kLibrary) {
      if (!all_reduces_) make_output();
      gemms_.push_back(operands_of(0));
      made_ = empty({plan_.problem.m, plan_.problem.n}, options());
      gemms_[0].output = made_.data_ptr();
      read_whole_tiles();
      variant.compute = steps::kernel_if(kernel_takes(gemms_[0], call_.weight(), plan_));
    } else if (overlapped(plan_)) {
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
    if (buffer == steps::Buffer::kProduct && made_.defined()) return made_.data_ptr();
    if (buffer == steps::Buffer::kInput && whole_tiles_.defined()) return whole_tiles_.data_ptr();
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

  // Few rows, with any others after them: rows that TMA fills with zeros come slower than rows that are loaded.
  void read_whole_tiles() {
    const int64_t rows = plan_.problem.m;
    if (rows >= plan_.tile_m || !plan::is_sm90(plan_.kernel)) return;
    whole_tiles_ = empty({plan_.tile_m, plan_.problem.k}, input_.options());
    whole_tiles_.narrow(0, 0, rows).copy_(input_);
    gemms_[0].input = whole_tiles_.data_ptr();
    gemms_[0].input_stride = plan_.problem.k;
    gemms_[0].input_rows = plan_.tile_m;
  }

  void make_output() {
    const int64_t rows = plan_.problem.m / plan::op_row_parts(plan_.problem);
    outputs_.push_back(empty({rows, plan_.problem.n}, options()));
  }

  // Operands as the kernel will have them: not every one adds a source, or stores in two places.
  kernels::GemmParams probe() const {
    kernels::GemmParams gemm = gemms_[0];
    gemm.output = outputs_[0].data_ptr();
    const bool ring = plan_.collective == plan::Collective::kRing ||
                      plan_.collective == plan::Collective::kOwners;
    if (ring || direct_) gemm.peers.emplace();
    return gemm;
  }

  const bool all_reduces_;
  const bool direct_;
  at::Tensor whole_tiles_;  // the input, where it has fewer rows than a tile
  at::Tensor made_;         // the product, by library() or by the plan's kernel before an exchange
};

// Operands as this package's kernels take them: all ranks' GEMMs must be theirs.
OpCall fitting(const OpCall& call) {
  constexpr int64_t kAccess = 16;
  const auto fits = [](const at::Tensor& matrix, int64_t along) {
    const int64_t element = matrix.element_size();
    return (matrix.stride(along) == 1 || matrix.size(along) == 1) &&
           matrix.stride(1 - along) >= matrix.size(along) &&
           matrix.stride(1 - along) * element % kAccess == 0 &&
           reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAccess == 0;
  };
  OpCall fitted = call;
  if (!fits(call.input, 1)) fitted.input = aligned(call.input);
  if (call.weights.empty()) return fitted;
  at::Tensor& weight = fitted.weights.front();
  if (!fits(weight, 1) && (call.scales || !fits(weight, 0))) weight = aligned(weight);
  return fitted;
}

at::Tensor run(const OpCall& call) {
  const CudaCall cuda(call);
  if (call.problem.invariance == plan::Invariance::kNone) return Reduction(call, cuda).run();
  if (!plan::is_batch_invariant(cuda.plan())) return invariant_composition(call);
  const OpCall fitted = fitting(call);
  return Reduction(fitted, cuda).run();
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
