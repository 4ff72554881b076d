// Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), in its recurrent form.
#include "head_matrix.h"
#include "short_conv.h"

namespace rl {
namespace {

struct GatedDelta : Op {
  rl_gated_delta shape;
  Convolution convolution;
  HeadMatrices matrices;
  StateInputs inputs;
  const float *decay_log, *decay_bias, *gain;
  rl_norm norm;

  GatedDelta(const rl_gated_delta& shape, Convolution conv, int64_t kept)
      : shape(shape),
        convolution(std::move(conv)),
        matrices{convolution.end(), shape.num_value_heads, shape.key_dim, shape.value_dim},
        inputs{kept, convolution.channels, 2 * shape.num_value_heads} {}

  int32_t keys() const { return shape.num_key_heads * shape.key_dim; }
  int32_t values() const { return shape.num_value_heads * shape.value_dim; }
  float* out(const Context& c, int32_t row) const {  // dense, as OutProject reads it
    return c.buffers[RL_H] + static_cast<int64_t>(row) * values();
  }

  void run(Context& c) const override {
    const int32_t num_rows = inputs.exchange(c);
    convolution.run(
        c, [&](int32_t row, int32_t i, int n) { return load_some(c.row(RL_QUERY, row) + i, n); },
        [&](int32_t row, int32_t i, int n, vf sum) {
          store_some(c.row(RL_QUERY, row) + i, sum * sigmoid(sum), n);
        });
    for_tokens(c.pool, num_rows, [&](int32_t row) { prepare(c, row); });
    int32_t shared = shape.num_value_heads / shape.num_key_heads;
    matrices.run(
        c,
        [&](int32_t row, int32_t head) {
          return c.row(RL_QUERY, row) + 2 * keys() + head * shape.value_dim;
        },
        [&](int32_t row, int32_t head) { return out(c, row) + head * shape.value_dim; },
        [&](HeadMatrix& matrix, int32_t row, int32_t head, float* value) {
          const float* query = c.row(RL_QUERY, row) + head / shared * shape.key_dim;
          const float* factors = c.row(RL_VALUE, row) + head;
          step(matrix, query, query + keys(), factors[0], factors[shape.num_value_heads], value);
        });
    for_tokens(c.pool, c.num_tokens(), [&](int32_t row) { finish(c, row); });
  }

  // Queries and keys of length 1, and what beta and decay are made to.
  void prepare(const Context& c, int32_t row) const {
    float* query = c.row(RL_QUERY, row);
    for (int32_t head = 0; head < shape.num_key_heads; ++head) {
      scale_to_length(query + head * shape.key_dim,
                      1 / std::sqrt(static_cast<float>(shape.key_dim)));
      scale_to_length(query + keys() + head * shape.key_dim, 1.0f);
    }
    float *beta = c.row(RL_VALUE, row), *decay = beta + shape.num_value_heads;
    for (int32_t head = 0; head < shape.num_value_heads; ++head) {
      beta[head] = 1 / (1 + std::exp(-beta[head]));
      decay[head] =
          std::exp(-std::exp(decay_log[head]) * softplus(decay[head] + decay_bias[head]));
    }
  }

  void scale_to_length(float* x, float length) const {
    vf squares{};
    over(shape.key_dim, [&](int i, int n) {
      vf part = load_some(x + i, n);
      squares = fma(part, part, squares);
    });
    float scale = length / std::sqrt(sum(squares) + 1e-6f);
    over(shape.key_dim, [&](int i, int n) { store_some(x + i, load_some(x + i, n) * scale, n); });
  }

  // One token: `value` becomes the output.
  static void step(HeadMatrix& matrix, const float* query, const float* key, float beta,
                   float decay, float* value) {
    vf sums[HeadMatrix::kVectors], change[HeadMatrix::kVectors];
    matrix.read(key, sums);
    RL_UNROLL
    for (int j = 0; j < HeadMatrix::kVectors; ++j)
      change[j] = (load(value + j * W) - sums[j] * decay) * beta;
    matrix.update(decay, key, change, query, sums);
    RL_UNROLL
    for (int j = 0; j < HeadMatrix::kVectors; ++j) store(value + j * W, sums[j]);
  }

  // Each head's output, normed and gated.
  void finish(const Context& c, int32_t row) const {
    const float* gate = c.row(RL_KEY, row);
    float* rows = out(c, row);
    for (int32_t head = 0; head < shape.num_value_heads; ++head) {
      float* x = rows + head * shape.value_dim;
      normalise(norm, x, gain, nullptr, shape.value_dim, x);
      const float* g = gate + head * shape.value_dim;
      over(shape.value_dim, [&](int i, int n) {
        vf each = load_some(g + i, n);
        store_some(x + i, load_some(x + i, n) * (each * sigmoid(each)), n);
      });
    }
  }
};

}  // namespace

std::unique_ptr<Op> make_gated_delta(int64_t offset, int64_t& inputs, const rl_gated_delta& shape,
                                     const float* conv, const float* decay_log, const float* decay_bias,
                                     const float* gain, const rl_norm& norm) {
  int32_t channels =
      2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim;
  auto op = std::make_unique<GatedDelta>(
      shape, Convolution(offset, channels, shape.conv_length, conv, nullptr), inputs);
  inputs = op->inputs.end();
  op->decay_log = decay_log, op->decay_bias = decay_bias, op->gain = gain, op->norm = norm;
  return op;
}

}  // namespace rl
