// Where K and V lie in a block of the cache.
//
// A layer of a block holds, for each KV head in turn, sub-blocks of 16 tokens, so that a head's
// share of a block is contiguous. A sub-block is
//   K       floats: [k_width][16 tokens]
//           RL_INT8: [k_width / 4, rounded up][16 tokens][4], as dot products of four bytes take it
//   V       floats: [16 tokens][v_width rounded up to 16]; nothing for latents, whose V is part of K
//           RL_INT8: [8 pairs of tokens][v_width rounded up to 16][2]
//   scales  RL_INT8: [16 tokens] floats of K, then of V: value = scale * code
//   padding to 64 bytes
// Padding never reaches a result.
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
  int64_t element_bytes;
  int64_t v_offset;  // bytes from the start of the sub-block
  int64_t k_scales_offset;
  int64_t v_scales_offset;
  int64_t bytes;
};

SubBlockLayout sub_block_layout(const rl_kv_group& group);

inline int64_t k_element(const SubBlockLayout& layout, int k, int lane) {
  if (layout.format == RL_INT8) return (k / 4 * kSubTokens + lane) * 4 + k % 4;
  return k * kSubTokens + lane;
}

inline int64_t v_element(const SubBlockLayout& layout, int i, int lane) {
  if (layout.format == RL_INT8) return (lane / 2 * layout.v_stride + i) * 2 + lane % 2;
  return lane * layout.v_stride + i;
}

// The sub-block that holds a KV slot of a sequence; the slot's lane in it is slot % kSubTokens.
inline uint8_t* sub_block_at(const rl_kv_group& group, const SubBlockLayout& layout, int layer,
                             int head, const int32_t* block_table, int64_t slot) {
  int64_t block = block_table[slot / group.block_tokens];
  int64_t sub_block = slot % group.block_tokens / kSubTokens;
  int64_t sub_blocks = group.block_tokens / kSubTokens;
  return group.data + block * group.block_bytes + layer * group.layer_bytes +
         (head * sub_blocks + sub_block) * layout.bytes;
}

// rl_kv_write for tokens whose k and v begin k_stride and v_stride floats apart.
void write_kv(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
              const rl_batch& batch, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride);

// Copies K, V and scales of one token.
void copy_slot(const SubBlockLayout& layout, const uint8_t* from, int from_lane, uint8_t* to,
               int to_lane);

// W consecutive elements, beginning at number `index`, as floats.
template <int F>
inline vf load_elements(const uint8_t* data, int64_t index) {
  if constexpr (F == RL_F32) return load(reinterpret_cast<const float*>(data) + index);
  if constexpr (F == RL_F16) return load_half(reinterpret_cast<const uint16_t*>(data) + index);
  if constexpr (F == RL_BF16) return load_bfloat(reinterpret_cast<const uint16_t*>(data) + index);
  if constexpr (F == RL_INT8) return load_int8(reinterpret_cast<const int8_t*>(data) + index);
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
