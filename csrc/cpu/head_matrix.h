// Matrices that heads keep of a sequence, in its state: what linear attention and state spaces share.
// Token by token in one order, for prompts as well: so it makes no difference where one is cut.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "states.h"

namespace rl {

// Columns of one head's matrix, of which a tile has so many at most.
class HeadMatrix {
 public:
  static constexpr int32_t kColumns = 32;
  static constexpr int kVectors = kColumns / W;

  HeadMatrix(int32_t rows, int32_t count) : rows_(rows), count_(count) {}

  // From or to the state of a sequence, whose rows are `stride` apart.
  void load(const float* state, int64_t stride) {
    for (int32_t i = 0; i < rows_; ++i)
      std::copy_n(state + i * stride, count_, matrix_ + i * kColumns);
  }
  void store(float* state, int64_t stride) const {
    for (int32_t i = 0; i < rows_; ++i)
      std::copy_n(matrix_ + i * kColumns, count_, state + i * stride);
  }

  // sums = Σ_i key[i] · row i.
  RL_INLINE void read(const float* key, vf (&sums)[kVectors]) const {
    vf chains[kChains][kVectors] = {};
    for_rows([&](int32_t i, int chain) {
      RL_UNROLL
      for (int j = 0; j < kVectors; ++j)
        chains[chain][j] = fma(load_row(i, j), splat(key[i]), chains[chain][j]);
    });
    RL_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[j] = total(chains, j);
  }

  // Row i becomes decay · row i + key[i] · change; then as `read` with the query.
  RL_INLINE void update(float decay, const float* key, const vf (&change)[kVectors],
                        const float* query, vf (&sums)[kVectors]) {
    vf chains[kChains][kVectors] = {};
    for_rows([&](int32_t i, int chain) {
      RL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        vf changed = fma(splat(key[i]), change[j], load_row(i, j) * decay);
        rl::store(matrix_ + i * kColumns + j * W, changed);
        chains[chain][j] = fma(changed, splat(query[i]), chains[chain][j]);
      }
    });
    RL_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[j] = total(chains, j);
  }

 private:
  static constexpr int kChains = 4;  // sums in flight of each column

  // Calls body(row, chain) for the rows, which take the chains by turns.
  template <class Body>
  RL_INLINE void for_rows(const Body& body) const {
    int32_t i = 0;
    for (; i + kChains <= rows_; i += kChains) {
      RL_UNROLL
      for (int chain = 0; chain < kChains; ++chain) body(i + chain, chain);
    }
    for (int chain = 0; i + chain < rows_; ++chain) body(i + chain, chain);
  }

  RL_INLINE vf load_row(int32_t i, int j) const {
    return rl::load(matrix_ + i * kColumns + j * W);
  }
  static vf total(const vf (&sums)[kChains][kVectors], int j) {
    return (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
  }

  int32_t rows_, count_;
  alignas(64) float matrix_[RL_MAX_KEY_DIM * kColumns] = {};
};

// The matrices [rows, columns] of `num_heads` heads, one after the other in a state from `offset` on.
struct HeadMatrices {
  int64_t offset;
  int32_t num_heads, rows, columns;

  // Calls step(matrix, row, head, values) for some columns, from `first` on, of each head and
  // each token, in order, of each sequence: `values` become the output. value(row, head) are a head's
  // values of a row, and out(row, head) is where its output goes.
  template <class Value, class Out, class Step>
  void run(Context& c, const Value& value, const Out& out, const Step& step) const {
    int32_t parts = static_cast<int32_t>(ceil_div(columns, HeadMatrix::kColumns));
    int64_t tiles = static_cast<int64_t>(parts) * num_heads;
    c.pool.run(c.batch.num_sequences * tiles, [&](int64_t tile, int) {
      const rl_sequence& sequence = c.batch.sequences[tile / tiles];
      int32_t part = static_cast<int32_t>(tile % tiles), head = part / parts;
      int32_t first = part % parts * HeadMatrix::kColumns;
      int32_t count = std::min(HeadMatrix::kColumns, columns - first);
      int64_t place = offset + static_cast<int64_t>(head) * rows * columns + first;
      HeadMatrix matrix(rows, count);
      if (sequence.start) matrix.load(sequence.state + place, columns);
      auto store = [&](float* state) { matrix.store(state + place, columns); };
      take_in(sequence, store, [&](int32_t row) {
        alignas(64) float values[HeadMatrix::kColumns] = {};
        std::copy_n(value(row, head) + first, count, values);
        step(matrix, row, head, values);
        std::copy_n(values, count, out(row, head) + first);
      });
    });
  }
};

// ln(1 + exp(x)).
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace rl
