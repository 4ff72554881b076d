// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), the expansion of K and V absorbed
// into q and the output, for prefill and decode alike.
#include <algorithm>

#include "elementwise.h"
#include "program.h"

namespace rl {
namespace {

struct LatentProject : Op {
  int source, latent_dim;
  rl_linear query_latent, query, latent;
  const float *query_norm, *latent_norm;
  rl_norm norm;

  void run(Context& c) const override {
    Rows rows = c.rows(source, latent.matrix.columns);
    Target key{&latent, c.buffers[RL_KEY], c.widths[RL_KEY]};
    apply(c, rows, &key, 1, true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      normalise(norm, c.row(RL_KEY, t), latent_norm, nullptr, latent_dim, c.row(RL_KEY, t));
    });
    Target target{&query, c.buffers[RL_QUERY], c.widths[RL_QUERY]};
    if (!query_latent.matrix.data) return apply(c, rows, &target, 1, true);
    int32_t width = query_latent.matrix.rows;
    float* low = c.gathered.get<float>(static_cast<int64_t>(c.num_tokens()) * width);
    Target first{&query_latent, low, width};
    apply(c, rows, &first, 1, true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* row = low + static_cast<int64_t>(t) * width;
      normalise(norm, row, query_norm, nullptr, width, row);
    });
    apply(c, {low, width, c.num_tokens(), width}, &target, 1, true);
  }
};

struct LatentAttend : Op {
  int group, layer, nope_dim, rope_dim;
  rl_attention attention;
  std::vector<rl_linear> key_up, value_up;

  void run(Context& c) const override {
    int heads = attention.num_heads, latent_dim = attention.out_width;
    int32_t num_tokens = c.num_tokens(), query_dim = nope_dim + rope_dim;
    int32_t wide = latent_dim + rope_dim, v_dim = value_up[0].matrix.rows;
    float* queries = c.inner.get<float>(static_cast<int64_t>(num_tokens) * heads * wide);
    float* mixed = c.up.get<float>(static_cast<int64_t>(num_tokens) * heads * latent_dim);
    std::vector<Rows> rows;
    std::vector<Target> targets;
    for (int h = 0; h < heads; ++h) {
      rows.push_back(
          {c.buffers[RL_QUERY] + h * query_dim, c.widths[RL_QUERY], num_tokens, nope_dim});
      targets.push_back({&key_up[h], queries + h * wide, static_cast<int64_t>(heads) * wide});
    }
    apply_each(c, rows.data(), targets.data(), heads);
    for_tokens(c.pool, num_tokens, [&](int32_t t) {
      for (int h = 0; h < heads; ++h)
        std::copy_n(c.row(RL_QUERY, t) + h * query_dim + nope_dim, rope_dim,
                    queries + (static_cast<int64_t>(t) * heads + h) * wide + latent_dim);
    });
    attend(c, group, layer, attention, queries, int64_t{heads} * wide, mixed);
    for (int h = 0; h < heads; ++h) {
      rows[h] = {mixed + h * latent_dim, static_cast<int64_t>(heads) * latent_dim, num_tokens,
                 latent_dim};
      targets[h] = {&value_up[h], c.buffers[RL_H] + h * v_dim, static_cast<int64_t>(heads) * v_dim};
    }
    apply_each(c, rows.data(), targets.data(), heads);
  }
};

}  // namespace

std::unique_ptr<Op> make_latent_project(int source, const rl_linear* query_latent,
                                        const float* query_norm, const rl_linear& query,
                                        const rl_linear& latent, const float* latent_norm,
                                        int latent_dim, const rl_norm& norm) {
  auto op = std::make_unique<LatentProject>();
  op->source = source, op->latent_dim = latent_dim;
  op->query_latent = query_latent ? *query_latent : rl_linear{};
  op->query = query, op->latent = latent;
  op->query_norm = query_norm, op->latent_norm = latent_norm, op->norm = norm;
  return op;
}

std::unique_ptr<Op> make_latent_attend(int group, int layer, const rl_attention& attention,
                                       const rl_linear* key_up, const rl_linear* value_up,
                                       int nope_dim, int rope_dim) {
  auto op = std::make_unique<LatentAttend>();
  op->group = group, op->layer = layer, op->attention = attention;
  op->nope_dim = nope_dim, op->rope_dim = rope_dim;
  op->key_up.assign(key_up, key_up + attention.num_heads);
  op->value_up.assign(value_up, value_up + attention.num_heads);
  return op;
}

}  // namespace rl
