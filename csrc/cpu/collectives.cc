#include "cpu/collectives.h"

#include <c10/util/StringUtil.h>

#include "cpu/torch_version.h"

namespace overlap::cpu {
namespace {

// Tags of the messages, apart from those that users give theirs.
constexpr int kFirstTag = 1 << 24;

// `start` begins the collective on the process group with the options that it is handed.
template <typename Options, typename Start>
Communication collective(const Group& group, at::DeviceType device, const char* what, int chunk,
                         const Start& start) {
  return {group, device, what, -1, chunk, [&](c10d::ProcessGroup& all, auto timeout) {
            Options options;
            options.timeout = timeout;
            return start(all, options);
          }};
}

// A view of the bytes: gloo knows no fp8.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return c10::isFloat8Type(tensor.scalar_type()) ? tensor.view(at::kByte) : tensor;
}

}  // namespace

void Communication::wait() {
  try {
    if (peer_ < 0) {
      work_->wait();  // the options have the deadline
    } else {
      work_->wait(timeout_);
    }
  } catch (const std::exception& error) {
    fail(error);
  }
}

void Communication::fail(const std::exception& error) const {
  const bool late = std::chrono::steady_clock::now() - begin_ >= timeout_;
  group_->fail(
      c10::str("overlap_torch: group '", group_->name(), "', rank ", group_->rank(), ": the ",
               what_, peer_ < 0 ? std::string() : std::to_string(peer_), " of chunk ", chunk_,
               late ? c10::str(" did not end within ", timeout_.count() / 1000.0, " s") : " failed",
               ". A rank died, hangs, or made a different call. (", error.what(), ")"));
}

Communication all_reduce(const Group& group, const at::Tensor& tensor, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  return collective<c10d::AllreduceOptions>(
      group, tensor.device().type(), "all-reduce", chunk,
      [&](c10d::ProcessGroup& all, auto& options) { return all.allreduce(tensors, options); });
}

Communication reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input,
                             int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  return collective<c10d::ReduceScatterOptions>(group, input.device().type(), "reduce-scatter",
                                                chunk, [&](c10d::ProcessGroup& all, auto& options) {
                                                  return reduce_scatter_single(all, to, from,
                                                                               options);
                                                });
}

Communication all_gather(const Group& group, const at::Tensor& output, const at::Tensor& input,
                         int chunk) {
  at::Tensor to = as_bytes(output);
  at::Tensor from = as_bytes(input);
  return collective<c10d::AllgatherOptions>(group, input.device().type(), "all-gather", chunk,
                                            [&](c10d::ProcessGroup& all, auto& options) {
                                              return all_gather_single(all, to, from, options);
                                            });
}

Communication all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input,
                         std::vector<int64_t> recv_rows, std::vector<int64_t> send_rows,
                         int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  return collective<c10d::AllToAllOptions>(group, input.device().type(), "all-to-all", chunk,
                                           [&](c10d::ProcessGroup& all, auto& options) {
                                             return all_to_all_single(all, to, from, recv_rows,
                                                                      send_rows, options);
                                           });
}

Communication send(const Group& group, const at::Tensor& tensor, int to, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  return {group,
          tensor.device().type(),
          "send to rank ",
          to,
          chunk,
          [&](c10d::ProcessGroup& all, auto) { return all.send(tensors, to, kFirstTag + chunk); }};
}

Communication receive(const Group& group, const at::Tensor& tensor, int from, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  return {
      group,
      tensor.device().type(),
      "receive from rank ",
      from,
      chunk,
      [&](c10d::ProcessGroup& all, auto) { return all.recv(tensors, from, kFirstTag + chunk); }};
}

}  // namespace overlap::cpu
