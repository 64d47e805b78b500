// Calls over peers, shared by moe_peers_cuda.cc and moe_home_cuda.cc.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "binding/cuda/cuda_call.h"
#include "binding/ops/groups.h"
#include "runtime/copy_call.h"

namespace overlap::binding {

// A group, and what begins calls on the current stream.
class Exchange {
 public:
  Exchange(const at::Tensor& like, const std::string& name)
      : guard_(like.device()),
        stream_(at::cuda::getCurrentCUDAStream()),
        group_(cuda_group(find_group(name), like.device().index(), stream_)) {}

  // `alike`, `more`: numbers that every rank's call has.
  runtime::CopyCall begin(int64_t bytes, std::initializer_list<int64_t> alike,
                          at::IntArrayRef more = {}) const {
    uint64_t hash = 0;
    const auto mix = [&](int64_t number) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    };
    for (const int64_t number : alike) mix(number);
    for (const int64_t number : more) mix(number);
    return runtime::CopyCall(*group_, stream_, bytes, 0, hash);
  }

  template <class Params>
  void set_slots(Params& params, const runtime::CopyCall& call) const {
    for (int rank = 0; rank < ranks(); ++rank) params.slots[rank] = call.slot(rank);
  }

  int ranks() const { return group_->world_size(); }
  int rank() const { return group_->rank(); }
  cudaStream_t stream() const { return stream_; }
  runtime::Group& group() const { return *group_; }

 private:
  const c10::cuda::CUDAGuard guard_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<runtime::Group> group_;
};

inline int64_t row_bytes(const at::Tensor& rows) {
  return rows.size(1) * rows.element_size();
}

// The first of the numbers that all ranks' calls share.
enum Kind : int64_t { kDispatch, kSpread, kCombine };

inline at::Tensor empty_longs(const at::Tensor& like, int64_t count) {
  return at::empty({count}, like.options().dtype(at::kLong));
}

}  // namespace overlap::binding
