// The two products of attention over int8 and int4 K and V, in integers: query rows as bytes times K, and
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
// two tokens, and `add_mix` adds their products with the tokens' weights. Codes of int4 are unpacked as they lie, code
// + 8, from one half of each byte.
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
inline Bytes load_key_quads(const uint8_t* p, bool high) {
  __m512i bytes = _mm512_loadu_si512(p);
  return _mm512_and_si512(high ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}
inline Bytes load_value_pairs(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Bytes load_value_pairs(const uint8_t* p, bool high) {
  __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return high ? _mm512_srli_epi16(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi16(15));
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
inline Bytes load_key_quads(const uint8_t* p, bool high) {
  __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_and_si256(high ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}
inline void add_mix(vi& sums, Bytes values, const int16_t* weights) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(values), "x"(in_all_lanes(weights)));
}
#endif
using KeyQuads = Bytes;
using ValuePairs = Bytes;
inline vi in_order(vi sums) { return sums; }

#elif defined(RL_NEON)

using QueryCode = int8_t;
constexpr int kKeyOffset = 0;

using KeyQuads = int8x16_t;
inline KeyQuads load_key_quads(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline KeyQuads load_key_quads(const uint8_t* p, bool high) {
  uint8x16_t bytes = vld1q_u8(p);
  return vreinterpretq_s8_u8(high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}
inline void add_dot(vi& sums, KeyQuads keys, const QueryCode* query) {
  auto* four = reinterpret_cast<const int32_t*>(query);
  sums = (vi)vdotq_s32((int32x4_t)sums, keys, vreinterpretq_s8_s32(vld1q_dup_s32(four)));
}
inline vi in_order(vi sums) { return sums; }
struct ValuePairs {
  int16x4_t first, second;  // of W elements each
};
inline ValuePairs in_words(uint16x8_t pairs) {
  auto both = vreinterpretq_s32_u16(pairs);
  return {vmovn_s32(both), vshrn_n_s32(both, 16)};
}
inline ValuePairs load_value_pairs(const uint8_t* p) {
  return in_words(vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))));
}
inline ValuePairs load_value_pairs(const uint8_t* p, bool high) {
  uint8x8_t bytes = vld1_u8(p);
  return in_words(vmovl_u8(high ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15))));
}
inline void add_mix(vi& sums, const ValuePairs& values, const int16_t* weights) {
  auto both = vmlal_n_s16((int32x4_t)sums, values.first, weights[0]);
  sums = (vi)vmlal_n_s16(both, values.second, weights[1]);
}

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
inline KeyQuads load_key_quads(const uint8_t* p, bool high) {
  auto* halves = reinterpret_cast<const __m128i*>(p);
  auto codes = [&](__m128i bytes) {
    __m128i half = high ? _mm_srli_epi16(bytes, 4) : bytes;
    return _mm256_cvtepu8_epi16(_mm_and_si128(half, _mm_set1_epi8(15)));
  };
  return {codes(_mm_loadu_si128(halves)), codes(_mm_loadu_si128(halves + 1))};
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
inline void add_mix(vi& sums, ValuePairs values, const int16_t* weights) {
  int32_t two;
  std::memcpy(&two, weights, 4);
  sums += (vi)_mm256_madd_epi16(values, _mm256_set1_epi32(two));
}

#else

using QueryCode = int8_t;
constexpr int kKeyOffset = 0;

struct KeyQuads {
  int8_t codes[4 * W];
};
struct ValuePairs {
  int8_t codes[2 * W];
};
template <class Codes>
inline Codes load_codes(const uint8_t* p) {
  Codes out;
  std::memcpy(out.codes, p, sizeof out.codes);
  return out;
}
template <class Codes>
inline Codes load_codes(const uint8_t* p, bool high) {
  Codes out;
  for (size_t i = 0; i < sizeof out.codes; ++i) out.codes[i] = high ? p[i] >> 4 : p[i] & 15;
  return out;
}
inline KeyQuads load_key_quads(const uint8_t* p) { return load_codes<KeyQuads>(p); }
inline KeyQuads load_key_quads(const uint8_t* p, bool high) { return load_codes<KeyQuads>(p, high); }
inline ValuePairs load_value_pairs(const uint8_t* p) { return load_codes<ValuePairs>(p); }
inline ValuePairs load_value_pairs(const uint8_t* p, bool high) {
  return load_codes<ValuePairs>(p, high);
}
inline void add_dot(vi& sums, const KeyQuads& keys, const QueryCode* query) {
  for (int lane = 0; lane < W; ++lane)
    for (int i = 0; i < 4; ++i) sums[lane] += keys.codes[4 * lane + i] * query[i];
}
inline vi in_order(vi sums) { return sums; }
inline void add_mix(vi& sums, const ValuePairs& values, const int16_t* weights) {
  for (int lane = 0; lane < W; ++lane)
    sums[lane] += values.codes[2 * lane] * weights[0] + values.codes[2 * lane + 1] * weights[1];
}

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m256i load_value_pairs(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i load_value_pairs(const uint8_t* p, bool high) {
  __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return high ? _mm256_srli_epi16(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi16(15));
}
#endif

// Vectors side by side in one tile of so many rows.
constexpr int vectors_of_tile(int rows) {
  return rows * 8 <= kMostSums ? 4 : rows * 4 <= kMostSums ? 2 : 1;
}

// How many quads of K lie in the same bytes.
constexpr int quads_of_bytes(int format) { return format == RL_INT4 ? 2 : 1; }

// Quad number `quad` of K, of the W tokens that begin at `tokens`.
template <int F>
RL_INLINE inline KeyQuads key_quads(const uint8_t* tokens, int quad) {
  if constexpr (F == RL_INT4)
    return load_key_quads(tokens + quad / 2 * kSubTokens * 4, quad % 2);
  else
    return load_key_quads(tokens + quad * kSubTokens * 4);
}

// Queries as codes: panels of R rows, [quads][R][4], and what goes with each row.
struct QueryRows {
  const QueryCode* codes;
  const int32_t* starts;  // [rows] of the integer sums
  const float* scales;    // [rows]
  int quads;
};

// scores[r * kChunkTokens + W v + lane] = scale[r] * sum over quads of query r times K of vector v.
template <int F, int R, int V>
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
  constexpr int kQuads = quads_of_bytes(F);
  for (int first = 0; first < rows.quads; first += kQuads) {
    RL_UNROLL
    for (int v = 0; v < V; ++v) fetch_ahead(later[v] + first / kQuads * kSubTokens * 4);
    RL_UNROLL
    for (int quad = first; quad < first + kQuads; ++quad) {
      const QueryCode* codes = rows.codes + quad * R * 4;
      KeyQuads quads[V];
      RL_UNROLL
      for (int v = 0; v < V; ++v) quads[v] = key_quads<F>(now[v], quad);
      RL_UNROLL
      for (int r = 0; r < R; ++r)
        RL_UNROLL
        for (int v = 0; v < V; ++v) add_dot(sums[r][v], quads[v], codes + 4 * r);
    }
  }
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int v = 0; v < V; ++v)
      store(scores + r * kChunkTokens + (vector + v) * W,
            to_float(in_order(sums[r][v])) * splat(rows.scales[r]));
}

// Scores of sub-blocks [first, last) of a chunk.
template <int F, int R>
void score_bytes(const Operands& keys, int first, int last, const QueryRows& rows, float* scores) {
  constexpr int V = vectors_of_tile(R);
  int vector = first * kVectors, end = last * kVectors;
  for (; vector + V <= end; vector += V) score_bytes_tile<F, R, V>(keys, vector, rows, scores);
  for (; vector < end; ++vector) score_bytes_tile<F, R, 1>(keys, vector, rows, scores);
}

// Softmax weights as words: [rows][kChunkTokens], what they are multiplied by, and the decay of what
// the output holds already.
struct WeightRows {
  const int16_t* words;
  const int32_t* starts;  // [rows] of the integer sums
  const float* scales;    // [rows]
  const float* decay;     // [rows]
};

// W elements of V from a column on, a multiple of W, of the pair of tokens that begins at `tokens`.
template <int F>
RL_INLINE inline ValuePairs value_pairs(const uint8_t* tokens, int column, bool high) {
  if constexpr (F == RL_INT4)
    return load_value_pairs(tokens + (column / 32 * 16 + column % 16) * 2, high);
  else
    return load_value_pairs(tokens + column * 2);
}

// out[r][W v + lane] = out * decay[r] + scale[r] * sum over tokens t of words[r][t] * V[t][W v + lane].
template <int F, int R, int V>
inline void mix_bytes_tile(const ChunkValues& values, const WeightRows& rows, int column, float* out,
                           int out_stride) {
  // A tile of whole 32 columns begins at a multiple of them.
  constexpr bool kWhole = V * W % 32 == 0;
  const int pair_bytes = 2 * values.stride / quads_of_bytes(F);
  vi sums[R][V];
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = splat_i(rows.starts[r]);
  for (int s = values.first_sub_block; s * kSubTokens < values.last_token; ++s) {
    int num_pairs = (std::min(kSubTokens, values.last_token - s * kSubTokens) + 1) / 2;
    const uint8_t* now = values.sub_blocks.now[s];
    const uint8_t* later = values.sub_blocks.later[s] + 2 * column / quads_of_bytes(F);
    for (int pair = 0; pair < num_pairs; ++pair) {
      ValuePairs pairs[V];
      RL_UNROLL
      for (int v = 0; v < V; ++v) {
        int at = column + v * W;
        pairs[v] = value_pairs<F>(now + pair * pair_bytes, at, (kWhole ? v * W : at) / 16 % 2);
      }
      fetch_ahead(later + pair * pair_bytes);
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

template <int F, int R>
void mix_bytes(const ChunkValues& values, const WeightRows& rows, float* out, int out_stride) {
  constexpr int V = vectors_of_tile(R);
  int column = 0;
  for (; column + W * V <= out_stride; column += W * V)
    mix_bytes_tile<F, R, V>(values, rows, column, out + column, out_stride);
  for (; column < out_stride; column += W)
    mix_bytes_tile<F, R, 1>(values, rows, column, out + column, out_stride);
}

}  // namespace rl
