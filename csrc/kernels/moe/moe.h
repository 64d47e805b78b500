// A mixture of experts: where routes and tokens go, and what happens to rows between GEMMs and collectives. A route is a
// token and one of its experts. Experts are numbered over all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/signal/signal.h"

namespace overlap::kernels {

enum class Element { kBFloat16, kFloat16, kFloat32, kFloat64 };

// In place of a peer in the report of a wait: nothing was waited for. The rows that were seen came, and there is room only for
// those that were expected.
constexpr int32_t kTooManyRows = 252;

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
  // [ranks * tokens]: token * ranks + rank, by (rank, token). Null: slots and sent are not wanted.
  int64_t* sent = nullptr;
  int64_t* begins = nullptr;  // [ranks + 1]: where each rank's part of routes begins; or null
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
  int64_t* source = nullptr;       // [rows]: received token * choices + choice, or -1: padding

  // Over peers a message says the rank's tokens in its last column, and `slots` has this number of entries for each rank, its
  // routes; 0: the messages follow each other.
  int64_t rank_slots = 0;
  int32_t rank = 0;
  int64_t* home = nullptr;  // of this rank's own routes: the row of each that its own experts have
  int64_t own_routes = 0;
  int64_t* longest = nullptr;  // the most tokens of a rank
  int64_t most_rows = -1;      // more end the call with a report; -1: any number
  int64_t room = 0;            // rows that `source` has; -2 in those after the last
  WaitReport* report = nullptr;
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
  // Rows of the source that lie elsewhere, own_count of them from own_first on. An index of -2: nothing is written.
  const void* own = nullptr;
  int64_t own_first = 0;
  int64_t own_count = 0;
};

cudaError_t gather_rows(const RowsParams& params, cudaStream_t stream);

// A packed row: `width` numbers in float8_e4m3fn, then float32 scales, the largest absolute values divided by 448: one of the row or,
// `by_blocks`, one of each kScaledBlock numbers. Zeros fill the last 16 bytes.
constexpr int64_t kScaledBlock = 128;
constexpr int64_t scale_blocks(int64_t numbers) {
  return (numbers + kScaledBlock - 1) / kScaledBlock;
}
constexpr int64_t scale_bytes(int64_t width, bool by_blocks) {
  return ((by_blocks ? scale_blocks(width) : 1) * 4 + 15) / 16 * 16;
}

struct PackParams {
  int64_t rows = 0;
  int64_t width = 0;  // a multiple of 16
  bool by_blocks = false;
  const void* source = nullptr;  // bfloat16 [rows, width], of 16-byte alignment
  const int32_t* end = nullptr;  // rows from here on are not written; null: all are
  void* output = nullptr;        // [rows, width + scale_bytes()]
};

cudaError_t pack_rows(const PackParams& params, cudaStream_t stream);

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
  int64_t* where = nullptr;        // scratch [tokens * choices]
  void* output = nullptr;          // [tokens, width]: summed in the choices' order, rounded once
  // Over peers `home`, as ArrivalsParams has it, replaces `route`: rows that peers' experts made have arrived, one after
  // the other for all routes.
  const int64_t* home = nullptr;
  const void* arrived = nullptr;
  int32_t rank = 0;
  // Or sums are of each rank's tokens, stride of them; those without rows are not written, and others go to
  // outputs[rank of the token] + (the rank's token) * output_step, or * width of this rank's.
  void* outputs[kMaxPeers] = {};
  int64_t stride = 0;
  int64_t output_step = 0;  // elements
};

cudaError_t sum_choices(const SumParams& params, cudaStream_t stream);

// The message of each rank to its peers, before its tokens: the routes to each of their experts and its tokens, as rows of messages
// at the head of their slots. And `home`, in which a route to a rank's expert is -2 - rank, and no route -1.
struct CountsParams {
  ExpertRanks experts;
  const void* ids = nullptr;  // as RoutesParams has it
  bool wide_ids = false;
  int64_t tokens = 0;
  int32_t choices = 0;
  int32_t rank = 0;
  int32_t message_width = 0;
  const int64_t* message = nullptr;
  int64_t* home = nullptr;  // [tokens * choices]
  char* slots[kMaxPeers] = {};
};

cudaError_t send_counts(const CountsParams& params, cudaStream_t stream);

constexpr int64_t kSlotAlign = 256;  // bytes

// Where routes and tokens lie in a slot, `stride` tokens for each rank: {routes, tokens, bytes in all}.
struct TokenPlaces {
  int64_t routes = 0;
  int64_t rows = 0;
  int64_t end = 0;
};
OVERLAP_HOST_DEVICE constexpr TokenPlaces token_places(int64_t ranks, int64_t message_width,
                                                       int64_t choices, int64_t row_bytes,
                                                       int64_t stride) {
  const auto whole = [](int64_t bytes) {
    return (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
  };
  TokenPlaces places;
  places.routes = whole(ranks * message_width * 8);
  places.rows =
      places.routes + (message_width > 0 ? whole(ranks * stride * choices * 4) : int64_t{0});
  places.end = places.rows + ranks * stride * row_bytes;
  return places;
}

// Each token into the slots of the peers whose experts it chose: at rank * stride + token, after token_places().
struct TokensParams {
  int32_t rank = 0;
  int32_t ranks = 0;
  int32_t choices = 0;
  int32_t message_width = 0;  // 0: routes do not travel, and nothing is before the tokens
  int64_t tokens = 0;
  int64_t row_bytes = 0;
  const void* source = nullptr;   // [tokens, row_bytes]
  const int64_t* home = nullptr;  // [tokens * choices]
  int64_t stride = 0;             // tokens of a rank
  const int64_t* longest =
      nullptr;  // its value replaces the stride; nothing is sent if it is larger
  const int64_t* routes = nullptr;  // RoutesParams
  const int64_t* begins = nullptr;
  char* slots[kMaxPeers] = {};
};

cudaError_t send_tokens(const TokensParams& params, cudaStream_t stream);

// Each row to its route's place in the slot of the rank that sent the token; those of the rank's own tokens stay.
struct ResultsParams {
  int32_t rank = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  const void* results = nullptr;    // [rows, row_bytes]
  const int64_t* source = nullptr;  // [rows]
  int64_t stride = 0;               // routes of a rank
  char* slots[kMaxPeers] = {};
};

cudaError_t send_results(const ResultsParams& params, cudaStream_t stream);

// visits[token * ranks + r]: the token where it chose an expert of this rank itself, -2 - r of another rank r, else -1.
cudaError_t find_visits(const int64_t* home, int64_t tokens, int32_t choices, int32_t rank,
                        int32_t ranks, int64_t* visits, cudaStream_t stream);

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
  // Rows are multiplied by their shares, [rows], float (double of double), after the gate; null: by 1. Backward then has, if they
  // are not null, the rows after that, rounded twice, in `output`, and the gradients of shares.
  const void* shares = nullptr;
  void* dots = nullptr;  // [rows], as shares
};

cudaError_t apply_gate(const GateParams& params, cudaStream_t stream);
cudaError_t apply_gate_backward(const GateParams& params, cudaStream_t stream);

}  // namespace overlap::kernels
