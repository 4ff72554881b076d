// The ops of a program that are small enough to stand together; attention over latents and mixtures
// of experts have files of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "kv_cache.h"
#include "matmul.h"
#include "program.h"

namespace rl {

struct Embed : Op {
  rl_matrix table;
  int32_t first_token;  // of its rows
  float scale;
  const float *positions, *types;  // tables, or null

  // Each token's row of the table; of those that it lacks, some row.
  void look_up(Context& c) const {
    const int32_t* tokens = c.batch.token_ids;
    std::vector<int32_t> rows;
    if (c.group) {
      rows.assign(tokens, tokens + c.num_tokens());
      for (int32_t& row : rows) row = std::clamp(row - first_token, 0, table.rows - 1);
      tokens = rows.data();
    }
    rl_unpack_rows(reinterpret_cast<rl_pool*>(&c.pool), &table, tokens, c.num_tokens(),
                   c.buffers[RL_X]);
  }

  void run(Context& c) const override {
    int32_t width = table.columns;
    look_up(c);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* x = c.row(RL_X, t);
      for (int32_t i = 0; i < width; ++i) x[i] *= scale;
      auto add = [&](const float* rows, int32_t row) {
        add_scaled(x, rows + static_cast<int64_t>(row) * width, 1.0f, width);
      };
      if (positions) add(positions, c.batch.positions[t]);
      if (types) add(types, c.batch.token_types ? c.batch.token_types[t] : 0);
    });
  }
};

struct Norm : Op {
  int source, target;
  rl_norm norm;
  const float *weight, *bias;
  int32_t width;

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      normalise(norm, c.row(source, t), weight, bias, width, c.row(target, t));
    });
  }
};

struct Project : Op {
  int source;
  std::vector<rl_linear> linears;  // to the buffers `targets`
  std::vector<int> targets;
  std::vector<int32_t> offsets;  // of each within its buffer's rows; empty: all 0
  float clip;                    // 0: none

  void run(Context& c) const override {
    std::vector<Target> products;
    for (size_t i = 0; i < linears.size(); ++i)
      products.push_back({&linears[i], c.buffers[targets[i]] + (offsets.empty() ? 0 : offsets[i]),
                          c.widths[targets[i]]});
    apply(c, c.rows(source, linears[0].matrix.columns), products.data(),
          static_cast<int>(products.size()), true);
    if (clip <= 0) return;
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      for (size_t i = 0; i < linears.size(); ++i) {
        float* row = c.row(targets[i], t);
        for (int32_t k = 0; k < linears[i].matrix.rows; ++k)
          row[k] = std::min(std::max(row[k], -clip), clip);
      }
    });
  }
};

struct HeadNorm : Op {
  rl_norm norm;
  int scope;
  const float *query_weight, *key_weight, *query_bias, *key_bias;
  int num_heads, num_kv_heads, head_dim;
  bool values;

  void normalise_heads(float* row, const float* weight, const float* bias, int heads) const {
    if (scope == RL_PROJECTION)
      return normalise(norm, row, weight, bias, heads * head_dim, row);
    for (int head = 0; head < heads; ++head) {
      int first = head * head_dim, own = scope == RL_EACH_HEAD ? first : 0;
      normalise(norm, row + first, weight ? weight + own : nullptr, bias ? bias + own : nullptr,
                head_dim, row + first);
    }
  }

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      normalise_heads(c.row(RL_QUERY, t), query_weight, query_bias, num_heads);
      normalise_heads(c.row(RL_KEY, t), key_weight, key_bias, num_kv_heads);
      if (values) normalise_heads(c.row(RL_VALUE, t), nullptr, nullptr, num_kv_heads);
    });
  }
};

struct Rope : Op {
  int table;
  bool interleaved;
  int num_heads, num_kv_heads, query_dim, key_dim, query_start, key_start;

  void run(Context& c) const override {
    const RopeTable& rope = c.ropes[table];
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      const float* cos = rope.cos + static_cast<int64_t>(t) * rope.half;
      const float* sin = rope.sin + static_cast<int64_t>(t) * rope.half;
      for (int h = 0; h < num_heads; ++h)
        rotate(c.row(RL_QUERY, t) + h * query_dim + query_start, cos, sin, rope.half, interleaved);
      for (int h = 0; h < num_kv_heads; ++h)
        rotate(c.row(RL_KEY, t) + h * key_dim + key_start, cos, sin, rope.half, interleaved);
    });
  }
};

struct KVWrite : Op {
  int group, layer;

  void run(Context& c) const override {
    write_kv(c, group, layer);
  }
};

struct GrowQueries : Op {
  float rate;
  int32_t length, offset, width;

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      auto turns = static_cast<float>((c.batch.positions[t] + offset) / length);
      float factor = 1 + rate * std::log1p(turns);
      float* row = c.row(RL_QUERY, t);
      for (int32_t i = 0; i < width; ++i) row[i] *= factor;
    });
  }
};

struct Attend : Op {
  int group, layer;
  rl_attention attention;

  void run(Context& c) const override {
    attend(c, group, layer, attention, c.buffers[RL_QUERY], c.widths[RL_QUERY], c.buffers[RL_H]);
  }
};

// h *= sigmoid(linear . source), for the dense rows that attention leaves.
struct GateHeads : Op {
  int source;
  rl_linear linear;

  void run(Context& c) const override {
    int32_t width = linear.matrix.rows;
    float* gates = c.inner.get<float>(static_cast<int64_t>(c.num_tokens()) * width);
    Target target{&linear, gates, width};
    apply(c, c.rows(source, linear.matrix.columns), &target, 1, true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      int64_t first = static_cast<int64_t>(t) * width;
      float *h = c.buffers[RL_H] + first, *gate = gates + first;
      over(width, [&](int i, int n) {
        store_some(h + i, load_some(h + i, n) * sigmoid(load_some(gate + i, n)), n);
      });
    });
  }
};

// h = out . h. All of h is in panels before any of it is written; adapters read it once more, and
// get a copy.
struct OutProject : Op {
  rl_linear linear;

  void run(Context& c) const override {
    int32_t columns = linear.matrix.columns;
    // Attention leaves its rows dense, whatever the buffer's width.
    Rows rows{c.buffers[RL_H], columns, c.num_tokens(), columns};
    if (c.adapters) {
      int64_t size = static_cast<int64_t>(c.num_tokens()) * columns;
      float* copy = c.gathered.get<float>(size);
      std::copy_n(c.buffers[RL_H], size, copy);
      rows.data = copy;
    }
    Target target{&linear, c.buffers[RL_H], c.widths[RL_H]};
    apply(c, rows, &target, 1, true);
  }
};

// What the output of a network is times: sigmoid(weight . source), for each token.
struct OutputGate {
  const float* weight;  // [D] or null: 1

  // The gates, which are there until `gathered` is used again; null without a weight.
  float* of(Context& c, int source, int32_t width) const {
    if (!weight) return nullptr;
    float* gates = c.gathered.get<float>(c.num_tokens());
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      const float* row = c.row(source, t);
      double sum = 0;
      for (int32_t i = 0; i < width; ++i) sum += static_cast<double>(row[i]) * weight[i];
      gates[t] = 1.0f / (1.0f + std::exp(-static_cast<float>(sum)));
    });
    return gates;
  }

  static void scale(Context& c, int target, int32_t width, const float* gates) {
    if (!gates) return;
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* row = c.row(target, t);
      for (int32_t i = 0; i < width; ++i) row[i] *= gates[t];
    });
  }
};

struct MLP : Op {
  int source, target;
  FeedForward network;
  OutputGate output_gate;

  void run(Context& c) const override {
    int32_t width = network.up.matrix.columns;
    float* gates = output_gate.of(c, source, width);
    feed_forward(c, network, c.rows(source, width), c.buffers[target], c.widths[target], true);
    OutputGate::scale(c, target, network.down.matrix.rows, gates);
  }
};

struct GateUp : Op {
  int source;
  FeedForward network;  // without `down`

  void run(Context& c) const override {
    Rows rows = c.rows(source, network.up.matrix.columns);
    gate_up(c, network, rows, c.buffers[RL_INNER], c.widths[RL_INNER], true);
  }
};

struct Xielu : Op {
  rl_xielu function;
  int32_t width;

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(),
               [&](int32_t t) { xielu(function, c.row(RL_INNER, t), width); });
  }
};

struct Down : Op {
  int target, source;
  rl_linear linear;
  OutputGate output_gate;

  void run(Context& c) const override {
    float* gates = output_gate.of(c, source, c.widths[RL_X]);
    Target product{&linear, c.buffers[target], c.widths[target]};
    apply(c, c.rows(RL_INNER, linear.matrix.columns), &product, 1, true);
    OutputGate::scale(c, target, linear.matrix.rows, gates);
  }
};

struct Gather : Op {
  int buffer;
  bool dense;
  std::vector<int64_t> first;  // bytes before each rank's part

  void run(Context& c) const override {
    int rank = c.group->rank();
    int64_t own = first[rank + 1] - first[rank], stride = c.widths[buffer] * int64_t{sizeof(float)};
    auto* rows = reinterpret_cast<uint8_t*>(c.buffers[buffer]);
    Parts parts{rows, dense ? own : stride, rows, dense ? first.back() : stride, first.data(),
                c.num_tokens()};
    if (!c.group->gather(c.pool, parts)) throw std::bad_alloc();
  }
};

struct GatherTokens : Op {
  std::vector<int32_t> first;  // token of each rank
  int32_t width;

  void run(Context& c) const override {
    std::vector<int32_t> owners(static_cast<size_t>(c.num_tokens()));
    for (int32_t t = 0; t < c.num_tokens(); ++t)
      owners[t] = static_cast<int32_t>(
          std::upper_bound(first.begin() + 1, first.end(), c.batch.token_ids[t]) - first.begin() - 1);
    bool fits = c.group->gather_rows(c.pool, reinterpret_cast<uint8_t*>(c.buffers[RL_X]),
                                     c.widths[RL_X] * int64_t{sizeof(float)},
                                     width * int64_t{sizeof(float)}, owners.data(), c.num_tokens());
    if (!fits) throw std::bad_alloc();
  }
};

// layers = (table[token ids] * sqrt(p) + norm(projection . x / sqrt(D))) / sqrt(2), for each p.
struct LayerEmbed : Op {
  rl_matrix table;
  rl_linear projection;
  const float* gain;
  rl_norm norm;
  int32_t width;  // p

  void run(Context& c) const override {
    std::vector<int32_t> rows(c.batch.token_ids, c.batch.token_ids + c.num_tokens());
    for (int32_t& row : rows) row = row < table.rows ? row : 0;
    rl_unpack_rows(reinterpret_cast<rl_pool*>(&c.pool), &table, rows.data(), c.num_tokens(),
                   c.buffers[RL_LAYERS]);
    int32_t all = projection.matrix.rows, hidden = projection.matrix.columns;
    float* projected = c.inner.get<float>(static_cast<int64_t>(c.num_tokens()) * all);
    Target target{&projection, projected, all};
    apply(c, c.rows(RL_X, hidden), &target, 1, true);
    float to_unit = 1 / std::sqrt(static_cast<float>(hidden));
    float of_row = std::sqrt(static_cast<float>(width)), half = std::sqrt(0.5f);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float *layers = c.row(RL_LAYERS, t), *own = projected + static_cast<int64_t>(t) * all;
      for (int32_t i = 0; i < all; ++i) own[i] *= to_unit;
      for (int32_t first = 0; first < all; first += width)
        normalise(norm, own + first, gain, nullptr, width, own + first);
      for (int32_t i = 0; i < all; ++i) layers[i] = (layers[i] * of_row + own[i]) * half;
    });
  }
};

// h = up . (act(gate . x) * a layer's part of layers).
struct LayerInput : Op {
  rl_linear gate, up;
  rl_activation activation;
  int32_t first;

  void run(Context& c) const override {
    int32_t width = gate.matrix.rows;
    float* gates = c.inner.get<float>(static_cast<int64_t>(c.num_tokens()) * width);
    Target inner{&gate, gates, width}, outer{&up, c.buffers[RL_H], c.widths[RL_H]};
    apply(c, c.rows(RL_X, gate.matrix.columns), &inner, 1, true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* row = gates + static_cast<int64_t>(t) * width;
      activate(activation, row, c.row(RL_LAYERS, t) + first, width, row);
    });
    apply(c, {gates, width, c.num_tokens(), width}, &outer, 1, true);
  }
};

struct ScaleHidden : Op {
  const float* factor;
  int32_t width;

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* x = c.row(RL_X, t);
      for (int32_t i = 0; i < width; ++i) x[i] *= *factor;
    });
  }
};

struct GatherRanges : Op {
  int buffer;
  int32_t width;

  void run(Context& c) const override {
    const rl_sequence *first = c.batch.sequences, *last = first + c.batch.num_sequences;
    if (std::none_of(first, last, [](const rl_sequence& s) { return s.cuts; })) return;
    auto ranks = c.group->num_ranks();
    auto tokens_of = [&](const rl_sequence& s) {
      return s.cuts ? s.cuts[ranks] - s.cuts[0] : s.num_tokens;
    };
    int64_t num_rows = last[-1].whole_row + tokens_of(last[-1]);
    float* whole = c.gathered.get<float>(num_rows * width);
    for (const rl_sequence* s = first; s < last; ++s) {
      float* to = whole + int64_t{s->whole_row} * width;
      int64_t before = s->cuts ? s->start - s->cuts[0] : 0;
      for_tokens(c.pool, s->num_tokens, [&](int32_t t) {
        std::copy_n(c.row(buffer, s->first_row + t), width, to + (before + t) * width);
      });
      if (!s->cuts) continue;
      std::vector<int32_t> owners;
      for (int r = 0; r < ranks; ++r) owners.insert(owners.end(), s->cuts[r + 1] - s->cuts[r], r);
      int64_t bytes = width * int64_t{sizeof(float)};
      if (!c.group->gather_rows(c.pool, reinterpret_cast<uint8_t*>(to), bytes, bytes, owners.data(),
                                tokens_of(*s)))
        throw std::bad_alloc();
    }
    for_tokens(c.pool, static_cast<int32_t>(num_rows),
               [&](int32_t t) { std::copy_n(whole + int64_t{t} * width, width, c.row(buffer, t)); });
  }
};

struct Add : Op {
  int source, target;
  float scale;
  int32_t width;

  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      add_scaled(c.row(target, t), c.row(source, t), scale, width);
    });
  }
};

}  // namespace rl
