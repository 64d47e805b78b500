// A mixture's rows over memory that the ranks map into each other. Every rank makes the same calls; each is one CopyCall.
//
//   dispatch | routes | counts, tokens to peers | flag | wait | offs, source | rows |
//   exact    | routes | counts to peers | flag | wait | offs | tokens to peers | flag | wait | source | rows |
//                                            the host waits ^ for the counts, while tokens travel
//
// Or copy engines carry all tokens to all peers beside the product of the rows of this rank's own:
//
//   caller   | ... routes to peers | flag | wait | source | own rows | product | wait | others' rows | product |
//   copies                            | tokens to peers, flag |
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "binding/cuda/moe_cuda.h"
#include "binding/cuda/moe_exchange.h"

namespace overlap::binding {
namespace {

using at::Tensor;
using runtime::CopyCall;

// Findings of a dispatch: by kernels, and, in exact mode, by the host.
struct Found {
  Routes routes;
  Tensor home;    // [T * K]
  Tensor known;   // [4 * W + 2]
  Tensor offs;    // [e]
  Tensor counts;  // [e]
};

kernels::ArrivalsParams arrivals_params(const Exchange& exchange, const CopyCall& call,
                                        const Found& found, int64_t align, int64_t max_rows) {
  kernels::ArrivalsParams params;
  params.ranks = exchange.ranks();
  params.rank = exchange.rank();
  params.experts = static_cast<int32_t>(found.offs.size(0));
  params.message_width = static_cast<int32_t>(found.routes.message.size(1));
  params.align = align;
  params.message = found.routes.message.const_data_ptr<int64_t>();
  params.met = reinterpret_cast<const int64_t*>(call.slot());
  params.known = found.known.data_ptr<int64_t>();
  params.longest = params.known + 4 * params.ranks + 1;
  params.offs = found.offs.data_ptr<int32_t>();
  params.counts = found.counts.data_ptr<int64_t>();
  params.home = found.home.data_ptr<int64_t>();
  params.most_rows = max_rows > 0 ? max_rows : -1;
  params.report = exchange.group().report();
  return params;
}

// Rows [R, H], fresh, of the tokens in the slot from `at` on, `stride` of a rank, or in x.
struct Rows {
  Tensor rows;
  kernels::RowsParams params;
  int64_t stride;

  void gather(const Exchange& exchange, kernels::Tokens which = kernels::Tokens::kAll) const {
    kernels::RowsParams launched = params;
    launched.which = which;
    C10_CUDA_CHECK(kernels::gather_rows(launched, exchange.stream()));
  }
};
Rows rows_of(const Exchange& exchange, const CopyCall& call, const Tensor& x, int64_t at,
             const Tensor& source, int64_t choices, int64_t stride) {
  Rows made{at::empty({source.numel(), x.size(1)}, x.options()), {}, stride};
  made.params.element = element_of(x);
  made.params.rows = source.numel();
  made.params.width = x.size(1);
  made.params.source = call.slot() + at;
  made.params.index = source.const_data_ptr<int64_t>();
  made.params.divisor = choices;
  made.params.own = x.const_data_ptr();
  made.params.own_first = exchange.rank() * stride;
  made.params.own_count = x.size(0);
  made.params.output = made.rows.data_ptr();
  return made;
}

// Copy engines carry x to the same place of all peers' slots, and announce it.
void push_tokens(const Exchange& exchange, CopyCall& call, const Tensor& x, int64_t at,
                 int64_t stride, int32_t step) {
  const int64_t bytes = row_bytes(x);
  std::vector<runtime::Push> pushes;
  for (int distance = 1; distance < exchange.ranks(); ++distance) {
    runtime::Push push;
    push.source = static_cast<const char*>(x.const_data_ptr());
    push.source_stride = push.stride = push.row_bytes = bytes;
    push.peer = (exchange.rank() + distance) % exchange.ranks();
    push.offset = at + exchange.rank() * stride * bytes;
    push.rows = x.size(0);
    push.lane = distance - 1;
    pushes.push_back(push);
  }
  call.fork(exchange.stream());
  call.push(pushes, step);
}

#if defined(OVERLAP_WITH_SM90)
// The rows and their product; tiles of own tokens' rows before all peers have announced the step. Ends the call.
void multiply_in_parts(const Exchange& exchange, CopyCall& call, const Rows& made, Product& product,
                       const Tensor& offs, int32_t step) {
  const int64_t experts = offs.size(0);
  const Tensor parts = at::empty({6 * experts}, offs.options());
  kernels::PartsParams params;
  params.rank = exchange.rank();
  params.experts = static_cast<int32_t>(experts);
  params.tile = kernels::kGroupedTile;
  params.offs = offs.const_data_ptr<int32_t>();
  params.source = made.params.index;
  params.stride = made.stride * made.params.divisor;
  params.own = parts.data_ptr<int32_t>();
  params.others = params.own + 2 * experts;
  C10_CUDA_CHECK(kernels::find_parts(params, exchange.stream()));
  made.gather(exchange, kernels::Tokens::kOwn);
  product.params.ranges = params.own;
  C10_CUDA_CHECK(kernels::launch_grouped_gemm_sm90(product.params, exchange.stream()));
  call.await(step);
  made.gather(exchange, kernels::Tokens::kOthers);
  call.end();
  product.params.ranges = params.others;
  product.params.ranges_of_expert = 2;
  C10_CUDA_CHECK(kernels::launch_grouped_gemm_sm90(product.params, exchange.stream()));
}
#endif

kernels::TokensParams tokens_params(const Exchange& exchange, const CopyCall& call, const Tensor& x,
                                    const Tensor& home, int64_t choices, int64_t stride) {
  kernels::TokensParams params;
  params.rank = exchange.rank();
  params.ranks = exchange.ranks();
  params.choices = static_cast<int32_t>(choices);
  params.tokens = x.size(0);
  params.row_bytes = row_bytes(x);
  params.source = x.const_data_ptr();
  params.home = home.const_data_ptr<int64_t>();
  params.stride = stride;
  exchange.set_slots(params, call);
  return params;
}

void send_counts(const Exchange& exchange, const CopyCall& call, const Tensor& ids,
                 const Found& found) {
  kernels::CountsParams params;
  params.experts = found.routes.experts;
  params.ids = ids.const_data_ptr();
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.tokens = ids.size(0);
  params.choices = static_cast<int32_t>(ids.size(1));
  params.rank = exchange.rank();
  params.message_width = static_cast<int32_t>(found.routes.message.size(1));
  params.message = found.routes.message.const_data_ptr<int64_t>();
  params.home = found.home.data_ptr<int64_t>();
  exchange.set_slots(params, call);
  C10_CUDA_CHECK(kernels::send_counts(params, exchange.stream()));
}

// Steps of a dispatch that each rank announces; a wait also ends by a later one.
enum Step : int32_t { kCounts, kRoutes, kTokens, kSteps };

// A dispatch's findings, and the product of its rows, if it has one. `splits` is empty if slots would be too large.
struct Dispatched {
  Tensor rows;
  Tensor offs;
  Tensor counts;
  Tensor home;
  Tensor source;
  Tensor splits;
  std::optional<Product> product;
};

// The experts' weights, at most half of kMaxGroupedExperts: with them copies carry a dispatch's tokens.
struct Factor {
  const Tensor& weight;
  const std::optional<Tensor>& up;
  const std::optional<Tensor>& bias;
  Form form;
  bool keep;
};

// The call that carries x [T, D] to its routes' rows. Copies come while the rows are made; otherwise all tokens have come.
struct Spreading {
  Spreading(const Exchange& exchange, const Tensor& x, int64_t choices, const Tensor& home,
            const Tensor& source, int64_t routes, bool copies)
      : call(exchange.begin(exchange.ranks() * (routes / choices) * row_bytes(x),
                            {kSpread, routes / choices, x.size(1), x.element_size(), choices}, {},
                            copies ? 1 : 0)),
        made(rows_of(exchange, call, x, 0, source, choices, routes / choices)) {
    if (copies) {
      push_tokens(exchange, call, x, 0, made.stride, 0);
      return;
    }
    C10_CUDA_CHECK(kernels::send_tokens(
        tokens_params(exchange, call, x, home, choices, made.stride), exchange.stream()));
    call.announce(0);
    call.await(0);
  }

  CopyCall call;
  Rows made;
};

// A dispatch's call, from the counts on.
class Dispatch {
 public:
  // `home_bytes`: of a result's row; 0: as many as x's.
  Dispatch(const Exchange& exchange, const Tensor& x, const Tensor& ids, at::IntArrayRef experts,
           int64_t align, bool ranks_first, int64_t max_rows, int64_t home_bytes,
           const Factor* factor)
      : exchange_(exchange),
        x_(x.contiguous()),
        ids_(ids.contiguous()),
        experts_(experts),
        align_(align),
        ranks_first_(ranks_first),
        max_rows_(max_rows),
        home_bytes_(home_bytes > 0 ? home_bytes : row_bytes(x_)),
        factor_(factor) {
    found_.routes = find_routes(ids_, experts, false);
    found_.home = empty_longs(ids, ids.numel());
    found_.known = empty_longs(ids, 4 * exchange.ranks() + 2);
    const auto own = experts[static_cast<size_t>(exchange.rank())];
    found_.offs = at::empty({own}, ids.options().dtype(at::kInt));
    found_.counts = empty_longs(ids, own);
  }

  // The bytes of a slot for so many tokens of a rank, for this call and the way home.
  int64_t bytes(int64_t tokens) const {
    const int64_t home_rows = ranks_first_ ? exchange_.ranks() : ids_.size(1);
    return std::max(places(tokens).end, tokens * home_rows * home_bytes_);
  }

  // Nothing waits for the host.
  Dispatched run(int64_t max_tokens) {
    CopyCall call = begin(bytes(max_tokens), max_tokens);
    send_counts(exchange_, call, ids_, found_);
    send(call, max_tokens, nullptr);
    push(call, max_tokens);
    call.await(copies() ? kRoutes : kTokens);
    C10_CUDA_CHECK(kernels::count_arrivals(arrivals(call), exchange_.stream()));
    return finish(call, max_tokens, max_rows_);
  }

  // The host waits for the counts. Slots of more than `limit` bytes are not made, on all ranks.
  Dispatched run_exact(int64_t limit) {
    int64_t wanted = bytes(0);
    while (true) {
      CopyCall call = begin(wanted, 0);
      const int64_t fits = most_tokens(call.room());
      send_counts(exchange_, call, ids_, found_);
      call.announce(kCounts);
      call.await(kCounts);
      C10_CUDA_CHECK(kernels::count_arrivals(arrivals(call), exchange_.stream()));
      const Tensor known =
          at::empty(found_.known.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
      C10_CUDA_CHECK(cudaMemcpyAsync(known.data_ptr(), found_.known.const_data_ptr(),
                                     known.nbytes(), cudaMemcpyDeviceToHost, exchange_.stream()));
      runtime::Event came;
      came.record(exchange_.stream());
      send(call, fits, found_.known.const_data_ptr<int64_t>() + known.numel() - 1);
      C10_CUDA_CHECK(cudaEventSynchronize(came.get()));
      exchange_.group().check();  // a wait that failed lets any numbers pass
      const int64_t* numbers = known.const_data_ptr<int64_t>() + known.numel() - 2;
      if (numbers[1] <= fits) {
        push(call, numbers[1]);
        call.await(copies() ? kRoutes : kTokens);
        return finish(call, numbers[1], numbers[0]);
      }
      if (copies()) call.announce(kTokens);
      call.await(kTokens);
      call.end();
      wanted = bytes(numbers[1]);
      if (wanted > limit) {
        const Tensor none = empty_longs(ids_, 0);
        return {x_, none, none, none, none, at::empty({0}, at::kLong), std::nullopt};
      }
    }
  }

 private:
  // Copy engines carry the tokens, not kernels.
  bool copies() const { return factor_ != nullptr; }

  // The most tokens of a rank that so many bytes take.
  int64_t most_tokens(int64_t room) const {
    int64_t fits = 0;
    for (int64_t step = int64_t{1} << 32; step > 0; step /= 2) {
      if (bytes(fits + step) <= room) fits += step;
    }
    return fits;
  }

  kernels::TokenPlaces places(int64_t tokens) const {
    return kernels::token_places(exchange_.ranks(), found_.routes.message.size(1), ids_.size(1),
                                 row_bytes(x_), tokens);
  }

  CopyCall begin(int64_t bytes, int64_t max_tokens) const {
    return exchange_.begin(
        bytes, {kDispatch, max_tokens, x_.size(1), x_.element_size(), ids_.size(1), ranks_first_},
        experts_, copies() ? kSteps : 0);
  }

  kernels::ArrivalsParams arrivals(const CopyCall& call) const {
    return arrivals_params(exchange_, call, found_, align_, max_rows_);
  }

  // Routes, and tokens unless copies carry them; announced.
  void send(CopyCall& call, int64_t stride, const int64_t* longest) const {
    kernels::TokensParams params =
        tokens_params(exchange_, call, x_, found_.home, ids_.size(1), stride);
    params.message_width = static_cast<int32_t>(found_.routes.message.size(1));
    params.longest = longest;
    params.routes_only = copies();
    params.routes = found_.routes.routes.const_data_ptr<int64_t>();
    params.begins = found_.routes.begins.const_data_ptr<int64_t>();
    C10_CUDA_CHECK(kernels::send_tokens(params, exchange_.stream()));
    call.announce(copies() ? kRoutes : kTokens);
  }

  void push(CopyCall& call, int64_t stride) const {
    if (copies()) push_tokens(exchange_, call, x_, places(stride).rows, stride, kTokens);
  }

  Dispatched finish(CopyCall& call, int64_t stride, int64_t rows) const {
    const int64_t choices = ids_.size(1);
    const Tensor source = empty_longs(ids_, rows);
    kernels::ArrivalsParams params = arrivals(call);
    params.rank_slots = stride * choices;
    params.slots = reinterpret_cast<const int32_t*>(call.slot() + places(stride).routes);
    params.source = source.data_ptr<int64_t>();
    params.room = rows;
    C10_CUDA_CHECK(kernels::place_arrivals(params, exchange_.stream()));
    const Rows made = rows_of(exchange_, call, x_, places(stride).rows, source, choices, stride);
    Tensor splits = at::zeros({4, exchange_.ranks()}, at::kLong);
    splits.data_ptr<int64_t>()[0] = -1 - stride * choices;
    return {made.rows, found_.offs, found_.counts,       found_.home,
            source,    splits,      multiply(call, made)};
  }

  // Makes the rows and their product, and ends the call.
  std::optional<Product> multiply(CopyCall& call, const Rows& made) const {
#if defined(OVERLAP_WITH_SM90)
    if (copies()) {
      Product product = product_of(made.rows, factor_->weight, factor_->up, factor_->bias,
                                   std::nullopt, found_.offs, factor_->form, factor_->keep);
      multiply_in_parts(exchange_, call, made, product, found_.offs, kTokens);
      return product;
    }
#endif
    made.gather(exchange_);
    call.end();
    return std::nullopt;
  }

  const Exchange& exchange_;
  const Tensor x_;
  const Tensor ids_;
  const at::IntArrayRef experts_;
  const int64_t align_;
  const bool ranks_first_;
  const int64_t max_rows_;
  const int64_t home_bytes_;
  const Factor* const factor_;
  Found found_;
};

Dispatched run(const Tensor& x, const Tensor& ids, at::IntArrayRef experts, int64_t align,
               bool ranks_first, int64_t max_tokens, int64_t max_rows, int64_t limit,
               const std::string& group, int64_t home_bytes, const Factor* factor) {
  const Exchange exchange(x, group);
  TORCH_CHECK(max_rows > 0 || !runtime::capture_id(exchange.stream()),
              "overlap_torch: the host waits for the numbers of rows of a mixture of experts, "
              "which cannot be captured "
              "in a CUDA graph: give max_rows= and max_tokens=");
  Dispatch call(exchange, x, ids, experts, align, ranks_first, max_rows, home_bytes, factor);
  return max_rows > 0 ? call.run(max_tokens) : call.run_exact(limit);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dispatch(
    const Tensor& x, const Tensor& ids, at::IntArrayRef experts, int64_t align, bool ranks_first,
    int64_t max_tokens, int64_t max_rows, int64_t limit, const std::string& group,
    int64_t home_bytes) {
  const Dispatched made = run(x, ids, experts, align, ranks_first, max_tokens, max_rows, limit,
                              group, home_bytes, nullptr);
  return {made.rows, made.offs, made.counts, made.home, made.source, made.splits};
}

// [T, D] to [R, D]; `stride`: routes of a rank.
Tensor spread(const Tensor& x, int64_t choices, const Tensor& home, const Tensor& source,
              int64_t stride, const std::string& group) {
  const Exchange exchange(x, group);
  const Tensor given = x.contiguous();
  Spreading spreading(exchange, given, choices, home, source, stride, false);
  spreading.made.gather(exchange);
  spreading.call.end();
  return spreading.made.rows;
}

#if defined(OVERLAP_WITH_SM90)
// A dispatch, and the product of its rows.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> up(
    const Tensor& x, const Tensor& ids, at::IntArrayRef experts, bool ranks_first,
    int64_t max_tokens, int64_t max_rows, int64_t limit, const Tensor& weight,
    const std::optional<Tensor>& up, const std::optional<Tensor>& bias, c10::string_view activation,
    double alpha, double limit_of_gate, double offset, bool gated, bool interleaved, bool keep,
    const std::string& group) {
  const Factor factor{
      weight, up, bias, {activation, alpha, limit_of_gate, offset, gated, interleaved}, keep};
  Dispatched made =
      run(x, ids, experts, 1, ranks_first, max_tokens, max_rows, limit, group, 0, &factor);
  const Tensor none = at::empty({0}, x.options());
  const Product product = made.product.value_or(Product{{}, none, none, none, {}, {}});
  return {made.rows,   made.offs,      made.counts,  made.home,      made.source,
          made.splits, product.output, product.kept, product.kept_up};
}

// spread() by copies, and the rows' product with weight [e, N, D]; e as Factor has it.
std::tuple<Tensor, Tensor> spread_linear(const Tensor& x, int64_t choices, const Tensor& home,
                                         const Tensor& source, int64_t stride, const Tensor& weight,
                                         const Tensor& offs, const std::string& group) {
  const Exchange exchange(x, group);
  const Tensor given = x.contiguous();
  Spreading spreading(exchange, given, choices, home, source, stride, true);
  Product product = product_of(spreading.made.rows, weight, std::nullopt, std::nullopt,
                               std::nullopt, offs, {}, false);
  multiply_in_parts(exchange, spreading.call, spreading.made, product, offs, 0);
  return {spreading.made.rows, product.output};
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  m.impl("_moe_peer_dispatch", &dispatch);
  m.impl("_moe_peer_spread", &spread);
#if defined(OVERLAP_WITH_SM90)
  m.impl("_moe_peer_up", &up);
  m.impl("_moe_peer_spread_linear", &spread_linear);
#endif
}

}  // namespace overlap::binding
