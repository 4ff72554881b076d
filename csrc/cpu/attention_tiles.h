// The two products of attention, as register tiles: some query rows times 16 lanes, which are KV
// slots for the scores and elements of V for the output. Each result is one chain of additions, in
// the order of k or of slots, so that it does not depend on the shape of the tile that holds it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv_cache.h"

namespace rl {

constexpr int kChunkTokens = 64;  // KV slots between two updates of the running maximum
constexpr int kChunkSubBlocks = kChunkTokens / kSubTokens;
constexpr int kVectors = kSubTokens / W;

// Rows of a tile: as many sums as registers hold beside their operands.
constexpr int kTileRowsMax = W == 16 ? 12 : W == 8 || kRegisters == 32 ? 6 : 2;

// Sub-blocks side by side in one tile: with few rows, enough chains to hide the latency of fma.
constexpr int tile_width(int rows) {
  int chains = rows * kVectors;
  return chains <= (kRegisters == 32 ? 3 : 2) ? 4 : chains <= (kRegisters == 32 ? 6 : 4) ? 2 : 1;
}

// Where products read: sub-blocks of a chunk, and what will be read a chunk later, to be fetched
// meanwhile. Sub-blocks are too short, and lie too far apart, for the hardware to do it.
struct Operands {
  const uint8_t* now[kChunkSubBlocks];
  const uint8_t* later[kChunkSubBlocks];
};

// scores[r * kChunkTokens + 16 u + lane] = sum over k of q[k * R + r] * K[u][k][lane].
template <int F, int R, int U>
inline void score_tile(const Operands& keys, int first, const float* q, int width, float* scores) {
  vf sums[R][U][kVectors] = {};
  auto add = [&](int k) __attribute__((always_inline)) {
    vf elements[U][kVectors];
    RL_UNROLL
    for (int u = 0; u < U; ++u) RL_UNROLL
    for (int v = 0; v < kVectors; ++v) elements[u][v] = load_k<F>(keys.now[first + u], k, v * W);
    RL_UNROLL
    for (int r = 0; r < R; ++r) {
      vf query = splat(q[k * R + r]);
      RL_UNROLL
      for (int u = 0; u < U; ++u) RL_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][u][v] = fma(query, elements[u][v], sums[r][u][v]);
    }
  };
  int k = 0;
  for (; k + 4 <= width; k += 4) {
    add(k);
    add(k + 1);
    add(k + 2);
    add(k + 3);
    if constexpr (F != RL_F32) {
      constexpr int kBytes = F == RL_FP8 ? 64 : 128;
      RL_UNROLL
      for (int u = 0; u < U; ++u)
        for (int i = 0; i < kBytes; i += 64)
          fetch_ahead(keys.later[first + u] + k / 4 * kBytes + i);
    }
  }
  for (; k < width; ++k) add(k);
  RL_UNROLL
  for (int r = 0; r < R; ++r) RL_UNROLL
  for (int u = 0; u < U; ++u) RL_UNROLL
  for (int v = 0; v < kVectors; ++v)
    store(scores + r * kChunkTokens + u * kSubTokens + v * W, sums[r][u][v]);
}

template <int F, int R>
void score_rows(const Operands& keys, int first, int last, const float* q, int width,
                float* scores) {
  constexpr int U = tile_width(R);
  int s = first;
  for (; s + U <= last; s += U) score_tile<F, R, U>(keys, s, q, width, scores + s * kSubTokens);
  for (; s < last; ++s) score_tile<F, R, 1>(keys, s, q, width, scores + s * kSubTokens);
}

// V of a chunk: token t of sub-block s begins at element t * stride of sub_blocks[s].
struct ChunkValues {
  Operands sub_blocks;
  int stride;
  int first_sub_block;
  int last_token;  // of the chunk; what lies beyond may never have been written
};

// out[r][16 u + lane] = out * decay[r] + sum over tokens t of weights[r][t] * V[t][16 u + lane].
template <int F, int R, int U>
inline void mix_tile(const ChunkValues& values, const float* weights, const float* decay,
                     int column, float* out, int out_stride) {
  vf sums[R][U][kVectors];
  RL_UNROLL
  for (int r = 0; r < R; ++r) RL_UNROLL
  for (int u = 0; u < U; ++u) RL_UNROLL
  for (int v = 0; v < kVectors; ++v)
    sums[r][u][v] = load(out + r * out_stride + u * 16 + v * W) * splat(decay[r]);
  for (int s = values.first_sub_block; s * kSubTokens < values.last_token; ++s) {
    const float* p = weights + s * kSubTokens;
    int num_tokens = std::min(kSubTokens, values.last_token - s * kSubTokens);
    for (int t = 0; t < num_tokens; ++t) {
      vf elements[U][kVectors];
      RL_UNROLL
      for (int u = 0; u < U; ++u) RL_UNROLL
      for (int v = 0; v < kVectors; ++v)
        elements[u][v] =
            load_elements<F>(values.sub_blocks.now[s], t * values.stride + column + u * 16 + v * W);
      if constexpr (F != RL_F32) {
        constexpr int kBytes = F == RL_FP8 ? 1 : 2;
        fetch_ahead(values.sub_blocks.later[s] + (t * values.stride + column) * kBytes);
      }
      RL_UNROLL
      for (int r = 0; r < R; ++r) {
        vf weight = splat(p[r * kChunkTokens + t]);
        RL_UNROLL
        for (int u = 0; u < U; ++u) RL_UNROLL
        for (int v = 0; v < kVectors; ++v)
          sums[r][u][v] = fma(weight, elements[u][v], sums[r][u][v]);
      }
    }
  }
  RL_UNROLL
  for (int r = 0; r < R; ++r) RL_UNROLL
  for (int u = 0; u < U; ++u) RL_UNROLL
  for (int v = 0; v < kVectors; ++v) store(out + r * out_stride + u * 16 + v * W, sums[r][u][v]);
}

template <int F, int R>
void mix_rows(const ChunkValues& values, const float* weights, const float* decay, float* out,
              int out_stride) {
  constexpr int U = tile_width(R);
  int column = 0;
  for (; column + 16 * U <= out_stride; column += 16 * U)
    mix_tile<F, R, U>(values, weights, decay, column, out + column, out_stride);
  for (; column < out_stride; column += 16)
    mix_tile<F, R, 1>(values, weights, decay, column, out + column, out_stride);
}

// 2^x for x <= 0, to about 1 unit in the last place; 0 below -127. NaN stays NaN. 2^x = 2^n 2^f
// with n whole; the polynomial is minimax on [-1/2, 1/2] with value 1 at 0, so that 2^0 is 1.
inline vf exp2_of_negative(vf x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  vf t = select((vi)(x < -127.0f), splat(-127.0f), x);
  vf shifted = t + kWhole;
  vf f = t - (shifted - kWhole);
  vf p = splat(1.326472725e-3f);
  p = fma(p, f, splat(9.671512786e-3f));
  p = fma(p, f, splat(5.550733744e-2f));
  p = fma(p, f, splat(2.402224208e-1f));
  p = fma(p, f, splat(6.931469776e-1f));
  p = fma(p, f, splat(1.0f));
  // Unsigned, since what is not finite overflows.
  typedef uint32_t Bits __attribute__((vector_size(4 * W)));
  return (vf)((Bits)p + ((Bits)shifted << 23));
}

}  // namespace rl
