// The names that PyTorch 2.11 to 2.15 spell differently; overlap_torch/_torch_versions.py is the Python half.
//
// 2.14 has other names for collectives on single tensors, and deprecates those of 2.11. A group that is a Python class has
// no backends, and C++ reaches only its methods of lists, as PyTorch's functional collectives do.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <vector>

namespace overlap::cpu {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename Group>
WorkPtr all_gather_single(Group& group, at::Tensor& to, at::Tensor& from,
                          const c10d::AllgatherOptions& options) {
  if (!group.hasBackends()) {
    std::vector<at::Tensor> outputs{to};
    std::vector<at::Tensor> inputs{from};
    return group.allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  if constexpr (requires { group.all_gather_single(to, from, options); }) {
    return group.all_gather_single(to, from, options);
  } else {
    return group._allgather_base(to, from, options);
  }
}

template <typename Group>
WorkPtr reduce_scatter_single(Group& group, at::Tensor& to, at::Tensor& from,
                              const c10d::ReduceScatterOptions& options) {
  if (!group.hasBackends()) {
    std::vector<at::Tensor> outputs{to};
    std::vector<at::Tensor> inputs{from};
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  if constexpr (requires { group.reduce_scatter_single(to, from, options); }) {
    return group.reduce_scatter_single(to, from, options);
  } else {
    return group._reduce_scatter_base(to, from, options);
  }
}

template <typename Group>
WorkPtr all_to_all_single(Group& group, at::Tensor& to, at::Tensor& from,
                          std::vector<int64_t>& recv_rows, std::vector<int64_t>& send_rows,
                          const c10d::AllToAllOptions& options) {
  if constexpr (requires { group.all_to_all_single(to, from, recv_rows, send_rows, options); }) {
    return group.all_to_all_single(to, from, recv_rows, send_rows, options);
  } else {
    return group.alltoall_base(to, from, recv_rows, send_rows, options);
  }
}

}  // namespace overlap::cpu
