// Where the buffers of a call on CPU are, as tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/run.h"

namespace overlap::cpu {

// The part of a tile that lies in the matrix.
struct Block {
  int64_t row = 0;
  int64_t column = 0;
  int64_t rows = 0;
  int64_t columns = 0;

  at::Tensor of(const at::Tensor& matrix) const {
    return matrix.narrow(0, row, rows).narrow(1, column, columns);
  }
};

class Memory {
 public:
  // Makes what the list wants beside the call's operands and results. `call` outlives it.
  explicit Memory(const Call& call) : call_(call), plan_(call.plan) {
    for (const steps::Scratch& one : call.list->scratch) {
      if (one.buffer == steps::Buffer::kProduct && call.product.defined()) continue;
      // Packed tiles reach beyond the matrix, and that part travels too: it must hold numbers.
      const bool packed = plan_.layout == plan::Layout::kPacked;
      const auto make =
          packed ? [](int64_t n, const at::TensorOptions& o) { return at::zeros({n}, o); }
                 : [](int64_t n, const at::TensorOptions& o) { return at::empty({n}, o); };
      const at::Tensor& like = call.gathered.defined() ? call.input : call.outputs[0];
      scratch_[static_cast<size_t>(one.buffer)] =
          make(one.bytes / like.element_size(), like.options());
    }
  }

  const at::Tensor& tensor(const steps::Where& where) const {
    switch (where.buffer) {
      case steps::Buffer::kInput:
        return call_.input;
      case steps::Buffer::kOutput:
        return call_.outputs[static_cast<size_t>(where.index)];
      case steps::Buffer::kGathered:
        return call_.gathered;
      case steps::Buffer::kIndices:
        return call_.indices[static_cast<size_t>(where.index)];
      case steps::Buffer::kProduct:
        if (call_.product.defined()) return call_.product;
        [[fallthrough]];
      default:
        return scratch_[static_cast<size_t>(where.buffer)];
    }
  }
  at::Tensor flat(const steps::Where& where, int64_t elements) const {
    const at::Tensor& all = tensor(where);
    return all.view(-1).narrow(0, where.offset / all.element_size(), elements);
  }
  at::Tensor bytes(const steps::Where& where, int64_t count) const {
    return flat(where, count / tensor(where).element_size());
  }
  at::Tensor matrix(const steps::Where& where, int64_t rows, int64_t columns) const {
    if (where.buffer != steps::Buffer::kInput)
      return flat(where, rows * columns).view({rows, columns});
    const int64_t row_bytes = std::max<int64_t>(1, columns * call_.input.element_size());
    return call_.input.narrow(0, where.offset / row_bytes, rows);
  }
  // Rows at this distance in bytes.
  at::Tensor spaced(const steps::Where& where, int64_t rows, int64_t row_bytes,
                    int64_t stride) const {
    const at::Tensor& all = tensor(where);
    const int64_t element = all.element_size();
    return all.as_strided({rows, row_bytes / element}, {stride / element, 1},
                          all.storage_offset() + where.offset / element);
  }

  // The rows that a step takes: `most`, or as many as the count says.
  int64_t counted(const std::optional<steps::Where>& count, int64_t most) const {
    if (!count) return most;
    return std::clamp<int64_t>(flat(*count, 1).item<int64_t>(), 0, most);
  }
  // All rows of a buffer from the place on.
  at::Tensor all_spaced(const steps::Where& where, int64_t row_bytes, int64_t stride) const {
    const at::Tensor& all = tensor(where);
    const int64_t rows = (all.numel() * all.element_size() - where.offset - row_bytes) / stride + 1;
    return spaced(where, rows, row_bytes, stride);
  }

  // Does it for each tile of the chunk that has rows in the matrix, with its number in the order.
  template <typename Do>
  void for_tiles(int32_t chunk, int32_t number, const Do& act) const {
    const plan::TileOrder& order = order_of(number);
    for (int32_t tile = order.chunk_begin[chunk]; tile < order.chunk_begin[chunk + 1]; ++tile) {
      const plan::TileCoord coord = plan::tile_coord(order, tile);
      Block block = {int64_t{coord.row} * plan_.tile_m, int64_t{coord.column} * plan_.tile_n};
      block.rows = std::min<int64_t>(plan_.tile_m, plan_.problem.m - block.row);
      block.columns = std::min<int64_t>(plan_.tile_n, plan_.problem.n - block.column);
      if (block.rows > 0) act(tile, block);
    }
  }

  // A tile among the packed ones.
  at::Tensor packed(steps::Where where, int32_t number, int32_t tile, int32_t terms, int32_t term,
                    const Block& block) const {
    const plan::TileOrder& order = order_of(number);
    const int32_t slot = plan::packed_slot(order, tile, terms, term);
    where.offset +=
        plan::packed_offset(slot, plan_.tile_m, plan_.tile_n) * tensor(where).element_size();
    return Block{0, 0, block.rows, block.columns}.of(matrix(where, plan_.tile_m, plan_.tile_n));
  }

 protected:
  const Call& call_;
  const plan::Plan& plan_;

 private:
  const plan::TileOrder& order_of(int32_t number) const {
    return call_.list->orders[static_cast<size_t>(number)];
  }

  std::array<at::Tensor, static_cast<size_t>(steps::Buffer::kSlot) + 1> scratch_;
};

}  // namespace overlap::cpu
