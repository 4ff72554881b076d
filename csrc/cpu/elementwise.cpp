#include "elementwise.h"

namespace rl {
namespace {

// The error function to about 4e-7: x P(x^2) / Q(x^2), minimax for |x| <= 3.95, beyond which it is 1
// in single precision.
vf erf(vf x) {
  vf bounded = max(min(x, splat(3.95f)), splat(-3.95f));
  vf s = bounded * bounded;
  vf p = splat(2.011848903e-06f);
  p = fma(p, s, splat(2.875851626e-04f));
  p = fma(p, s, splat(3.916659786e-03f));
  p = fma(p, s, splat(5.320503096e-02f));
  p = fma(p, s, splat(1.940203853e-01f));
  p = fma(p, s, splat(1.128379007e+00f));
  vf q = splat(3.784001166e-05f);
  q = fma(q, s, splat(1.198040055e-03f));
  q = fma(q, s, splat(1.526938668e-02f));
  q = fma(q, s, splat(1.155844188e-01f));
  q = fma(q, s, splat(5.052775824e-01f));
  q = fma(q, s, splat(1.0f));
  return select((vi)(x == x), bounded * p / q, x);
}

vf gelu(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }

vf gelu_tanh(vf x) {
  vf inner = 0.79788456f * fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// What is not a number stays so.
inline vf relu(vf x) { return select((vi)(x > 0.0f), x, (x != x) ? x : vf{}); }

// out = function(gate) * up, or of up alone.
template <class Function>
void activate_with(const Function& function, const float* gate, const float* up, int32_t width,
                   float* out) {
  if (gate) {
    over(width, [&](int i, int n) {
      store_some(out + i, function(load_some(gate + i, n)) * load_some(up + i, n), n);
    });
  } else {
    over(width, [&](int i, int n) { store_some(out + i, function(load_some(up + i, n)), n); });
  }
}

// In this order what is not a number stays so: comparisons with it give the second operand.
void activate_clamped(const rl_activation& activation, const float* gate, const float* up,
                      int32_t width, float* out) {
  vf limit = splat(activation.limit);
  over(width, [&](int i, int n) {
    vf g = min(limit, load_some(gate + i, n));
    vf u = max(-limit, min(limit, load_some(up + i, n)));
    store_some(out + i, (u + 1.0f) * g * sigmoid(activation.alpha * g), n);
  });
}

}  // namespace

void normalise(const rl_norm& norm, const float* x, const float* weight, const float* bias,
               int32_t width, float* out) {
  float mean = 0;
  if (norm.kind == RL_LAYER_NORM) {
    vf total{};
    over(width, [&](int i, int n) { total += load_some(x + i, n); });
    mean = sum(total) / static_cast<float>(width);
  }
  vf squares{};
  over(width, [&](int i, int n) {
    vf centred = load_some(x + i, n) - mean;
    if (n < W)
      for (int lane = n; lane < W; ++lane) centred[lane] = 0;
    squares = fma(centred, centred, squares);
  });
  float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + norm.eps);
  float offset = norm.unit_offset ? 1.0f : 0.0f;
  over(width, [&](int i, int n) {
    vf value = (load_some(x + i, n) - mean) * inverse;
    if (weight) value *= load_some(weight + i, n) + offset;
    if (bias) value += load_some(bias + i, n);
    store_some(out + i, value, n);
  });
}

void rotate(float* x, const float* cos, const float* sin, int half, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  over(half, [&](int i, int n) {
    vf a = load_some(x + i, n), b = load_some(x + half + i, n);
    vf c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(x + i, a * c - b * s, n);
    store_some(x + half + i, b * c + a * s, n);
  });
}

void activate(const rl_activation& activation, const float* gate, const float* up, int32_t width,
              float* out) {
  switch (activation.kind) {
    case RL_SILU:
      return activate_with([](vf x) { return x * sigmoid(x); }, gate, up, width, out);
    case RL_GELU:
      return activate_with(gelu, gate, up, width, out);
    case RL_GELU_TANH:
      return activate_with(gelu_tanh, gate, up, width, out);
    case RL_CLAMPED_SWIGLU:
      return activate_clamped(activation, gate, up, width, out);
    case RL_RELU_SQUARED:
      return activate_with([](vf x) { return relu(x) * relu(x); }, gate, up, width, out);
    case RL_IDENTITY:
      return activate_with([](vf x) { return x; }, gate, up, width, out);
    default:
      return activate_with(relu, gate, up, width, out);
  }
}

void xielu(const rl_xielu& f, float* x, int32_t width) {
  over(width, [&](int i, int n) {
    vf v = load_some(x + i, n);
    vf above = f.rise * v * v, below = f.fall * (exp(min(splat(f.eps), v)) - 1.0f - v);
    store_some(x + i, select((vi)(v > 0.0f), above, below) + f.beta * v, n);
  });
}

void add_scaled(float* x, const float* h, float scale, int32_t width) {
  over(width, [&](int i, int n) {
    store_some(x + i, fma(load_some(h + i, n), splat(scale), load_some(x + i, n)), n);
  });
}

void soft_cap(float* x, float cap, int64_t count) {
  over(static_cast<int32_t>(count), [&](int i, int n) {
    store_some(x + i, tanh(load_some(x + i, n) / cap) * cap, n);
  });
}

}  // namespace rl
