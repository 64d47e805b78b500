// The process group's own collectives and messages, on contiguous tensors of any device, within the group's deadline. A
// failure says who could not communicate which chunk.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace overlap::cpu {

// A process group, as what communicates sees it.
class Group {
 public:
  // Throws if it no longer exists.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> lock() const = 0;
  virtual const std::string& name() const = 0;
  virtual int rank() const = 0;
  virtual std::chrono::milliseconds timeout(at::DeviceType device) const = 0;
  // Returns when it is known that all ranks make this call; throws if they do not.
  virtual void agree() const = 0;
  // Throws the message, or ends the process with it.
  [[noreturn]] virtual void fail(const std::string& message) const = 0;

 protected:
  ~Group() = default;
};

// A collective in flight. It keeps its tensors alive until it ends; after wait() they hold the result.
class Communication {
 public:
  // `start(group, timeout)` begins it, once all ranks agree about the call. `peer`: of a message; else -1.
  template <typename Start>
  Communication(const Group& group, at::DeviceType device, const char* what, int peer, int chunk,
                const Start& start)
      : group_(&group), what_(what), peer_(peer), chunk_(chunk), timeout_(group.timeout(device)) {
    group.agree();
    const auto existing = group.lock();
    begin_ = std::chrono::steady_clock::now();
    try {
      work_ = start(*existing, timeout_);
    } catch (const std::exception& error) {
      fail(error);
    }
  }

  void wait();

 private:
  void fail(const std::exception& error) const;

  const Group* group_;
  const char* what_;
  int peer_;
  int chunk_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point begin_;
  c10::intrusive_ptr<c10d::Work> work_;
};

Communication all_reduce(const Group& group, const at::Tensor& tensor, int chunk);

// input [world * rows, ...] -> output [rows, ...].
Communication reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input,
                             int chunk);

// input [rows, ...] -> output [world * rows, ...].
Communication all_gather(const Group& group, const at::Tensor& output, const at::Tensor& input,
                         int chunk);

// input [sum of send_rows, ...] -> output [sum of recv_rows, ...], both in rank order.
Communication all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input,
                         std::vector<int64_t> recv_rows, std::vector<int64_t> send_rows, int chunk);

// Point to point: message `chunk` of those from one rank to another, which are received in the order of their numbers.
Communication send(const Group& group, const at::Tensor& tensor, int to, int chunk);
Communication receive(const Group& group, const at::Tensor& tensor, int from, int chunk);

}  // namespace overlap::cpu
