// A mixture of experts: where routes and tokens go, and what happens to rows between GEMMs and collectives. A route is a
// token and one of its experts. Experts are numbered over all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace overlap::kernels {

enum class Element { kBFloat16, kFloat16, kFloat32, kFloat64 };

constexpr int kMaxExpertRanks = 512;
constexpr int kMaxChoices = 4096;

// The first expert of each rank, then the number of all.
struct ExpertRanks {
  int32_t ranks = 0;
  int32_t first[kMaxExpertRanks + 1] = {};
};

struct RoutesParams {
  ExpertRanks experts;
  const void* ids = nullptr;  // [tokens, choices]; an id that no rank has is no route
  bool wide_ids = false;      // int64, not int32
  int64_t tokens = 0;
  int32_t choices = 0;
  int32_t message_width = 0;  // the most experts of a rank, and one
  // Scratch: routes_scratch() integers.
  int32_t* scratch = nullptr;
  // [ranks, message_width]: routes to each expert; last the tokens to the rank.
  int64_t* message = nullptr;
  // [tokens * choices]: token * choices + choice, by (expert, token, choice).
  int64_t* routes = nullptr;
  // [tokens * choices], of each route: its token's place among those sent to its rank, * choices + choice.
  int32_t* slots = nullptr;
  // [ranks * tokens]: token * ranks + rank, by (rank, token).
  int64_t* sent = nullptr;
};

int64_t routes_scratch(const RoutesParams& params);

// Beyond the number of routes and of tokens sent, `routes`, `slots` and `sent` are not written.
cudaError_t find_routes(const RoutesParams& params, cudaStream_t stream);

struct ArrivalsParams {
  int32_t ranks = 0;
  int32_t experts = 0;  // of this rank
  int32_t message_width = 0;
  int64_t align = 1;                 // an expert's rows are padded to a multiple
  const int64_t* message = nullptr;  // what this rank sent: RoutesParams
  const int64_t* met = nullptr;      // [ranks, message_width]: what came from each rank
  // [4 * ranks + 1]: routes sent to each rank, routes received, tokens sent, received; rows.
  int64_t* known = nullptr;
  int32_t* offs = nullptr;    // [experts]: where each expert's rows end
  int64_t* counts = nullptr;  // [experts]: its rows without padding
  int32_t choices = 0;
  const int32_t* slots = nullptr;  // of the routes that came, by (rank, expert, token, choice)
  int64_t* place = nullptr;        // the row of each
  int64_t* source = nullptr;       // [rows]: received token * choices + choice, or -1
};

cudaError_t count_arrivals(const ArrivalsParams& params,
                           cudaStream_t stream);  // known, offs, counts
cudaError_t place_arrivals(const ArrivalsParams& params, cudaStream_t stream);  // place, source

struct RowsParams {
  Element element = Element::kBFloat16;
  int64_t rows = 0;                // of the output
  int64_t width = 0;               // elements of a row
  const void* source = nullptr;    // [..., width], contiguous
  const int64_t* index = nullptr;  // [rows]: a row of the source is index / divisor; -1: zeros
  int64_t divisor = 1;
  void* output = nullptr;  // [rows, width]
};

cudaError_t gather_rows(const RowsParams& params, cudaStream_t stream);

struct SumParams {
  Element element = Element::kBFloat16;
  int64_t tokens = 0;
  int64_t width = 0;
  int32_t choices = 0;
  int64_t routes = 0;
  const int64_t* route = nullptr;  // [routes]: token * choices + choice; -1: none
  const void* rows = nullptr;      // [routes, width]: the result of each
  const void* shares = nullptr;    // [tokens, choices], float (double of double), or null: ones
  bool row_shares = false;         // shares are [routes]
  int32_t* where = nullptr;        // scratch [tokens * choices]
  void* output = nullptr;          // [tokens, width]: summed in the choices' order, rounded once
};

cudaError_t sum_choices(const SumParams& params, cudaStream_t stream);

struct WeighParams {
  Element element = Element::kBFloat16;
  int64_t rows = 0;
  int64_t width = 0;
  const void* grad = nullptr;     // [rows, width]
  const void* results = nullptr;  // [rows, width]
  const void* shares = nullptr;   // [rows], float (double of double)
  void* scaled = nullptr;         // [rows, width]: grad * share, or null
  void* dots = nullptr;           // [rows], float (double of double): grad . results, or null
};

cudaError_t weigh_rows(const WeighParams& params, cudaStream_t stream);

enum class Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu };

// act(alpha * gate) / alpha * (up + offset), of gate and up with their biases.
struct GateParams {
  Element element = Element::kBFloat16;
  Activation activation = Activation::kSilu;
  double alpha = 1.0;
  double limit = 0.0;  // 0: none; else gate <= limit, -limit <= up <= limit
  double offset = 0.0;
  int64_t rows = 0;
  int64_t width = 0;  // of the result
  const void* gate =
      nullptr;  // [rows, width] of row_stride; interleaved: [rows, 2 * width], gate and up by turns
  const void* up = nullptr;  // null: without a gate, or interleaved
  bool interleaved = false;
  int64_t row_stride = 0;
  const void* gate_bias =
      nullptr;  // [experts, width] of bias_stride, or null; interleaved as the gate
  const void* up_bias = nullptr;
  int64_t bias_stride = 0;
  const int32_t* offs = nullptr;  // [experts]: where each expert's rows end
  int32_t experts = 0;
  void* output = nullptr;  // [rows, width]
  // Backward: gradients of gate and up, laid out as they are, of grad_stride.
  const void* grad = nullptr;  // [rows, width]
  void* gate_grad = nullptr;
  void* up_grad = nullptr;
  int64_t grad_stride = 0;
};

cudaError_t apply_gate(const GateParams& params, cudaStream_t stream);
cudaError_t apply_gate_backward(const GateParams& params, cudaStream_t stream);

}  // namespace overlap::kernels
