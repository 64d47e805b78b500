#include "binding/cuda/cuda_operands.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

namespace overlap::binding {

void* CudaOperands::base(steps::Buffer buffer, int32_t index) {
  using steps::Buffer;
  const auto pointer = [](const at::Tensor& tensor) {
    return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  };
  switch (buffer) {
    case Buffer::kInput:
      return pointer(input_);
    case Buffer::kOutput:
      return static_cast<size_t>(index) < outputs_.size()
                 ? pointer(outputs_[static_cast<size_t>(index)])
                 : nullptr;
    case Buffer::kGathered:
      return pointer(gathered_);
    case Buffer::kStaging:
      return pointer(staging_);
    case Buffer::kProduct:
      return pointer(product_);
    case Buffer::kPartial:
      return pointer(partial_);
    case Buffer::kIndices:
      return nullptr;  // no list of an op's has any
    case Buffer::kWindow:
    case Buffer::kStripes:
    case Buffer::kSlot:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "a ", steps::name(buffer), " is the group's, not a call's");
}

void CudaOperands::add(const steps::CopyRows& step, const void* source, void* destination,
                       cudaStream_t on) {
  add_rows(step, source, destination, on, options());
}

kernels::GemmParams CudaOperands::operands_of(size_t weight, const at::Tensor& gathered) const {
  kernels::GemmParams params = gemm_params(input_, call_.weights[weight], plan_);
  if (call_.scales)
    params.scales = gemm_scales(*call_.scales, weight, call_.weights[weight], plan_, gathered);
  return params;
}

at::Tensor CudaOperands::product(const at::Tensor& rows, const at::Tensor& scales, size_t weight,
                                 bool with_bias) const {
  if (call_.scales) return local_gemm(call_, rows, scales, weight, with_bias);
  return library_gemm(rows, call_.weights[weight], with_bias ? call_.biases[weight] : std::nullopt);
}

void CudaOperands::multiply(const at::Tensor& rows, const at::Tensor& scales, size_t weight,
                            bool with_bias, void* destination) const {
  const at::Tensor& matrix = call_.weights[weight];
  const auto bias = with_bias ? call_.biases[weight] : std::nullopt;
  if (!call_.scales) return library_gemm(rows, matrix, bias, destination);
  if (rows.size(0) == 0) return;
  at::Tensor place = matrix_at(destination, rows.size(0), matrix.size(0), options());
  scaled_product_out(place, *call_.scales, weight, rows, scales, matrix, bias);
}

void CudaOperands::multiply_blocks(plan::Rows range, size_t weight, bool with_bias,
                                   const at::Tensor& input, const at::Tensor& output) const {
  const auto bias = with_bias ? call_.biases[weight] : std::nullopt;
  const int64_t ranks = plan_.problem.world_size;
  const int64_t all_rows = plan_.problem.m;
  const int64_t block_rows = part_rows_ / blocks_;
  // Each time as many whole blocks as there are, or what lies in one.
  for (int64_t at = range.begin; at < range.end;) {
    const int64_t part = at / part_rows_;
    const int64_t block = at % part_rows_ / block_rows;
    const int64_t row = at % block_rows;
    const int64_t left = std::min(range.end, (part + 1) * part_rows_) - at;
    const int64_t whole = row == 0 ? left / block_rows : 0;
    const int64_t count = std::max<int64_t>(whole, 1);
    const int64_t rows = whole > 0 ? block_rows : std::min(left, block_rows - row);
    const auto view = [&](const at::Tensor& matrix) {
      const bool of_blocks = matrix.size(0) == all_rows;
      const int64_t first =
          of_blocks ? (block * ranks + part) * block_rows + row : at - range.begin;
      const int64_t distance = of_blocks ? ranks * block_rows : rows;
      return matrix.as_strided({count, rows, matrix.size(1)},
                               {distance * matrix.stride(0), matrix.stride(0), matrix.stride(1)},
                               matrix.storage_offset() + first * matrix.stride(0));
    };
    library_gemm_of_blocks(view(input), call_.weights[weight], bias, view(output));
    at += count * rows;
  }
}

void CudaOperands::name_chunk(int32_t chunk) {
  chunk_name_.reset();
  if (chunk >= 0) chunk_name_.emplace(chunk);
}

int32_t* CudaOperands::counters(int32_t count) {
  counters_ = empty({std::max(count, plan::kMaxChunks)}, options().dtype(at::kInt));
  return counters_.data_ptr<int32_t>();
}

bool CudaOperands::run(const steps::Variant& variant, const at::Tensor& bias) {
  runtime::Group& group = *cuda_.group;
  const auto list = cuda_.entry->lists.of(plan_, group.rank(), group.machine(), variant);
  for (const steps::Scratch& one : list->scratch) {
    const auto make = [&] { return empty({one.bytes}, options().dtype(at::kByte)); };
    if (one.buffer == steps::Buffer::kStaging) staging_ = make();
    if (one.buffer == steps::Buffer::kPartial) partial_ = make();
    if (one.buffer == steps::Buffer::kProduct && !makes_product_) product_ = make();
  }
  for (kernels::GemmParams& gemm : gemms_) {
    group_memory_ = group_memory(gemm, options());
    if (group_memory_.defined()) gemm.groups.memory = group_memory_.data_ptr();
  }
  runtime::run(group, {.plan = &plan_,
                       .list = list.get(),
                       .operands = this,
                       .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                       .finish = call_.finish,
                       .blocks = static_cast<int32_t>(blocks_),
                       .stream = cuda_.stream,
                       .trace = cuda_.trace(),
                       .delay_us = side_delay_us()});
  return list->finishes;
}

}  // namespace overlap::binding
