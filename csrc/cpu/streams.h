// Several residual streams (AltUp): RL_STREAMS is [T, n, D], the first of which layers compute in RL_X.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"
#include "program.h"

namespace rl {

inline float mean_square(const float* x, int32_t width) {
  vf squares{};
  over(width, [&](int i, int n) {
    vf v = load_some(x + i, n);
    if (n < W)
      for (int lane = n; lane < W; ++lane) v[lane] = 0;
    squares = fma(v, v, squares);
  });
  return sum(squares) / static_cast<float>(width);
}

// Scales x to the root mean square of another row.
inline void scale_like(const float* other, int32_t width, float* x) {
  constexpr float kLeastSquare = 1e-5f;
  float own = std::max(mean_square(x, width), kLeastSquare);
  float factor = std::sqrt(mean_square(other, width) / own);
  for (int32_t i = 0; i < width; ++i) x[i] *= factor;
}

// What factors of mixtures are made by: coefs . tanh(router . norm(row) / D).
struct StreamRouter {
  rl_linear router;  // [n, D]
  const float *gain, *coefs;
  rl_norm norm;
  int32_t num_factors;  // rows of coefs

  int32_t num_streams() const { return router.matrix.rows; }
  int32_t width() const { return router.matrix.columns; }

  // Factors [T, num_factors] of rows of a buffer, which are there until `inner` is used again.
  const float* factors(Context& c, int buffer) const {
    int32_t streams = num_streams(), hidden = width(), tokens = c.num_tokens();
    float* normed = c.gathered.get<float>(int64_t{tokens} * hidden);
    for_tokens(c.pool, tokens, [&](int32_t t) {
      float* row = normed + int64_t{t} * hidden;
      normalise(norm, c.row(buffer, t), gain, nullptr, hidden, row);
      for (int32_t i = 0; i < hidden; ++i) row[i] /= static_cast<float>(hidden);
    });
    float* factors = c.inner.get<float>(int64_t{tokens} * (num_factors + streams));
    float* routed = factors + int64_t{tokens} * num_factors;
    Target target{&router, routed, streams};
    apply(c, {normed, hidden, tokens, hidden}, &target, 1, true);
    for_tokens(c.pool, tokens, [&](int32_t t) {
      float *m = routed + int64_t{t} * streams, *out = factors + int64_t{t} * num_factors;
      for (int32_t i = 0; i < streams; ++i) m[i] = std::tanh(m[i]);
      for (int32_t f = 0; f < num_factors; ++f) {
        out[f] = 0;
        for (int32_t i = 0; i < streams; ++i) out[f] += coefs[f * streams + i] * m[i];
      }
    });
    return factors;
  }
};

struct SplitStreams : Op {
  std::vector<rl_linear> linears;

  void run(Context& c) const override {
    int32_t width = c.widths[RL_X];
    std::vector<Target> targets;
    for (const rl_linear& linear : linears) {
      float* first = c.buffers[RL_STREAMS] + (targets.size() + 1) * width;
      targets.push_back({&linear, first, c.widths[RL_STREAMS]});
    }
    apply(c, c.rows(RL_X, width), targets.data(), static_cast<int>(targets.size()), true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      const float* x = c.row(RL_X, t);
      float* streams = c.row(RL_STREAMS, t);
      std::copy_n(x, width, streams);
      for (size_t k = 1; k <= linears.size(); ++k) scale_like(x, width, streams + k * width);
    });
  }
};

struct PredictStreams : Op {
  StreamRouter router;

  void run(Context& c) const override {
    int32_t count = router.num_streams(), width = router.width();
    const float* factors = router.factors(c, RL_STREAMS);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* streams = c.row(RL_STREAMS, t);
      const float* own = factors + int64_t{t} * router.num_factors;
      over(width, [&](int at, int n) {
        vf before[RL_MAX_STREAMS];
        for (int32_t i = 0; i < count; ++i) before[i] = load_some(streams + i * width + at, n);
        for (int32_t j = 0; j < count; ++j) {
          vf after = before[j];
          for (int32_t i = 0; i < count; ++i) after = fma(before[i], splat(own[j * count + i]), after);
          store_some(streams + j * width + at, after, n);
        }
      });
      std::copy_n(streams, width, c.row(RL_X, t));
    });
  }
};

struct CorrectStreams : Op {
  StreamRouter router;
  const float* scale;  // [D] or null

  void run(Context& c) const override {
    int32_t count = router.num_streams(), width = router.width();
    const float* factors = router.factors(c, RL_X);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float *streams = c.row(RL_STREAMS, t), *x = c.row(RL_X, t);
      const float* own = factors + int64_t{t} * router.num_factors;
      over(width, [&](int at, int n) {
        vf change = load_some(x + at, n) - load_some(streams + at, n);
        for (int32_t j = 0; j < count; ++j) {
          float* stream = streams + j * width + at;
          store_some(stream, fma(change, splat(1 + own[j]), load_some(stream, n)), n);
        }
        vf first = load_some(streams + at, n);
        store_some(x + at, scale ? first * load_some(scale + at, n) : first, n);
      });
    });
  }
};

struct AddToStreams : Op {
  int32_t num_streams;

  void run(Context& c) const override {
    int32_t width = c.widths[RL_X];
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      for (int32_t j = 1; j < num_streams; ++j)
        add_scaled(c.row(RL_STREAMS, t) + j * width, c.row(RL_H, t), 1.0f, width);
    });
  }
};

struct JoinStreams : Op {
  std::vector<rl_linear> linears;

  void run(Context& c) const override {
    int32_t width = c.widths[RL_X], tokens = c.num_tokens();
    int64_t stride = c.widths[RL_STREAMS];
    float* joined = c.inner.get<float>(int64_t{tokens} * width);
    for_tokens(c.pool, tokens,
               [&](int32_t t) { std::copy_n(c.row(RL_STREAMS, t), width, c.row(RL_X, t)); });
    for (size_t k = 1; k <= linears.size(); ++k) {
      Target target{&linears[k - 1], joined, width};
      apply(c, {c.buffers[RL_STREAMS] + k * width, stride, tokens, width}, &target, 1, true);
      for_tokens(c.pool, tokens, [&](int32_t t) {
        float* row = joined + int64_t{t} * width;
        scale_like(c.row(RL_STREAMS, t), width, row);
        add_scaled(c.row(RL_X, t), row, 1.0f, width);
      });
    }
    float part = 1.0f / static_cast<float>(linears.size() + 1);
    for_tokens(c.pool, tokens, [&](int32_t t) {
      float* x = c.row(RL_X, t);
      for (int32_t i = 0; i < width; ++i) x[i] *= part;
    });
  }
};

// x = (x + h + n + shared) / sqrt(2).
struct AddLaurel : Op {
  void run(Context& c) const override {
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float *x = c.row(RL_X, t), *h = c.row(RL_H, t), *n = c.row(RL_N, t);
      float* shared = c.row(RL_SHARED, t);
      for (int32_t i = 0; i < c.widths[RL_X]; ++i)
        x[i] = (x[i] + h[i] + n[i] + shared[i]) * std::sqrt(0.5f);
    });
  }
};

// RL_INNER = act(max(0, g - mean(g) - cutoff * deviation(g))) * (up . source), g = gate . source.
struct SparseGateUp : Op {
  int source;
  rl_linear gate, up;
  rl_activation activation;
  float cutoff;

  void run(Context& c) const override {
    int32_t width = up.matrix.rows;
    float* ups = c.up.get<float>(int64_t{c.num_tokens()} * width);
    Target targets[] = {{&gate, c.buffers[RL_INNER], c.widths[RL_INNER]}, {&up, ups, width}};
    apply(c, c.rows(source, up.matrix.columns), targets, 2, true);
    for_tokens(c.pool, c.num_tokens(), [&](int32_t t) {
      float* gates = c.row(RL_INNER, t);
      double total = 0, squares = 0;
      for (int32_t i = 0; i < width; ++i) total += gates[i];
      float mean = static_cast<float>(total / width);
      for (int32_t i = 0; i < width; ++i) squares += (gates[i] - mean) * (gates[i] - mean);
      float least = mean + cutoff * static_cast<float>(std::sqrt(squares / width));
      for (int32_t i = 0; i < width; ++i) gates[i] = gates[i] <= least ? 0 : gates[i] - least;
      activate(activation, gates, ups + int64_t{t} * width, width, gates);
    });
  }
};

}  // namespace rl
