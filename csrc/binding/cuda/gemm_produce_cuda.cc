// gemm_allreduce and gemm_reducescatter on CUDA.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda/cuda_operands.h"
#include "kernels/gemm/few_rows.h"
#include "plan/templates.h"

namespace overlap::binding {
namespace {

// Fewer rows than a tile's, with any others after them, as the GEMM then reads them: rows that TMA fills with zeros come
// slower than rows that are loaded.
at::Tensor whole_tile(const at::Tensor& input, int64_t tile_m, kernels::GemmParams& gemm) {
  const int64_t k = input.size(1);
  const at::Tensor tile = empty({tile_m, k}, input.options());
  tile.narrow(0, 0, input.size(0)).copy_(input);
  gemm.input = tile.data_ptr();
  gemm.input_stride = k;
  gemm.input_rows = tile_m;
  return tile;
}

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

  // True if the plan's kernel computes: a build may hold it for other types only.
  bool computes() const {
    if (call_.weights.empty()) return true;
    kernels::GemmParams gemm = operands_of(0);
    if (overlapped(plan_)) gemm.peers.emplace();
    return kernel_takes(gemm, call_.weight(), plan_);
  }

  at::Tensor run() {
    const bool adds_bias = direct_ || overlapped(plan_);  // its steps do
    at::Tensor bias;
    if (call_.bias().has_value() && adds_bias) {
      bias = direct_ ? aligned(*call_.bias()) : call_.bias()->contiguous();
    }
    steps::Variant variant = {
        .compute = steps::Compute::kLibrary,
        .bias = bias.defined(),
        .captured = plan_.resources.window && captured(),
        .finish = call_.finish != nullptr && !plan::adds_by_pairs(plan_.problem)};
    const bool in_groups = plan::k_groups(plan_.problem) > 0;  // whose product is library()'s
    if (!overlapped(plan_) && plan_.kernel != plan::Kernel::kLibrary && !in_groups) {
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
      if (call_.weights.empty()) {
        made_ = plan::adds_by_pairs(plan_.problem) ? input_.clone() : input_;  // the sum's place
      } else if (plan::k_groups(plan_.problem) > 0) {
        OpCall ordered = call_;
        ordered.input = input_;
        made_ = *kernel_product(ordered, input_.size(0));
      } else {
        made_ = product(input_, scales_of({0, input_.size(0)}), 0, false);
      }
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

  void read_whole_tiles() {
    const int64_t rows = plan_.problem.m;
    if (rows >= plan_.tile_m || !plan::can(plan_.kernel, plan::kCopiesBeside)) return;
    whole_tiles_ = whole_tile(input_, plan_.tile_m, gemms_[0]);
  }

  void make_output() {
    const int64_t rows = plan_.problem.m / plan::op_row_parts(plan_.problem);
    outputs_.push_back(empty({rows, plan_.problem.n}, options()));
  }

  // Operands as the kernel will have them: not every one adds a source, or stores in two places.
  kernels::GemmParams probe() const {
    kernels::GemmParams gemm = gemms_[0];
    gemm.output = outputs_[0].data_ptr();
    if (plan::has(plan_.collective, plan::kFlagsTiles) || direct_) gemm.peers.emplace();
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
  if (!plan::is_invariant(cuda.plan())) return invariant_composition(call);
  const OpCall fitted = fitting(call);
  Reduction reduction(fitted, cuda);
  return reduction.computes() ? reduction.run() : invariant_composition(call);
}

bool without_gaps(const at::Tensor& weight) {
  return weight.is_contiguous() || weight.t().is_contiguous();
}

// The product of rows that make one tile, where every SM has a part of K.
void multiply_few_rows(const kernels::GemmParams& gemm, const at::TensorOptions& options) {
  kernels::FewRowsParams few;
  few.dtype = gemm.dtype;
  few.m = gemm.m;
  few.n = gemm.n;
  few.groups = gemm.groups.count;
  few.k = gemm.k / few.groups;
  few.input = gemm.input;
  few.input_stride = gemm.input_stride;
  few.weight = gemm.weight;
  few.weight_k_contiguous = gemm.weight_k_contiguous;
  const at::Tensor rows = empty({few.m, gemm.k}, options);
  const at::Tensor ends = empty({few.groups}, options.dtype(at::kInt));
  at::Tensor products;
  if (few.groups > 1) products = empty({few.groups, few.m, few.n}, options);
  few.rows = rows.data_ptr();
  few.ends = ends.data_ptr<int32_t>();
  few.products = products.defined() ? products.data_ptr() : gemm.output;
  few.output = gemm.output;
  few.ctas = gemm.ctas;
  C10_CUDA_CHECK(kernels::launch_few_rows(few, at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace

std::optional<at::Tensor> kernel_product(const OpCall& call, int64_t rows) {
  constexpr plan::Kernel kKernel =
      plan::first_kernel([](const plan::KernelTraits& one) { return one.can(plan::kAddsGroups); });
  const at::Device device = call.input.device();
  const bool in_groups = plan::k_groups(call.problem) > 0;
  const bool takes =
      in_groups ? plan::kernel_takes_groups(call.problem) : !call.scales && call.problem.k > 0;
  if (!device.is_cuda() || !takes || !has_kernels(device)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor output = empty({rows, call.problem.n}, call.output_options());
  if (rows == 0) return output;
  OpCall own = call;
  own.input = call.input.narrow(0, 0, rows);
  own = fitting(own);

  plan::Problem problem = call.problem;
  problem.op = plan::Op::kGemmAllReduce;  // all rows are one part
  problem.m = rows;
  const plan::Plan plan = plan::base_plan(problem, kKernel, plan::Transport::kNccl, {});
  kernels::GemmParams gemm = gemm_params(own.input, own.weight(), plan);
  gemm.output = output.data_ptr();
  gemm.order = plan::chunked_order(plan, problem.n, {plan::tiles_m(plan)});
  gemm.ctas = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  if (!kernel_takes(gemm, own.weight(), plan)) return std::nullopt;  // a GPU or a build without it
  if (in_groups && rows <= kernels::kMostFewRows && without_gaps(own.weight())) {
    multiply_few_rows(gemm, own.input.options());
    return output;
  }
  at::Tensor tile;
  if (rows < plan.tile_m) tile = whole_tile(own.input, plan.tile_m, gemm);
  const at::Tensor memory = group_memory(gemm, own.input.options());
  if (memory.defined()) gemm.groups.memory = memory.data_ptr();
  C10_CUDA_CHECK(kernels::launch_gemm(kKernel, gemm, at::cuda::getCurrentCUDAStream().stream()));
  return output;
}

at::Tensor gemm_allreduce_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_allreduce_composition(call) : run(call);
}

at::Tensor gemm_reducescatter_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_reducescatter_composition(call) : run(call);
}

}  // namespace overlap::binding
