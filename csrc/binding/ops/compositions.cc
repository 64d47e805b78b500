// The unfused compositions.
#include <c10/util/accumulate.h>

#include <algorithm>

#include "binding/ops/op_call.h"
#include "cpu/collectives.h"

namespace overlap::binding {

at::Tensor local_gemm(const OpCall& call, const at::Tensor& rows, const at::Tensor& scales,
                      size_t weight, bool with_bias) {
  const at::Tensor& matrix = call.weights[weight];
  const auto bias = with_bias ? call.biases[weight] : std::nullopt;
  if (call.scales) return scaled_product(*call.scales, weight, rows, scales, matrix, bias);
  return bias.has_value() ? at::addmm(*bias, rows, matrix.t()) : at::mm(rows, matrix.t());
}

namespace {

// Each row by a GEMM of 128 rows, however many there are: the framework's choice of a kernel follows from their number,
// from strides and, on CPU, from addresses.
at::Tensor gemm_by_blocks(const OpCall& call, int64_t rows) {
  constexpr int64_t kBlock = 128;
  constexpr uintptr_t kAlignment = 64;
  constexpr int64_t kSteps = 64;  // along K
  const auto alike = [](const at::Tensor& matrix) {
    const at::Tensor dense = matrix.contiguous();
    const auto address = reinterpret_cast<uintptr_t>(dense.const_data_ptr());
    return address % kAlignment == 0 ? dense : dense.clone();
  };
  // With zeros after its rows and columns.
  const auto padded = [](const at::Tensor& matrix, int64_t rows, int64_t columns) {
    const int64_t height = matrix.size(0);
    const int64_t width = matrix.size(1);
    at::Tensor wide = at::empty({rows, columns}, matrix.options());
    wide.narrow(0, 0, height).narrow(1, 0, width).copy_(matrix);
    if (height < rows) wide.narrow(0, height, rows - height).zero_();
    if (width < columns) wide.narrow(1, width, columns - width).zero_();
    return wide;
  };
  // Some CPUs' GEMMs of 16 bits read past a row's end, and multiply what is there, NaN too, by zero.
  const at::Tensor& weight = call.weight();
  const int64_t k = weight.size(1);
  const bool pads = call.input.is_cpu() && !call.scales;
  const int64_t width = pads ? (k + kSteps - 1) / kSteps * kSteps : k;
  OpCall by_block = call;
  by_block.weights.front() = width > k ? padded(weight, weight.size(0), width) : alike(weight);
  const bool scales_of_rows = call.scales && call.scales->recipe != plan::Recipe::kTensor;
  at::Tensor output = at::empty({rows, call.problem.n}, call.output_options());
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    const int64_t count = std::min(kBlock, rows - begin);
    at::Tensor scales = call.scales ? call.scales->of_rows(begin, count) : at::Tensor();
    if (scales_of_rows) scales = padded(scales, kBlock, scales.size(1));
    const at::Tensor input = padded(call.input.narrow(0, begin, count), kBlock, width);
    const at::Tensor product = local_gemm(by_block, input, scales, 0, false);
    output.narrow(0, begin, count).copy_(product.narrow(0, 0, count));
  }
  return output;
}

// The sum of 1, 2, 4 or 8 terms: pairs, pairs of pairs and so on, each sum rounded to their type.
at::Tensor sum_by_pairs(std::vector<at::Tensor> terms) {
  for (; terms.size() > 1; terms.resize(terms.size() / 2)) {
    for (size_t i = 0; 2 * i < terms.size(); ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
  }
  return terms.front();
}

// Each row as Invariance asks for it.
at::Tensor invariant_product(const OpCall& call, int64_t rows) {
  const int64_t groups = plan::k_groups(call.problem);
  if (const auto product = kernel_product(call, rows)) return *product;
  if (groups == 0 || call.problem.k == 0) return gemm_by_blocks(call, rows);
  const int64_t k = call.problem.k / groups;
  std::vector<at::Tensor> products;
  for (int64_t group = 0; group < groups; ++group) {
    OpCall of_group = call;
    of_group.input = call.input.narrow(1, group * k, k);
    of_group.weights.front() = call.weight().narrow(1, group * k, k);
    products.push_back(gemm_by_blocks(of_group, rows));
  }
  return sum_by_pairs(std::move(products));
}

}  // namespace

at::Tensor local_gemm(const OpCall& call, int64_t count, bool with_bias) {
  if (call.problem.invariance != plan::Invariance::kNone) {
    at::Tensor output = invariant_product(call, count);
    if (with_bias && call.bias().has_value()) output.add_(*call.bias());
    return output;
  }
  return local_gemm(call, call.input.narrow(0, 0, count),
                    call.scales ? call.scales->of_rows(0, count) : at::Tensor(), 0, with_bias);
}

at::Tensor local_gemm(const OpCall& call, bool with_bias) {
  if (call.weights.empty()) return call.input.clone(at::MemoryFormat::Contiguous);
  return local_gemm(call, call.input.size(0), with_bias);
}

// Every rank's scales of its rows, in rank order.
at::Tensor gathered_scales(const OpCall& call) {
  const at::Tensor& own = call.scales->input;
  const int64_t ranks = call.scales->shared_input ? 1 : call.group->world_size();
  if (ranks == 1) return own.clone(at::MemoryFormat::Contiguous);
  at::Tensor all = at::empty({ranks * own.size(0), own.size(1)}, own.options());
  if (all.numel() > 0) cpu::all_gather(*call.group, all, own.contiguous(), 0).wait();
  return all;
}

namespace {

// [ranks * rows, columns] of terms -> [rows, columns], by the kernels' additions.
at::Tensor sum_in_order(const at::Tensor& terms, int64_t ranks) {
  const at::ScalarType type = terms.scalar_type();
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t rows = terms.size(0) / ranks;
  // With 0, terms of -0 would become 0.
  at::Tensor sum = at::full({rows, terms.size(1)}, -0.0, terms.options().dtype(wide));
  for (int64_t rank = 0; rank < ranks; ++rank) sum.add_(terms.narrow(0, rank * rows, rows));
  return sum.to(type);
}

}  // namespace

at::Tensor invariant_composition(const OpCall& call) {
  const int64_t ranks = call.problem.world_size;
  at::Tensor output = local_gemm(call, false);
  if (ranks > 1) {
    const bool all_reduces = call.problem.traits().all_reduces();
    const at::Tensor terms = all_reduces ? output : parts_of_blocks(call, output);
    const int64_t rows = terms.size(0);
    at::Tensor all =
        at::empty({all_reduces ? ranks * rows : rows, call.problem.n}, terms.options());
    if (all_reduces) {
      cpu::all_gather(*call.group, all, terms, 0).wait();
    } else {
      const std::vector<int64_t> parts(static_cast<size_t>(ranks), rows / ranks);
      cpu::all_to_all(*call.group, all, terms, parts, parts, 0).wait();
    }
    output = plan::adds_by_pairs(call.problem) ? sum_by_pairs(all.chunk(ranks))
                                               : sum_in_order(all, ranks);
  }
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

at::Tensor gemm_allreduce_composition(const OpCall& call) {
  if (call.problem.invariance != plan::Invariance::kNone) return invariant_composition(call);
  at::Tensor output = local_gemm(call, false);
  cpu::all_reduce(*call.group, output, 0).wait();
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

at::Tensor gemm_reducescatter_composition(const OpCall& call) {
  if (call.problem.invariance != plan::Invariance::kNone) return invariant_composition(call);
  const at::Tensor partial = parts_of_blocks(call, local_gemm(call, false));
  at::Tensor output =
      at::empty({call.problem.m / call.problem.world_size, call.problem.n}, partial.options());
  cpu::reduce_scatter(*call.group, output, partial, 0).wait();
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

AllGatherGemmResult allgather_gemm_composition(const OpCall& call) {
  AllGatherGemmResult result;
  result.gathered = at::empty({call.problem.m, call.problem.k}, call.input.options());
  cpu::all_gather(*call.group, result.gathered, call.input.contiguous(), 0).wait();
  result.gathered = blocks_of_parts(call, result.gathered);
  if (call.scales) result.scales = gathered_scales(call);
  for (size_t i = 0; i < call.weights.size(); ++i) {
    result.outputs.push_back(local_gemm(call, result.gathered, result.scales, i, true));
  }
  return result;
}

at::Tensor gemm_alltoall_composition(const OpCall& call) {
  const at::Tensor rows = local_gemm(call, true);
  at::Tensor output =
      at::empty({c10::sum_integers(call.recv_rows), call.problem.n}, rows.options());
  cpu::all_to_all(*call.group, output, rows, call.recv_rows, call.send_rows, 0).wait();
  return output;
}

}  // namespace overlap::binding
