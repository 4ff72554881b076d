// Mamba-2's state space (Dao and Gu 2024, arXiv 2405.21060), in its recurrent form.
#include "head_matrix.h"
#include "short_conv.h"

namespace rl {
namespace {

struct SelectiveScan : Op {
  rl_selective_scan shape;
  Convolution convolution;
  HeadMatrices matrices;
  StateInputs inputs;
  const float *decay_log, *step_bias, *skip, *gain;
  rl_norm norm;

  SelectiveScan(const rl_selective_scan& shape, Convolution conv, int64_t kept)
      : shape(shape),
        convolution(std::move(conv)),
        matrices{convolution.end(), shape.num_heads, shape.state_dim, shape.head_dim},
        inputs{kept, convolution.channels, shape.num_heads} {}

  int32_t inner() const { return shape.num_heads * shape.head_dim; }
  float* out(const Context& c, int32_t row) const {  // dense, as OutProject reads it
    return c.buffers[RL_H] + static_cast<int64_t>(row) * inner();
  }

  void run(Context& c) const override {
    const int32_t num_rows = inputs.exchange(c);
    convolution.run(
        c, [&](int32_t row, int32_t i, int n) { return load_some(c.row(RL_QUERY, row) + i, n); },
        [&](int32_t row, int32_t i, int n, vf sum) {
          store_some(c.row(RL_QUERY, row) + i, sum * sigmoid(sum), n);
        });
    for_tokens(c.pool, num_rows, [&](int32_t row) { prepare(c, row); });
    int32_t shared = shape.num_heads / shape.num_groups;
    matrices.run(
        c,
        [&](int32_t row, int32_t head) { return c.row(RL_QUERY, row) + head * shape.head_dim; },
        [&](int32_t row, int32_t head) { return out(c, row) + head * shape.head_dim; },
        [&](HeadMatrix& matrix, int32_t row, int32_t head, float* values) {
          const float* write = c.row(RL_QUERY, row) + inner() + head / shared * shape.state_dim;
          const float* read = write + shape.num_groups * shape.state_dim;
          const float* step = c.row(RL_VALUE, row) + head;
          vf change[HeadMatrix::kVectors], sums[HeadMatrix::kVectors];
          RL_UNROLL
          for (int j = 0; j < HeadMatrix::kVectors; ++j) change[j] = load(values + j * W) * step[0];
          matrix.update(step[shape.num_heads], write, change, read, sums);
          RL_UNROLL
          for (int j = 0; j < HeadMatrix::kVectors; ++j)
            store(values + j * W, fma(load(values + j * W), splat(skip[head]), sums[j]));
        });
    for_tokens(c.pool, c.num_tokens(), [&](int32_t row) { finish(c, row); });
  }

  // Steps, and behind them how much of its matrix each head keeps.
  void prepare(const Context& c, int32_t row) const {
    float *step = c.row(RL_VALUE, row), *decay = step + shape.num_heads;
    for (int32_t head = 0; head < shape.num_heads; ++head) {
      step[head] = softplus(step[head] + step_bias[head]);
      decay[head] = std::exp(-std::exp(decay_log[head]) * step[head]);
    }
  }

  // Outputs gated, and normed in groups.
  void finish(const Context& c, int32_t row) const {
    const float* gate = c.row(RL_KEY, row);
    float* rows = out(c, row);
    over(inner(), [&](int i, int n) {
      vf each = load_some(gate + i, n);
      store_some(rows + i, load_some(rows + i, n) * (each * sigmoid(each)), n);
    });
    int32_t width = inner() / shape.num_groups;
    for (int32_t first = 0; first < inner(); first += width)
      normalise(norm, rows + first, gain + first, nullptr, width, rows + first);
  }
};

}  // namespace

std::unique_ptr<Op> make_selective_scan(int64_t offset, int64_t& inputs,
                                        const rl_selective_scan& shape,
                                        const float* conv, const float* conv_bias,
                                        const float* decay_log, const float* step_bias,
                                        const float* skip, const float* gain,
                                        const rl_norm& norm) {
  int32_t channels =
      shape.num_heads * shape.head_dim + 2 * shape.num_groups * shape.state_dim;
  auto op = std::make_unique<SelectiveScan>(
      shape, Convolution(offset, channels, shape.conv_length, conv, conv_bias), inputs);
  inputs = op->inputs.end();
  op->decay_log = decay_log, op->step_bias = step_bias, op->skip = skip;
  op->gain = gain, op->norm = norm;
  return op;
}

}  // namespace rl
