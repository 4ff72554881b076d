// The two products of attention over int8 K and V, in integers: query rows as bytes times K, and
// softmax weights as 15-bit words times V. A row's codes depend on the row alone, and integer sums are
// exact, so that a result does not depend on the tile that holds it, nor on the vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_tiles.h"

namespace rl {

constexpr int kLargestWeight = 32767;

// What differs between levels. KeyQuads holds four consecutive elements of K for each of W tokens,
// and `add_dot` adds their products with those of a query; ValuePairs holds W elements of V for each of
// two tokens, and `add_mix` adds their products with the tokens' weights.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// K is the unsigned operand, K + 128: sums start from -128 times the sum of the query's codes.
using QueryCode = int8_t;
constexpr int kKeyOffset = 128;

#if defined(__AVX512VNNI__)
using Bytes = __m512i;
inline Bytes load_key_quads(const uint8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline void add_dot(vi& sums, Bytes keys, const QueryCode* query) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(keys), "m"(*(const int32_t*)query));
}
inline Bytes load_value_pairs(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void add_mix(vi& sums, Bytes values, const int16_t* weights) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(values), "m"(*(const int32_t*)weights));
}
#else
using Bytes = __m256i;
inline Bytes load_key_quads(const uint8_t* p) {
  return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                          _mm256_set1_epi8(-128));
}
inline Bytes in_all_lanes(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
inline void add_dot(vi& sums, Bytes keys, const QueryCode* query) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(keys), "x"(in_all_lanes(query)));
}
inline Bytes load_value_pairs(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void add_mix(vi& sums, Bytes values, const int16_t* weights) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(values), "x"(in_all_lanes(weights)));
}
#endif
using KeyQuads = Bytes;
using ValuePairs = Bytes;
inline vi in_order(vi sums) { return sums; }

#elif defined(__AVX2__)

using QueryCode = int16_t;  // as the instruction that multiplies words reads them
constexpr int kKeyOffset = 0;

struct KeyQuads {
  __m256i low, high;  // of four tokens each
};
inline KeyQuads load_key_quads(const uint8_t* p) {
  auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
inline void add_dot(vi& sums, const KeyQuads& keys, const QueryCode* query) {
  int64_t four;
  std::memcpy(&four, query, 8);
  __m256i codes = _mm256_set1_epi64x(four);
  sums += (vi)_mm256_hadd_epi32(_mm256_madd_epi16(keys.low, codes),
                                _mm256_madd_epi16(keys.high, codes));
}
// Sums of neighbours are those of tokens 0, 1, 4, 5, 2, 3, 6 and 7.
inline vi in_order(vi sums) {
  return (vi)_mm256_permute4x64_epi64((__m256i)sums, _MM_SHUFFLE(3, 1, 2, 0));
}
using ValuePairs = __m256i;
inline ValuePairs load_value_pairs(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void add_mix(vi& sums, ValuePairs values, const int16_t* weights) {
  int32_t two;
  std::memcpy(&two, weights, 4);
  sums += (vi)_mm256_madd_epi16(values, _mm256_set1_epi32(two));
}

#else

using QueryCode = int8_t;
constexpr int kKeyOffset = 0;

struct KeyQuads {
  const int8_t* p;
};
inline KeyQuads load_key_quads(const uint8_t* p) { return {reinterpret_cast<const int8_t*>(p)}; }
inline void add_dot(vi& sums, KeyQuads keys, const QueryCode* query) {
  for (int lane = 0; lane < W; ++lane)
    for (int i = 0; i < 4; ++i) sums[lane] += keys.p[4 * lane + i] * query[i];
}
inline vi in_order(vi sums) { return sums; }
struct ValuePairs {
  const int8_t* p;
};
inline ValuePairs load_value_pairs(const int8_t* p) { return {p}; }
inline void add_mix(vi& sums, ValuePairs values, const int16_t* weights) {
  for (int lane = 0; lane < W; ++lane)
    sums[lane] += values.p[2 * lane] * weights[0] + values.p[2 * lane + 1] * weights[1];
}

#endif

// Vectors side by side in one tile of so many rows.
constexpr int vectors_of_tile(int rows) {
  constexpr int kRegisters = W == 16 ? 12 : 6;  // for sums
  return rows * 4 <= kRegisters ? 4 : rows * 2 <= kRegisters ? 2 : 1;
}

// Queries as bytes: panels of R rows, [quads][R][4], and what goes with each row.
struct QueryRows {
  const QueryCode* codes;
  const int32_t* starts;  // [rows] of the integer sums
  const float* scales;    // [rows]
  int quads;
};

// scores[r * kChunkTokens + W v + lane] = scale[r] * sum over quads of query r times K of vector v.
template <int R, int V>
inline void score_bytes_tile(const Operands& keys, int vector, const QueryRows& rows,
                             float* scores) {
  vi sums[R][V];
  const uint8_t *now[V], *later[V];
  RL_UNROLL
  for (int v = 0; v < V; ++v) {
    int sub_block = (vector + v) * W / kSubTokens, offset = (vector + v) * W % kSubTokens * 4;
    now[v] = keys.now[sub_block] + offset;
    later[v] = keys.later[sub_block] + offset;
    RL_UNROLL
    for (int r = 0; r < R; ++r) sums[r][v] = splat_i(rows.starts[r]);
  }
  for (int quad = 0; quad < rows.quads; ++quad) {
    const QueryCode* codes = rows.codes + quad * R * 4;
    KeyQuads quads[V];
    RL_UNROLL
    for (int v = 0; v < V; ++v) {
      quads[v] = load_key_quads(now[v] + quad * kSubTokens * 4);
      fetch_ahead(later[v] + quad * kSubTokens * 4);
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int v = 0; v < V; ++v) add_dot(sums[r][v], quads[v], codes + 4 * r);
  }
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int v = 0; v < V; ++v)
      store(scores + r * kChunkTokens + (vector + v) * W,
            to_float(in_order(sums[r][v])) * splat(rows.scales[r]));
}

// Scores of sub-blocks [first, last) of a chunk.
template <int R>
void score_bytes(const Operands& keys, int first, int last, const QueryRows& rows, float* scores) {
  constexpr int V = vectors_of_tile(R);
  int vector = first * kVectors, end = last * kVectors;
  for (; vector + V <= end; vector += V) score_bytes_tile<R, V>(keys, vector, rows, scores);
  for (; vector < end; ++vector) score_bytes_tile<R, 1>(keys, vector, rows, scores);
}

// Softmax weights as words: [rows][kChunkTokens], what they are multiplied by, and the decay of what
// the output holds already.
struct WeightRows {
  const int16_t* words;
  const float* scales;  // [rows]
  const float* decay;   // [rows]
};

// out[r][W v + lane] = out * decay[r] + scale[r] * sum over tokens t of words[r][t] * V[t][W v + lane].
template <int R, int V>
inline void mix_bytes_tile(const ChunkValues& values, const WeightRows& rows, int column, float* out,
                           int out_stride) {
  vi sums[R][V] = {};
  for (int s = values.first_sub_block; s * kSubTokens < values.last_token; ++s) {
    int num_pairs = (std::min(kSubTokens, values.last_token - s * kSubTokens) + 1) / 2;
    const auto* now = reinterpret_cast<const int8_t*>(values.sub_blocks.now[s]) + 2 * column;
    const uint8_t* later = values.sub_blocks.later[s] + 2 * column;
    for (int pair = 0; pair < num_pairs; ++pair) {
      ValuePairs pairs[V];
      RL_UNROLL
      for (int v = 0; v < V; ++v)
        pairs[v] = load_value_pairs(now + pair * 2 * values.stride + 2 * v * W);
      fetch_ahead(later + pair * 2 * values.stride);
      const int16_t* words = rows.words + s * kSubTokens + 2 * pair;
      RL_UNROLL
      for (int r = 0; r < R; ++r)
        RL_UNROLL
        for (int v = 0; v < V; ++v) add_mix(sums[r][v], pairs[v], words + r * kChunkTokens);
    }
  }
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = out + r * out_stride + v * W;
      store(to, fma(to_float(sums[r][v]), splat(rows.scales[r]), load(to) * splat(rows.decay[r])));
    }
}

template <int R>
void mix_bytes(const ChunkValues& values, const WeightRows& rows, float* out, int out_stride) {
  constexpr int V = vectors_of_tile(R);
  int column = 0;
  for (; column + W * V <= out_stride; column += W * V)
    mix_bytes_tile<R, V>(values, rows, column, out + column, out_stride);
  for (; column < out_stride; column += W)
    mix_bytes_tile<R, 1>(values, rows, column, out + column, out_stride);
}

}  // namespace rl
