#include "kv_cache.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "rounding.h"

namespace rl {
namespace {

constexpr int64_t kLine = 64;
constexpr int kWriteTokens = 16;  // of a work item

int64_t bytes_of(int format) { return format == RL_F32 ? 4 : format == RL_INT8 ? 1 : 2; }

constexpr float kLargestHalf = 65504;

// A finite value that a half does not hold becomes the largest that it does: infinity would spoil
// every later token.
void store_element(int format, uint8_t* data, int64_t index, float value) {
  auto* words = reinterpret_cast<uint16_t*>(data);
  if (format == RL_F32) {
    reinterpret_cast<float*>(data)[index] = value;
  } else if (format == RL_F16) {
    bool overflows = std::fabs(value) > kLargestHalf && value - value == 0;
    words[index] = float_to_half(overflows ? std::copysign(kLargestHalf, value) : value);
  } else {
    words[index] = float_to_bfloat(value);
  }
}

float load_element(int format, const uint8_t* data, int64_t index) {
  if (format == RL_F32) return reinterpret_cast<const float*>(data)[index];
  if (format == RL_INT8) return reinterpret_cast<const int8_t*>(data)[index];
  uint16_t bits = reinterpret_cast<const uint16_t*>(data)[index];
  return format == RL_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

float* k_scales(const SubBlockLayout& layout, uint8_t* sub_block) {
  return reinterpret_cast<float*>(sub_block + layout.k_scales_offset);
}

float* v_scales(const SubBlockLayout& layout, uint8_t* sub_block) {
  return reinterpret_cast<float*>(sub_block + layout.v_scales_offset);
}

// Calls store(i, code of x[i]) and returns the scale, which makes the largest magnitude 127. A
// value that is not finite makes the scale NaN, so that all that is read from the token is NaN,
// rather than something plausible.
template <class Store>
float quantize(const float* x, int count, const Store& store_code) {
  float scale = scale_of(x, count, 127);
  float inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < count; i += W) {
    vf scaled = load_some(x + i, count - i) * inverse;
    vi codes = round_to_int(max(min(scaled, splat(127.0f)), splat(-127.0f)));
    for (int lane = 0; lane < W && i + lane < count; ++lane)
      store_code(i + lane, static_cast<int8_t>(codes[lane]));
  }
  return scale;
}

void store_int8(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
                int lane) {
  auto* codes = reinterpret_cast<int8_t*>(sub_block);
  k_scales(layout, sub_block)[lane] = quantize(
      k, layout.k_width, [&](int i, int8_t code) { codes[k_element(layout, i, lane)] = code; });
  if (layout.v_width == 0) return;
  codes += layout.v_offset;
  v_scales(layout, sub_block)[lane] = quantize(
      v, layout.v_width, [&](int i, int8_t code) { codes[v_element(layout, i, lane)] = code; });
}

void store_floats(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
                  int lane) {
  for (int i = 0; i < layout.k_width; ++i)
    store_element(layout.format, sub_block, k_element(layout, i, lane), k[i]);
  uint8_t* row = sub_block + layout.v_offset;
  for (int i = 0; i < layout.v_width; ++i)
    store_element(layout.format, row, v_element(layout, i, lane), v[i]);
}

void write_tokens(const rl_kv_group& group, const SubBlockLayout& layout, int layer,
                  const rl_sequence& sequence, const int32_t* block_table, int first, int last,
                  const float* k, int64_t k_stride, const float* v, int64_t v_stride) {
  int heads = group.num_kv_heads;
  for (int token = first; token < last; ++token) {
    int64_t slot = sequence.start + token;
    int64_t row = sequence.first_row + token;
    for (int head = 0; head < heads; ++head) {
      uint8_t* sub_block = sub_block_at(group, layout, layer, head, block_table, slot);
      const float* k_head = k + row * k_stride + head * layout.k_width;
      const float* v_head = v + row * v_stride + head * layout.v_width;
      auto* store = layout.format == RL_INT8 ? store_int8 : store_floats;
      store(layout, k_head, v_head, sub_block, slot % kSubTokens);
    }
  }
}

}  // namespace

SubBlockLayout sub_block_layout(const rl_kv_group& group) {
  SubBlockLayout layout = {};
  layout.format = group.format;
  layout.k_width = group.k_width;
  layout.v_width = group.v_width;
  layout.v_stride = static_cast<int>(round_up(group.v_width, 16));
  layout.element_bytes = bytes_of(group.format);
  int64_t k_elements = group.format == RL_INT8 ? round_up(group.k_width, 4) : group.k_width;
  layout.v_offset = k_elements * kSubTokens * layout.element_bytes;
  layout.k_scales_offset =
      layout.v_offset + int64_t{kSubTokens} * layout.v_stride * layout.element_bytes;
  int64_t scales = group.format == RL_INT8 ? kSubTokens * int64_t{sizeof(float)} : 0;
  layout.v_scales_offset = layout.k_scales_offset + scales;
  layout.bytes = round_up(layout.v_scales_offset + (group.v_width ? scales : 0), kLine);
  return layout;
}

void write_kv(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
              const rl_batch& batch, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride) {
  SubBlockLayout layout = sub_block_layout(group);
  int64_t num_items = ceil_div(batch.num_tokens, kWriteTokens);
  pool.run(num_items, [&](int64_t item, int) {
    int first_row = static_cast<int>(item) * kWriteTokens;
    for (int i = 0; i < batch.num_sequences; ++i) {
      const rl_sequence& sequence = batch.sequences[i];
      int first = std::max(first_row - sequence.first_row, 0);
      int last = std::min(first_row + kWriteTokens - sequence.first_row, sequence.num_tokens);
      write_tokens(group, layout, layer, sequence, sequence.block_tables[group_index], first, last,
                   k, k_stride, v, v_stride);
    }
  });
}

void copy_slot(const SubBlockLayout& layout, const uint8_t* from, int from_lane, uint8_t* to,
               int to_lane) {
  int64_t size = layout.element_bytes;
  const uint8_t* v_from = from + layout.v_offset;
  uint8_t* v_to = to + layout.v_offset;
  if (layout.format == RL_INT8) {
    for (int k = 0; k < layout.k_width; k += 4)
      std::memcpy(to + k_element(layout, k, to_lane), from + k_element(layout, k, from_lane), 4);
    std::memcpy(to + layout.k_scales_offset + to_lane * sizeof(float),
                from + layout.k_scales_offset + from_lane * sizeof(float), sizeof(float));
    if (layout.v_width)
      std::memcpy(to + layout.v_scales_offset + to_lane * sizeof(float),
                  from + layout.v_scales_offset + from_lane * sizeof(float), sizeof(float));
    for (int i = 0; i < layout.v_width; ++i)
      v_to[v_element(layout, i, to_lane)] = v_from[v_element(layout, i, from_lane)];
  } else {
    for (int k = 0; k < layout.k_width; ++k)
      std::memcpy(to + k_element(layout, k, to_lane) * size,
                  from + k_element(layout, k, from_lane) * size, size);
    int64_t v_bytes = layout.v_stride * size;
    std::memcpy(v_to + to_lane * v_bytes, v_from + from_lane * v_bytes, v_bytes);
  }
}

}  // namespace rl

using namespace rl;

void rl_kv_group_sizes(rl_kv_group* group) {
  int64_t sub_blocks = int64_t{group->num_kv_heads} * (group->block_tokens / kSubTokens);
  group->layer_bytes = sub_blocks * sub_block_layout(*group).bytes;
  group->block_bytes = group->num_layers * group->layer_bytes;
}

void rl_kv_write(rl_pool* pool, const rl_kv_group* group, int32_t group_index, int32_t layer,
                 const rl_batch* batch, const float* k, const float* v) {
  int64_t heads = group->num_kv_heads;
  write_kv(*reinterpret_cast<Pool*>(pool), *group, group_index, layer, *batch, k,
           heads * group->k_width, v, heads * group->v_width);
}

int32_t rl_kv_move(const rl_kv_group* group, const int32_t* block_table, const int32_t* from,
                   const int32_t* to, int32_t count) try {
  SubBlockLayout layout = sub_block_layout(*group);
  std::vector<uint8_t> moved(ceil_div(count, kSubTokens) * layout.bytes);
  for (int layer = 0; layer < group->num_layers; ++layer) {
    for (int head = 0; head < group->num_kv_heads; ++head) {
      auto place = [&](int32_t slot) {
        return sub_block_at(*group, layout, layer, head, block_table, slot);
      };
      auto kept = [&](int i) { return moved.data() + i / kSubTokens * layout.bytes; };
      for (int i = 0; i < count; ++i)
        copy_slot(layout, place(from[i]), from[i] % kSubTokens, kept(i), i % kSubTokens);
      for (int i = 0; i < count; ++i)
        copy_slot(layout, kept(i), i % kSubTokens, place(to[i]), to[i] % kSubTokens);
    }
  }
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

void rl_kv_read(const rl_kv_group* group, int32_t layer, const int32_t* block_table, int32_t start,
                int32_t count, float* k, float* v) {
  SubBlockLayout layout = sub_block_layout(*group);
  bool scaled = layout.format == RL_INT8;
  for (int64_t slot = start; slot < int64_t{start} + count; ++slot) {
    int lane = slot % kSubTokens;
    for (int head = 0; head < group->num_kv_heads; ++head) {
      uint8_t* sub_block = sub_block_at(*group, layout, layer, head, block_table, slot);
      float scale = scaled ? k_scales(layout, sub_block)[lane] : 1;
      for (int i = 0; i < layout.k_width; ++i)
        *k++ = scale * load_element(layout.format, sub_block, k_element(layout, i, lane));
      if (layout.v_width && scaled) scale = v_scales(layout, sub_block)[lane];
      for (int i = 0; i < layout.v_width; ++i)
        *v++ = scale *
               load_element(layout.format, sub_block + layout.v_offset, v_element(layout, i, lane));
    }
  }
}
