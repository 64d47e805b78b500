#include "binding/collectives.h"

#include <exception>

#include "binding/environment.h"
#include "binding/torch_version.h"

namespace overlap::binding {
namespace {

// Tags of the messages, apart from those that users give theirs.
constexpr int kFirstTag = 1 << 24;

// Does `communicate`, whose calls take as long as `timeout` at most, if all ranks agree about the call.
template <typename Communicate>
void named(const GroupEntry& group, const std::string& what, int chunk,
           std::chrono::milliseconds timeout, const Communicate& communicate) {
  group.agree();
  const auto start = std::chrono::steady_clock::now();
  try {
    communicate();
  } catch (const std::exception& error) {
    const bool late = std::chrono::steady_clock::now() - start >= timeout;
    communication_failed(c10::str(
        "overlap_torch: group '", group.name(), "', rank ", group.rank(), ": the ", what,
        " of chunk ", chunk,
        late ? c10::str(" did not end within ", timeout.count() / 1000.0, " s") : " failed",
        ". A rank died, hangs, or made a different call. (", error.what(), ")"));
  }
}

// `start` begins the collective on the process group with the options that it is handed.
template <typename Options, typename Start>
void collective(const GroupEntry& group, at::DeviceType device, const char* what, int chunk,
                const Start& start) {
  Options options;
  options.timeout = group.timeout(device);
  named(group, what, chunk, options.timeout, [&] { start(*group.lock(), options)->wait(); });
}

}  // namespace

void all_reduce(const GroupEntry& group, const at::Tensor& tensor, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  collective<c10d::AllreduceOptions>(
      group, tensor.device().type(), "all-reduce", chunk,
      [&](c10d::ProcessGroup& all, auto& options) { return all.allreduce(tensors, options); });
}

void reduce_scatter(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                    int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  collective<c10d::ReduceScatterOptions>(group, input.device().type(), "reduce-scatter", chunk,
                                         [&](c10d::ProcessGroup& all, auto& options) {
                                           return reduce_scatter_single(all, to, from, options);
                                         });
}

void all_gather(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  collective<c10d::AllgatherOptions>(group, input.device().type(), "all-gather", chunk,
                                     [&](c10d::ProcessGroup& all, auto& options) {
                                       return all_gather_single(all, to, from, options);
                                     });
}

void all_to_all(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                std::vector<int64_t> recv_rows, std::vector<int64_t> send_rows, int chunk) {
  at::Tensor to = output;
  at::Tensor from = input;
  collective<c10d::AllToAllOptions>(group, input.device().type(), "all-to-all", chunk,
                                    [&](c10d::ProcessGroup& all, auto& options) {
                                      return all_to_all_single(all, to, from, recv_rows, send_rows,
                                                               options);
                                    });
}

void send(const GroupEntry& group, const at::Tensor& tensor, int to, int chunk) {
  std::vector<at::Tensor> tensors{tensor};
  const auto timeout = group.timeout(tensor.device().type());
  named(group, "send to rank " + std::to_string(to), chunk, timeout,
        [&] { group.lock()->send(tensors, to, kFirstTag + chunk)->wait(timeout); });
}

Receive::Receive(const GroupEntry& group, const at::Tensor& tensor, int from, int chunk)
    : group_(group), tensors_{tensor}, from_(from), chunk_(chunk) {
  named(group, "receive from rank " + std::to_string(from), chunk,
        group.timeout(tensor.device().type()),
        [&] { work_ = group.lock()->recv(tensors_, from, kFirstTag + chunk); });
}

void Receive::wait() {
  const auto timeout = group_.timeout(tensors_.front().device().type());
  named(group_, "receive from rank " + std::to_string(from_), chunk_, timeout,
        [&] { work_->wait(timeout); });
}

}  // namespace overlap::binding
