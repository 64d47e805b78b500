#include "binding/collectives.h"

#include <exception>

namespace overlap::binding {
namespace {

// `start` begins the collective on the process group with the options that it is handed.
template <typename Options, typename Start>
void within_deadline(const GroupEntry& group, at::DeviceType device, const char* what, int chunk,
                     const Start& start) {
  Options options;
  options.timeout = group.timeout(device);
  try {
    start(*group.lock(), options)->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "overlap_torch: group '", group.name(), "', rank ", group.rank(), ": the ",
                what, " of chunk ", chunk, " failed, or did not end within ",
                options.timeout.count() / 1000.0,
                " s. A rank died, hangs, or made a different call. (", error.what(), ")");
  }
}

}  // namespace

void all_reduce(const GroupEntry& group, const at::Tensor& tensor, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  within_deadline<c10d::AllreduceOptions>(
      group, tensor.device().type(), "all-reduce", chunk,
      [&](c10d::ProcessGroup& all, auto& options) { return all.allreduce(tensors, options); });
}

void reduce_scatter(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                    int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  within_deadline<c10d::ReduceScatterOptions>(group, input.device().type(), "reduce-scatter", chunk,
                                              [&](c10d::ProcessGroup& all, auto& options) {
                                                return all._reduce_scatter_base(to, from, options);
                                              });
}

void all_gather(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  within_deadline<c10d::AllgatherOptions>(group, input.device().type(), "all-gather", chunk,
                                          [&](c10d::ProcessGroup& all, auto& options) {
                                            return all._allgather_base(to, from, options);
                                          });
}

void all_to_all(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                std::vector<int64_t> recv_rows, std::vector<int64_t> send_rows, int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  within_deadline<c10d::AllToAllOptions>(group, input.device().type(), "all-to-all", chunk,
                                         [&](c10d::ProcessGroup& all, auto& options) {
                                           return all.alltoall_base(to, from, recv_rows, send_rows,
                                                                    options);
                                         });
}

}  // namespace overlap::binding
