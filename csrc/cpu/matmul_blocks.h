// What kernels of quantized matrices add up: blocks of codes times quads of a panel's tokens.
#pragma once

#include <cstring>

#include "dot.h"
#include "matmul_tile.h"

namespace rl {

constexpr int kFactorGroup = 128;  // columns of a group with factors
constexpr int kExpandedBlock = kBlockColumns * kTileRows;

// Vectors of rows whose sums are in registers together. Two share each broadcast of activations,
// where there are registers for that: of one tile, or of two where a vector is a tile. These are not
// read as fast from memory, which is what fewer tokens wait for.
template <int F, bool FromBytes, int M>
constexpr int row_vectors() {
  if (kRegisters == 32) return (W == 16 ? 1 : 2) * (M >= 5 ? 2 : 1);
  return W == 8 && (code_bits(F) <= 4 || FromBytes || M <= 2) ? 2 : 1;
}

// The tiles that they belong to.
constexpr int tiles_of(int row_vectors) {
  return row_vectors * W > kTileRows ? row_vectors * W / kTileRows : 1;
}

template <int F, bool FromBytes>
constexpr int block_bytes() {
  return FromBytes ? kExpandedBlock : block_lines(F) * 64;
}

// Sums from what they start from, middle codes included.
template <int F, int M, int R>
RL_INLINE inline void start_sums_at(const int32_t* minus_sums, Sums<F> (&sums)[R][M]) {
  RL_UNROLL
  for (int m = 0; m < M; ++m) {
    vi start = splat_i(minus_sums[m]);
    RL_UNROLL
    for (int r = 0; r < R; ++r) std::memcpy(&sums[r][m].v, &start, sizeof start);
  }
}

// Adds a block, or one half of it (quads 0 to 3, or 4 to 7), for R vectors of rows from row `row` on.
// The blocks of the next tile are `next_tile` bytes behind.
template <int F, bool FromBytes, int M, int R>
RL_INLINE inline void add_block(const uint8_t* block, int64_t next_tile, bool first_half,
                                bool second_half, int row, const int8_t* x, Sums<F> (&sums)[R][M]) {
  auto quad = [&](int t, int m) RL_INLINE { return quad_at<R == 1>(x + (t * M + m) * 4); };
  RL_UNROLL
  for (int t = 0; t < 4; ++t) {
    Codes<F> first[R], second[R];
    RL_UNROLL
    for (int r = 0; r < R; ++r) {
      Line a, b;
      read_quads<FromBytes ? RL_Q8 : F>(block + r * W / kTileRows * next_tile,
                                        (row + r * W) % kTileRows, t, a, b);
      first[r] = codes_of<F>(a);
      second[r] = codes_of<F>(b);
    }
    bool in_pairs = kInPairs<F> && first_half && second_half;
    if constexpr (kInPairs<F>)
      if (in_pairs) {
        RL_UNROLL
        for (int m = 0; m < M; ++m) {
          auto low = quad(t, m), high = quad(t + 4, m);
          RL_UNROLL
          for (int r = 0; r < R; ++r) sums[r][m].add_both(first[r], low, second[r], high);
        }
      }
    if (first_half && !in_pairs) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) {
        auto x4 = quad(t, m);
        RL_UNROLL
        for (int r = 0; r < R; ++r) sums[r][m].add(first[r], x4);
      }
    }
    if (second_half && !in_pairs) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) {
        auto x4 = quad(t + 4, m);
        RL_UNROLL
        for (int r = 0; r < R; ++r) sums[r][m].add(second[r], x4);
      }
    }
  }
}

}  // namespace rl
