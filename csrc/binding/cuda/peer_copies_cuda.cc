// PeerCopies: a call of copy engines (runtime/copy_call.h) as Python's exchanges drive it.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "binding/cuda/cuda_call.h"
#include "binding/ops/groups.h"
#include "runtime/copy_call.h"

namespace overlap::binding {
namespace {

// Rows of numbers that Python has made once for all calls alike.
const int64_t* rows_of(const at::Tensor& numbers, int64_t columns) {
  TORCH_INTERNAL_ASSERT(numbers.is_cpu() && numbers.scalar_type() == at::kLong &&
                            numbers.is_contiguous() && numbers.size(-1) == columns,
                        "rows of ", columns, " numbers");
  return numbers.const_data_ptr<int64_t>();
}

class PeerCopies : public torch::CustomClassHolder {
 public:
  // `hash`: of what is called; ranks that call another thing are waited for in vain. The current stream is the caller's.
  PeerCopies(at::Device device, const std::string& group_name, int64_t slot_bytes, int64_t steps,
             int64_t hash)
      : device_(device), bytes_(slot_bytes), stream_(current()) {
    TORCH_CHECK_VALUE(steps >= 1 && steps <= static_cast<int64_t>(kernels::kPeerSteps),
                      "PeerCopies takes 1 to ", kernels::kPeerSteps, " steps, but got ", steps);
    const c10::cuda::CUDAGuard guard(device_);
    group_ = cuda_group(find_group(group_name), device.index(), stream_.stream());
    call_.emplace(*group_, stream_.stream(), slot_bytes, static_cast<int32_t>(steps),
                  static_cast<uint64_t>(hash));
  }

  // This rank's slot as numbers of this dtype, until the call has ended.
  at::Tensor slot(at::ScalarType dtype) const {
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    return at::from_blob(call_->slot(), {bytes_ / item}, at::TensorOptions(device_).dtype(dtype));
  }

  // Rectangles within this rank's memory, by one kernel on the current stream. A row of numbers: {base, from, its stride,
  // base, to, its stride, bytes of a row, rows}; base 0 is the slot, and base i the i-th of these addresses, from 1 on.
  void copy(const std::vector<int64_t>& bases, const at::Tensor& numbers) {
    constexpr int64_t kColumns = 8;
    const c10::cuda::CUDAGuard guard(device_);
    const int64_t* one = rows_of(numbers, kColumns);
    const auto slot = reinterpret_cast<int64_t>(open_call().slot());
    const auto base = [&](int64_t number) {
      return number == 0 ? slot : bases.at(static_cast<size_t>(number - 1));
    };
    std::vector<kernels::CopyRectangle> rectangles;
    for (int64_t i = 0; i < numbers.size(0); ++i, one += kColumns) {
      rectangles.push_back({reinterpret_cast<const void*>(base(one[0]) + one[1]),
                            reinterpret_cast<void*>(base(one[3]) + one[4]), one[2], one[5], one[6],
                            one[7]});
    }
    call_->copy(rectangles, current().stream());
  }

  // Rectangles for `steps` steps from `first` on, in order of steps; after those of a step it is announced to all peers.
  // They come after what the current stream has done so far. A row of numbers: {base, from, its stride, peer, offset in the
  // peer's slot, its stride, bytes of a row, rows, step, lane}; bases as above.
  void push(const std::vector<int64_t>& bases, const at::Tensor& numbers, int64_t first,
            int64_t steps) {
    constexpr int64_t kColumns = 10;
    const c10::cuda::CUDAGuard guard(device_);
    const int64_t* one = rows_of(numbers, kColumns);
    const int64_t* const end = one + numbers.numel();
    open_call().fork(current().stream());
    std::vector<runtime::Push> pushes;
    for (int64_t step = first; step < first + steps; ++step) {
      pushes.clear();
      for (; one != end && one[8] == step; one += kColumns) {
        const int64_t source = bases.at(static_cast<size_t>(one[0] - 1)) + one[1];
        pushes.push_back({.source = reinterpret_cast<const char*>(source),
                          .source_stride = one[2],
                          .peer = static_cast<int32_t>(one[3]),
                          .offset = one[4],
                          .stride = one[5],
                          .row_bytes = one[6],
                          .rows = one[7],
                          .lane = static_cast<int32_t>(one[9])});
      }
      call_->push(pushes, static_cast<int32_t>(step));
    }
    TORCH_INTERNAL_ASSERT(one == end, "pushes of other steps");
  }

  // The current stream waits for all peers' step.
  void await(int64_t step) {
    const c10::cuda::CUDAGuard guard(device_);
    open_call().await(static_cast<int32_t>(step), current().stream());
  }

  void end() {
    const c10::cuda::CUDAGuard guard(device_);
    open_call();
    TORCH_CHECK(current() == stream_,
                "overlap_torch: a call of copies ends on another stream than it was begun on: an "
                "attention's kernel leaves the current stream as it finds it");
    call_->end();
    call_.reset();
  }

  // Instead of end(), after a failure: the other ranks are told why.
  void abandon(const std::string& why) {
    if (!call_) return;
    const c10::cuda::CUDAGuard guard(device_);
    call_.reset();
    group_->abandon(why);
  }

 private:
  c10::cuda::CUDAStream current() const { return at::cuda::getCurrentCUDAStream(device_.index()); }
  runtime::CopyCall& open_call() {
    TORCH_CHECK(call_, "overlap_torch: this call of copies has ended");
    return *call_;
  }

  const at::Device device_;
  const int64_t bytes_;
  const c10::cuda::CUDAStream stream_;
  std::shared_ptr<runtime::Group> group_;
  std::optional<runtime::CopyCall> call_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(overlap, m) {
  m.class_<PeerCopies>("PeerCopies")
      .def(torch::init<at::Device, const std::string&, int64_t, int64_t, int64_t>())
      .def("slot", &PeerCopies::slot)
      .def("copy", &PeerCopies::copy)
      .def("push", &PeerCopies::push)
      .def("await_", &PeerCopies::await)
      .def("end", &PeerCopies::end)
      .def("abandon", &PeerCopies::abandon);
}

}  // namespace overlap::binding
