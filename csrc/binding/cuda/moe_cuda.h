// Helpers that the bindings of a mixture's kernels share.
#pragma once

#include <ATen/ATen.h>

#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/moe.h"

namespace overlap::binding {

kernels::Element element_of(const at::Tensor& tensor);

// The type of sums and shares.
at::ScalarType wide_of(const at::Tensor& tensor);

// Contiguous, in the type of the rows' sums; undefined without.
at::Tensor wide_shares(const std::optional<at::Tensor>& shares, const at::Tensor& rows);

// Everything of a sum of contiguous rows but where each token's lie, and where the sums go.
kernels::SumParams sum_params(const at::Tensor& rows, int64_t tokens, int64_t choices);

// kernels::RoutesParams's outputs.
struct Routes {
  kernels::ExpertRanks experts;
  at::Tensor message;
  at::Tensor routes;
  at::Tensor slots;  // undefined without tokens, as is sent
  at::Tensor sent;
  at::Tensor begins;
};

// Ids are contiguous. `tokens`: whether slots and sent are wanted.
Routes find_routes(const at::Tensor& ids, at::IntArrayRef experts, bool tokens);

// The experts' product of contiguous rows [R, K] and weights [e, N, K], contiguous along K or N, still without an output; in a build
// for Hopper. Packed rows have fp8 weights [e, N, K], with float32 scales of their rows, [e, N], or of blocks (GroupedGemmParams).
kernels::GroupedGemmParams grouped_params(const at::Tensor& rows, const at::Tensor& weight,
                                          const at::Tensor& offs,
                                          const std::optional<at::Tensor>& scale = {});

// The options of products of these rows: bfloat16 if the rows are packed.
at::TensorOptions product_options(const at::Tensor& rows);

}  // namespace overlap::binding
