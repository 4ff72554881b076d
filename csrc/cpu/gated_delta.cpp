// Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), in its recurrent form
// for prompts as well: token by token in one order.
#include "short_conv.h"

namespace rl {
namespace {

constexpr int32_t kColumns = 32;  // of a head's matrix, of a tile
constexpr int kVectors = kColumns / W;
constexpr int kChains = 4;  // sums in flight of each column

struct GatedDelta : Op {
  rl_gated_delta shape;
  Convolution convolution;
  int64_t offset;  // of the heads' matrices in the state
  const float *decay_log, *decay_bias, *gain;
  rl_norm norm;

  GatedDelta(const rl_gated_delta& shape, Convolution conv)
      : shape(shape),
        convolution(std::move(conv)),
        offset(convolution.offset +
               static_cast<int64_t>(convolution.length - 1) * convolution.channels) {}

  int32_t keys() const { return shape.num_key_heads * shape.key_dim; }
  int32_t values() const { return shape.num_value_heads * shape.value_dim; }
  float* out(const Context& c, int32_t row) const {  // dense, as OutProject reads it
    return c.buffers[RL_H] + static_cast<int64_t>(row) * values();
  }

  void run(Context& c) const override {
    convolution.run(
        c, [&](int32_t row, int32_t i, int n) { return load_some(c.row(RL_QUERY, row) + i, n); },
        [&](int32_t row, int32_t i, int n, vf sum) {
          store_some(c.row(RL_QUERY, row) + i, sum * sigmoid(sum), n);
        });
    for_tokens(c.pool, c.num_tokens(), [&](int32_t row) { prepare(c, row); });
    int32_t parts = static_cast<int32_t>(ceil_div(shape.value_dim, kColumns));
    int64_t tiles = static_cast<int64_t>(parts) * shape.num_value_heads;
    c.pool.run(c.batch.num_sequences * tiles, [&](int64_t tile, int) {
      int32_t part = static_cast<int32_t>(tile % tiles);
      run_tile(c, c.batch.sequences[tile / tiles], part / parts, part % parts * kColumns);
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
      float x = decay[head] + decay_bias[head];
      float softplus = x > 20 ? x : std::log1p(std::exp(x));
      decay[head] = std::exp(-std::exp(decay_log[head]) * softplus);
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

  // Columns from `first` on of one head's matrix, through all tokens of a sequence.
  void run_tile(const Context& c, const rl_sequence& sequence, int32_t head, int32_t first) const {
    int32_t count = std::min(kColumns, shape.value_dim - first), rows = shape.key_dim;
    int32_t key_head = head / (shape.num_value_heads / shape.num_key_heads);
    int64_t place = offset + static_cast<int64_t>(head) * rows * shape.value_dim + first;
    alignas(64) float matrix[RL_MAX_KEY_DIM * kColumns] = {};
    if (sequence.start)
      for (int32_t i = 0; i < rows; ++i)
        std::copy_n(sequence.state + place + i * shape.value_dim, count, matrix + i * kColumns);
    auto store_matrix = [&](float* state) {
      for (int32_t i = 0; i < rows; ++i)
        std::copy_n(matrix + i * kColumns, count, state + place + i * shape.value_dim);
    };
    for (int32_t t = 0; t < sequence.num_tokens; ++t) {
      save_states(sequence, sequence.start + t, store_matrix);
      int32_t row = sequence.first_row + t;
      const float* query = c.row(RL_QUERY, row) + key_head * rows;
      const float* factors = c.row(RL_VALUE, row) + head;
      alignas(64) float value[kColumns] = {};
      std::copy_n(c.row(RL_QUERY, row) + 2 * keys() + head * shape.value_dim + first, count, value);
      step(matrix, query, query + keys(), factors[0], factors[shape.num_value_heads], value);
      std::copy_n(value, count, out(c, row) + head * shape.value_dim + first);
    }
    store_matrix(sequence.state);
  }

  // One token: `value` becomes the output.
  void step(float* matrix, const float* query, const float* key, float beta, float decay,
            float* value) const {
    vf sums[kChains][kVectors] = {};
    for_rows([&](int32_t i, int chain) {
      RL_UNROLL
      for (int j = 0; j < kVectors; ++j)
        sums[chain][j] = fma(load(matrix + i * kColumns + j * W), splat(key[i]), sums[chain][j]);
    });
    vf change[kVectors];
    RL_UNROLL
    for (int j = 0; j < kVectors; ++j)
      change[j] = (load(value + j * W) - total(sums, j) * decay) * beta;
    RL_UNROLL
    for (int chain = 0; chain < kChains; ++chain)
      for (int j = 0; j < kVectors; ++j) sums[chain][j] = vf{};
    for_rows([&](int32_t i, int chain) {
      RL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        float* place = matrix + i * kColumns + j * W;
        vf changed = fma(splat(key[i]), change[j], load(place) * decay);
        store(place, changed);
        sums[chain][j] = fma(changed, splat(query[i]), sums[chain][j]);
      }
    });
    RL_UNROLL
    for (int j = 0; j < kVectors; ++j) store(value + j * W, total(sums, j));
  }

  // Calls body(row, chain) for the rows of a matrix, which take the chains by turns.
  template <class Body>
  RL_INLINE void for_rows(const Body& body) const {
    int32_t i = 0;
    for (; i + kChains <= shape.key_dim; i += kChains) {
      RL_UNROLL
      for (int chain = 0; chain < kChains; ++chain) body(i + chain, chain);
    }
    for (int chain = 0; i + chain < shape.key_dim; ++chain) body(i + chain, chain);
  }

  static vf total(const vf (&sums)[kChains][kVectors], int j) {
    return (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
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

std::unique_ptr<Op> make_gated_delta(int64_t offset, const rl_gated_delta& shape, const float* conv,
                                     const float* decay_log, const float* decay_bias,
                                     const float* gain, const rl_norm& norm) {
  int32_t channels =
      2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim;
  auto op = std::make_unique<GatedDelta>(
      shape, Convolution(offset, channels, shape.conv_length, conv, nullptr));
  op->decay_log = decay_log, op->decay_bias = decay_bias, op->gain = gain, op->norm = norm;
  return op;
}

}  // namespace rl
