// Helpers that the bindings of a mixture's kernels share.
#pragma once

#include <ATen/ATen.h>

#include "kernels/moe/moe.h"

namespace overlap::binding {

kernels::Element element_of(const at::Tensor& tensor);

// The type of sums and shares.
at::ScalarType wide_of(const at::Tensor& tensor);

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

}  // namespace overlap::binding
