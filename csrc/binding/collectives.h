// The process group's own collectives, on contiguous tensors, within the group's deadline. A
// failure says who could not communicate which chunk.
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

}  // namespace overlap::binding
