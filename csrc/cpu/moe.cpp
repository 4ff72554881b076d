// A mixture of experts: each token's best experts are chosen, tokens are grouped by expert, and the
// results are added in the order of the experts' numbers, whatever else is in the batch.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "elementwise.h"
#include "program.h"

namespace rl {
namespace {

constexpr float kTiny = 1e-20f;  // keeps the sum of scores from zero

struct Choice {
  int32_t token;
  float weight;
};

class MoEOp : public Op {
 public:
  int source;
  rl_routing routing;
  rl_linear router;
  const float* correction;
  std::vector<FeedForward> experts;

  void run(Context& c) const override {
    int32_t num_tokens = c.num_tokens(), width = router.matrix.columns;
    std::vector<float> scores(static_cast<size_t>(num_tokens) * routing.num_experts);
    Target target{&router, scores.data(), routing.num_experts};
    apply(c, c.rows(source, width), &target, 1, false);
    std::vector<std::vector<Choice>> chosen(static_cast<size_t>(routing.num_experts));
    for (int32_t t = 0; t < num_tokens; ++t)
      choose(scores.data() + static_cast<int64_t>(t) * routing.num_experts, t, chosen);

    // The source and the target may be the same buffer, so the rows are gathered before h is set.
    std::vector<float> rows(static_cast<size_t>(num_tokens) * width);
    for (int32_t t = 0; t < num_tokens; ++t)
      std::copy_n(c.row(source, t), width, rows.data() + static_cast<int64_t>(t) * width);
    for (int32_t t = 0; t < num_tokens; ++t) std::fill_n(c.row(RL_H, t), width, 0.0f);
    for (size_t e = 0; e < chosen.size(); ++e)
      if (!chosen[e].empty()) run_expert(c, experts[e], chosen[e], rows.data(), width);
  }

 private:
  void run_expert(Context& c, const FeedForward& expert, const std::vector<Choice>& choices,
                  const float* rows, int32_t width) const {
    auto count = static_cast<int32_t>(choices.size());
    float* in = c.gathered.get<float>(2 * static_cast<int64_t>(count) * width);
    float* out = in + static_cast<int64_t>(count) * width;
    for (int32_t i = 0; i < count; ++i)
      std::copy_n(rows + static_cast<int64_t>(choices[i].token) * width, width,
                  in + static_cast<int64_t>(i) * width);
    feed_forward(c, expert, {in, width, count, width}, out, width, false);
    for (int32_t i = 0; i < count; ++i)
      add_scaled(c.row(RL_H, choices[i].token), out + static_cast<int64_t>(i) * width,
                 choices[i].weight, width);
  }

  // Appends a token's experts and their weights. `scores` holds its logits, and is overwritten.
  void choose(float* scores, int32_t token, std::vector<std::vector<Choice>>& chosen) const {
    int n = routing.num_experts;
    if (routing.scoring == RL_SOFTMAX) {
      float largest = *std::max_element(scores, scores + n), total = 0;
      for (int e = 0; e < n; ++e) total += scores[e] = std::exp(scores[e] - largest);
      for (int e = 0; e < n; ++e) scores[e] /= total;
    } else {
      for (int e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    }
    std::vector<float> ranking(scores, scores + n);
    for (int e = 0; correction && e < n; ++e) ranking[e] += correction[e];
    if (routing.num_groups) bar_groups(ranking);
    std::vector<int> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + routing.top_k, order.end(), [&](int a, int b) {
      return ranking[a] != ranking[b] ? ranking[a] > ranking[b] : a < b;
    });
    float total = kTiny;
    for (int i = 0; i < routing.top_k; ++i) total += scores[order[i]];
    for (int i = 0; i < routing.top_k; ++i) {
      float weight = routing.normalised ? scores[order[i]] / total : scores[order[i]];
      chosen[order[i]].push_back({token, weight * routing.scale});
    }
  }

  // Experts outside the best groups cannot be chosen.
  void bar_groups(std::vector<float>& ranking) const {
    int size = routing.num_experts / routing.num_groups;
    std::vector<float> worth;
    for (int g = 0; g < routing.num_groups; ++g) {
      std::vector<float> group(ranking.begin() + g * size, ranking.begin() + (g + 1) * size);
      std::sort(group.begin(), group.end(), std::greater<>());
      worth.push_back(group[0] + (routing.group_best_two && size > 1 ? group[1] : 0.0f));
    }
    std::vector<int> order(worth.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return worth[a] > worth[b]; });
    for (size_t i = static_cast<size_t>(routing.top_groups); i < order.size(); ++i)
      std::fill_n(ranking.begin() + order[i] * size, size, -INFINITY);
  }
};

}  // namespace

std::unique_ptr<Op> make_moe(int source, const rl_routing& routing, const rl_linear& router,
                             const float* correction, const rl_linear* gate, const rl_linear* up,
                             const rl_linear* down, const rl_activation& activation) {
  auto op = std::make_unique<MoEOp>();
  op->source = source, op->routing = routing, op->router = router, op->correction = correction;
  for (int e = 0; e < routing.num_experts; ++e)
    op->experts.push_back({gate[e], up[e], down[e], activation});
  return op;
}

}  // namespace rl
