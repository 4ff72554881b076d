// A mixture of experts: each token's best experts are chosen, tokens are grouped by expert, and the
// results are added in the order of the experts' numbers, whatever else is in the batch.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "elementwise.h"
#include "program.h"

namespace rl {
namespace {

constexpr float kTiny = 1e-20f;  // keeps the sum of scores from zero

// Where a step's tokens go, in one piece of memory. Choices are of top_k experts for each token.
struct Routes {
  float* scores;     // [T][experts]
  float* ranking;    // [T][experts]
  int32_t* order;    // [T][experts]
  float* worth;      // [T][groups]
  int32_t* best;     // [T][groups]
  int32_t* experts;  // [T][top_k]
  float* weights;    // [T][top_k]
  int32_t* starts;   // [experts + 1] where an expert's tokens begin in what follows
  int32_t* tokens;   // [T * top_k], by expert, ascending
  float* shares;     // [T * top_k] their weights
  float* rows;       // [T][width] if the source is overwritten, or null
};

class MoEOp : public Op {
 public:
  int source, router_source;
  rl_routing routing;
  rl_linear router;
  const float *correction, *expert_scale;
  std::vector<int32_t> borders;  // the first expert of each rank, and the end
  int rank;
  std::vector<FeedForward> experts;  // this rank's
  // Tokens of each expert so far, of all ranks; read while steps run.
  mutable std::vector<std::atomic<int64_t>> num_tokens_of;

  void run(Context& c) const override {
    int32_t num_tokens = c.num_tokens(), width = router.matrix.columns;
    Routes routes = take_routes(c);
    Target target{&router, routes.scores, routing.num_experts};
    apply(c, c.rows(router_source, width), &target, 1, false);
    for_tokens(c.pool, num_tokens, [&](int32_t t) {
      choose(routes, t);
      if (routes.rows)
        std::copy_n(c.row(source, t), width, routes.rows + static_cast<int64_t>(t) * width);
      std::fill_n(c.row(RL_H, t), width, 0.0f);
    });
    group_by_expert(routes, num_tokens);
    Rows rows = c.rows(source, width);
    if (routes.rows) rows = {routes.rows, width, num_tokens, width};
    bool alone = borders.size() == 2;
    int64_t num_outputs = alone ? 0 : int64_t{num_tokens} * routing.top_k;
    float* outputs = c.outputs.get<float>(num_outputs * width);
    for (int e = 0; e < routing.num_experts; ++e) {
      if (routes.starts[e] == routes.starts[e + 1]) continue;
      ++c.experts_read;
      num_tokens_of[static_cast<size_t>(e)].fetch_add(routes.starts[e + 1] - routes.starts[e],
                                                      std::memory_order_relaxed);
      if (e < borders[rank] || e >= borders[rank + 1]) continue;
      float* out = outputs + int64_t{routes.starts[e]} * width;
      if (alone) out = one_output(c, routes, e, width);
      run_expert(c, e, routes, rows, out);
      if (alone) add_expert(c, e, routes, out, width);
    }
    if (alone) return;
    exchange(c, routes, outputs, width, static_cast<int32_t>(num_outputs));
    for (int e = 0; e < routing.num_experts; ++e)
      add_expert(c, e, routes, outputs + int64_t{routes.starts[e]} * width, width);
  }

  void expert_tokens(int64_t* counts) const override {
    for (const auto& count : num_tokens_of) *counts++ = count.load(std::memory_order_relaxed);
  }

 private:
  Routes take_routes(Context& c) const {
    int64_t count = c.num_tokens(), n = routing.num_experts, k = routing.top_k;
    int64_t width = source == RL_H ? router.matrix.columns : 0, groups = routing.num_groups;
    auto* memory = c.spare.get<float>(count * (3 * n + 2 * groups + 4 * k + width) + n + 1);
    auto floats = [&](int64_t size) { return (memory += size) - size; };
    auto ints = [&](int64_t size) { return reinterpret_cast<int32_t*>(floats(size)); };
    Routes routes;
    routes.scores = floats(count * n), routes.ranking = floats(count * n);
    routes.order = ints(count * n);
    routes.worth = floats(count * groups), routes.best = ints(count * groups);
    routes.experts = ints(count * k), routes.weights = floats(count * k);
    routes.starts = ints(n + 1);
    routes.tokens = ints(count * k), routes.shares = floats(count * k);
    routes.rows = width ? floats(count * width) : nullptr;
    return routes;
  }

  // Room for what an expert makes of its tokens, behind that of what goes in.
  float* one_output(Context& c, const Routes& routes, int e, int32_t width) const {
    int64_t count = routes.starts[e + 1] - routes.starts[e];
    return c.gathered.get<float>(2 * count * width) + count * width;
  }

  // out[its tokens, D] = expert e of its tokens.
  void run_expert(Context& c, int e, const Routes& routes, const Rows& rows, float* out) const {
    int32_t count = routes.starts[e + 1] - routes.starts[e], width = rows.columns;
    const int32_t* tokens = routes.tokens + routes.starts[e];
    const float* shares = routes.shares + routes.starts[e];
    float* in = c.gathered.get<float>(static_cast<int64_t>(count) * width);
    for_tokens(c.pool, count, [&](int32_t i) {
      const float* from = rows.data + tokens[i] * rows.stride;
      float *row = in + int64_t{i} * width, factor = routing.scales_inputs ? shares[i] : 1.0f;
      for (int32_t k = 0; k < width; ++k) row[k] = from[k] * factor;
    });
    const FeedForward& network = experts[static_cast<size_t>(e - borders[rank])];
    feed_forward(c, network, {in, width, count, width}, out, width, false);
  }

  void add_expert(Context& c, int e, const Routes& routes, const float* out, int32_t width) const {
    int32_t count = routes.starts[e + 1] - routes.starts[e];
    const int32_t* tokens = routes.tokens + routes.starts[e];
    const float* shares = routes.shares + routes.starts[e];
    for_tokens(c.pool, count, [&](int32_t i) {
      add_scaled(c.row(RL_H, tokens[i]), out + static_cast<int64_t>(i) * width,
                 routing.scales_inputs ? 1.0f : shares[i], width);
    });
  }

  // Every rank gets the outputs of all experts: rows by expert.
  void exchange(Context& c, const Routes& routes, float* outputs, int32_t width,
                int32_t num_rows) const {
    std::vector<int32_t> owners(static_cast<size_t>(num_rows));
    for (size_t r = 0; r + 1 < borders.size(); ++r)
      std::fill(owners.begin() + routes.starts[borders[r]],
                owners.begin() + routes.starts[borders[r + 1]], static_cast<int32_t>(r));
    int64_t bytes = width * int64_t{sizeof(float)};
    if (!c.group->gather_rows(c.pool, reinterpret_cast<uint8_t*>(outputs), bytes, bytes,
                              owners.data(), num_rows))
      throw std::bad_alloc();
  }

  // Finds a token's experts and their weights from its logits, which are overwritten.
  void choose(const Routes& routes, int64_t token) const {
    int n = routing.num_experts, k = routing.top_k;
    float *scores = routes.scores + token * n, *ranking = routes.ranking + token * n;
    if (routing.scoring == RL_SOFTMAX) {
      float largest = *std::max_element(scores, scores + n), total = 0;
      for (int e = 0; e < n; ++e) total += scores[e] = std::exp(scores[e] - largest);
      for (int e = 0; e < n; ++e) scores[e] /= total;
    } else {
      for (int e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    }
    for (int e = 0; e < n; ++e) ranking[e] = correction ? scores[e] + correction[e] : scores[e];
    if (routing.num_groups) bar_groups(routes, token);
    int32_t* order = routes.order + token * n;
    std::iota(order, order + n, 0);
    std::partial_sort(order, order + k, order + n, [&](int a, int b) {
      return ranking[a] != ranking[b] ? ranking[a] > ranking[b] : a < b;
    });
    float total = kTiny;
    for (int i = 0; i < k; ++i) total += scores[order[i]];
    for (int i = 0; i < k; ++i) {
      float weight = routing.normalised ? scores[order[i]] / total : scores[order[i]];
      routes.experts[token * k + i] = order[i];
      if (expert_scale) weight *= expert_scale[order[i]];
      routes.weights[token * k + i] = weight * routing.scale;
    }
  }

  // Experts outside the best groups cannot be chosen.
  void bar_groups(const Routes& routes, int64_t token) const {
    int groups = routing.num_groups, size = routing.num_experts / groups;
    float *ranking = routes.ranking + token * routing.num_experts;
    float *worth = routes.worth + token * groups;
    int32_t* order = routes.best + token * groups;
    for (int g = 0; g < groups; ++g) {
      float best = -INFINITY, second = -INFINITY;
      for (int i = 0; i < size; ++i) {
        float rank = ranking[g * size + i];
        second = std::max(second, std::min(best, rank));
        best = std::max(best, rank);
      }
      worth[g] = best + (routing.group_best_two && size > 1 ? second : 0.0f);
    }
    std::iota(order, order + groups, 0);
    std::partial_sort(order, order + groups, order + groups, [&](int a, int b) {
      return worth[a] != worth[b] ? worth[a] > worth[b] : a < b;
    });
    for (int i = routing.top_groups; i < groups; ++i)
      std::fill_n(ranking + order[i] * size, size, -INFINITY);
  }

  // Lists each expert's tokens, in order.
  void group_by_expert(const Routes& routes, int64_t num_tokens) const {
    int n = routing.num_experts;
    int64_t count = num_tokens * routing.top_k;
    std::fill_n(routes.starts, n + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++routes.starts[routes.experts[i] + 1];
    std::partial_sum(routes.starts, routes.starts + n + 1, routes.starts);
    for (int64_t i = 0; i < count; ++i) {
      int32_t place = routes.starts[routes.experts[i]]++;
      routes.tokens[place] = static_cast<int32_t>(i / routing.top_k);
      routes.shares[place] = routes.weights[i];
    }
    // Each start has moved to the next expert's.
    std::copy_backward(routes.starts, routes.starts + n, routes.starts + n + 1);
    routes.starts[0] = 0;
  }
};

}  // namespace

std::unique_ptr<Op> make_moe(int source, int router_source, const rl_routing& routing,
                             const rl_linear& router, const float* correction,
                             const float* expert_scale, const rl_linear* gate, const rl_linear* up,
                             const rl_linear* down, const rl_activation& activation,
                             const std::vector<int32_t>& borders, int rank) {
  auto op = std::make_unique<MoEOp>();
  op->source = source, op->router_source = router_source;
  op->routing = routing, op->router = router;
  op->correction = correction, op->expert_scale = expert_scale;
  op->borders = borders, op->rank = rank;
  op->num_tokens_of = std::vector<std::atomic<int64_t>>(static_cast<size_t>(routing.num_experts));
  for (int e = 0; e < borders[rank + 1] - borders[rank]; ++e)
    op->experts.push_back({gate ? gate[e] : rl_linear{}, up[e], down[e], activation});
  return op;
}

}  // namespace rl
