// The process group's own collectives and messages, on contiguous tensors, within the group's
// deadline. A failure says who could not communicate which chunk.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "binding/groups.h"

namespace overlap::binding {

void all_reduce(const GroupEntry& group, const at::Tensor& tensor, int chunk);

// input [world * rows, ...] -> output [rows, ...].
void reduce_scatter(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                    int chunk);

// input [rows, ...] -> output [world * rows, ...].
void all_gather(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                int chunk);

// input [sum of send_rows, ...] -> output [sum of recv_rows, ...], both in rank order.
void all_to_all(const GroupEntry& group, const at::Tensor& output, const at::Tensor& input,
                std::vector<int64_t> recv_rows, std::vector<int64_t> send_rows, int chunk);

// Point to point: chunk `chunk` of what goes from one rank to another. Returns when it has been
// received.
void send(const GroupEntry& group, const at::Tensor& tensor, int to, int chunk);

// A message that is under way. Posted when it is made; `tensor` holds it after wait().
class Receive {
 public:
  Receive(const GroupEntry& group, const at::Tensor& tensor, int from, int chunk);
  void wait();

 private:
  const GroupEntry& group_;
  std::vector<at::Tensor> tensors_;
  int from_;
  int chunk_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace overlap::binding
