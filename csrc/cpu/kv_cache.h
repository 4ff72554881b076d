// Where K and V lie in a block of the cache.
//
// A layer of a block holds, for each KV head in turn, sub-blocks of 16 tokens, so that a head's
// share of a block is contiguous. A sub-block is
//   K       floats, RL_FP8: [k_width][16 tokens]
//           RL_INT8: [k_width / 4, rounded up][16 tokens][4], as dot products of four bytes take it
//           RL_INT4: [k_width / 8][16 tokens][4], a byte holding elements i and i + 4 of its eight
//   V       floats, RL_FP8: [16 tokens][v_width rounded up to 16]; nothing for latents, whose V is
//           part of K
//           RL_INT8: [8 pairs of tokens][v_width rounded up to 16][2]
//           RL_INT4: [8 pairs of tokens][v_width / 32][16][2], a byte holding elements i and i + 16 of
//           its 32
//   scales  RL_INT8, RL_INT4, RL_FP8: [16 tokens] floats of K, then of V: value = scale * code
//   padding to 64 bytes
// Padding never reaches a result. The half bytes of RL_INT4 are codes + 8, the first element in the
// low half; both are of one token, so that threads write tokens of a sub-block side by side.
//
// K and V in RL_INT4 are rotated: multiplied by a Hadamard matrix, which spreads what is large in one
// element over all of them, so that a scale fits the whole head (QuaRot, arXiv 2404.00456). Attention
// rotates queries likewise, and its output back.
#pragma once

#include <cstdint>
#include <cstring>

#include "pool.h"
#include "ridgeline_cpu.h"
#include "simd.h"

namespace rl {

constexpr int kSubTokens = 16;

struct SubBlockLayout {
  int format;
  int k_width;
  int v_width;
  int v_stride;  // elements from one token's V to the next
  int element_bits;
  int64_t v_offset;  // bytes from the start of the sub-block
  int64_t k_scales_offset;
  int64_t v_scales_offset;
  int64_t bytes;
};

SubBlockLayout sub_block_layout(const rl_kv_group& group);

// Whether elements are codes, each token's times a scale.
constexpr bool has_scales(int format) {
  return format == RL_INT8 || format == RL_INT4 || format == RL_FP8;
}

// Where element k of K lies, in elements from the start of the sub-block, and element i of V, from that
// of V; of RL_INT4 in bytes, of which `high_half` says whether it is the high half.
inline int64_t k_element(const SubBlockLayout& layout, int k, int lane) {
  if (layout.format == RL_INT8) return (k / 4 * kSubTokens + lane) * 4 + k % 4;
  if (layout.format == RL_INT4) return (k / 8 * kSubTokens + lane) * 4 + k % 4;
  return k * kSubTokens + lane;
}

inline int64_t v_element(const SubBlockLayout& layout, int i, int lane) {
  if (layout.format == RL_INT8) return (lane / 2 * layout.v_stride + i) * 2 + lane % 2;
  if (layout.format == RL_INT4)
    return (lane / 2 * layout.v_stride / 2 + i / 32 * 16 + i % 16) * 2 + lane % 2;
  return lane * layout.v_stride + i;
}

constexpr int kNibbleOffset = 8;
constexpr int kKeysOfHalf = 4;     // consecutive elements of K in the low halves, then as many high
constexpr int kValuesOfHalf = 16;  // likewise of V

inline bool high_half(int element, int of_half) { return element / of_half % 2; }

constexpr int kWidestRotation = 512;

// Multiplies by the Hadamard matrix whose elements are +-1 / sqrt(width): its own inverse. The width is
// a power of two from 32 on.
void rotate(float* x, int width);

// The sub-block that holds a KV slot of a sequence; the slot's lane in it is slot % kSubTokens.
inline uint8_t* sub_block_at(const rl_kv_group& group, const SubBlockLayout& layout, int layer,
                             int head, const int32_t* block_table, int64_t slot) {
  int64_t block = block_table[slot / group.block_tokens];
  int64_t sub_block = slot % group.block_tokens / kSubTokens;
  int64_t sub_blocks = group.block_tokens / kSubTokens;
  return group.data + block * group.block_bytes + layer * group.layer_bytes +
         (head * sub_blocks + sub_block) * layout.bytes;
}

// Whether this rank has a block, and which rank does, where ranks share contexts.
inline bool is_here(const rl_kv_group& group, int32_t block) {
  return group.num_blocks == 0 ||
         (block >= group.first_block && block - group.first_block < group.num_blocks);
}
inline int32_t rank_of(const rl_kv_group& group, int32_t block) { return block / group.num_blocks; }

// rl_kv_write for tokens whose k and v begin k_stride and v_stride floats apart. What is in blocks of
// other ranks is left out, and so are ranges that ranks share (contexts.cpp).
void write_kv(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
              const rl_batch& batch, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride);

// Copies K, V and scales of one token.
void copy_slot(const SubBlockLayout& layout, const uint8_t* from, int from_lane, uint8_t* to,
               int to_lane);

// W consecutive codes of e4m3 (a sign, 4 bits of exponent, 3 of mantissa; OCP 8-bit floating point,
// 1.0). As halves they have another bias of the exponent; none is written that is not finite.
inline vf load_fp8(const uint8_t* p) {
  constexpr float kBias = 256;
#if defined(__AVX512F__)
  __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign)) * kBias;
#elif defined(__F16C__)
  __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  __m128i magnitude = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
  __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  return (vf)_mm256_cvtph_ps(_mm_or_si128(magnitude, sign)) * kBias;
#else
  uint16_t halves[W];
  for (int i = 0; i < W; ++i)
    halves[i] = static_cast<uint16_t>((p[i] & 0x7f) << 7 | (p[i] & 0x80) << 8);
  return load_half(halves) * kBias;
#endif
}

// W consecutive elements, beginning at number `index`, as floats.
template <int F>
inline vf load_elements(const uint8_t* data, int64_t index) {
  if constexpr (F == RL_F32) return load(reinterpret_cast<const float*>(data) + index);
  if constexpr (F == RL_F16) return load_half(reinterpret_cast<const uint16_t*>(data) + index);
  if constexpr (F == RL_BF16) return load_bfloat(reinterpret_cast<const uint16_t*>(data) + index);
  if constexpr (F == RL_INT8) return load_int8(reinterpret_cast<const int8_t*>(data) + index);
  if constexpr (F == RL_FP8) return load_fp8(data + index);
}

// Element k of K of tokens [lane, lane + W) of a sub-block, without their scales.
template <int F>
inline vf load_k(const uint8_t* sub_block, int k, int lane) {
  if constexpr (F == RL_INT8) {
    vi quads;
    std::memcpy(&quads, sub_block + (k / 4 * kSubTokens + lane) * 4, sizeof quads);
    return to_float(quads << (24 - 8 * (k % 4)) >> 24);
  } else {
    return load_elements<F>(sub_block, k * kSubTokens + lane);
  }
}

}  // namespace rl
