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

int bits_of_element(int format) {
  switch (format) {
    case RL_F32:
      return 32;
    case RL_F16:
    case RL_BF16:
      return 16;
    case RL_INT4:
      return 4;
    default:
      return 8;
  }
}

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

float load_element(int format, const uint8_t* data, int64_t index, bool high) {
  if (format == RL_INT4) return (high ? data[index] >> 4 : data[index] & 0x0f) - kNibbleOffset;
  if (format == RL_F32) return reinterpret_cast<const float*>(data)[index];
  if (format == RL_INT8) return reinterpret_cast<const int8_t*>(data)[index];
  if (format == RL_FP8) {
    uint8_t codes[W] = {data[index]};
    return load_fp8(codes)[0];
  }
  uint16_t bits = reinterpret_cast<const uint16_t*>(data)[index];
  return format == RL_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

float* k_scales(const SubBlockLayout& layout, uint8_t* sub_block) {
  return reinterpret_cast<float*>(sub_block + layout.k_scales_offset);
}

float* v_scales(const SubBlockLayout& layout, uint8_t* sub_block) {
  return reinterpret_cast<float*>(sub_block + layout.v_scales_offset);
}

// Calls store(i, x[i] / scale) and returns the scale, which makes the largest magnitude `largest`. A
// value that is not finite makes the scale NaN, so that all that is read from the token is NaN,
// rather than something plausible.
template <class Store>
float scaled(const float* x, int count, int largest, const Store& store_scaled) {
  float scale = scale_of(x, count, largest), bound = static_cast<float>(largest);
  float inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < count; i += W) {
    vf values = load_some(x + i, count - i) * inverse;
    store_scaled(i, max(min(values, splat(bound)), splat(-bound)), std::min(W, count - i));
  }
  return scale;
}

template <class Store>
float quantize(const float* x, int count, int largest, const Store& store_code) {
  return scaled(x, count, largest, [&](int first, vf values, int lanes) {
    vi codes = round_to_int(values);
    for (int lane = 0; lane < lanes; ++lane)
      store_code(first + lane, static_cast<int8_t>(codes[lane]));
  });
}

// The nearest e4m3, ties to even, of a value of at most 448.
uint8_t float_to_fp8(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  uint8_t sign = word >> 24 & 0x80;
  float magnitude = std::fabs(x);
  if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(nearbyintf(magnitude * 0x1p9f));
  std::memcpy(&word, &magnitude, 4);
  word += 0x7ffff + (word >> 20 & 1);
  return sign | static_cast<uint8_t>((word >> 20) - (120 << 3));
}

void store_int8(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
                int lane) {
  auto* codes = reinterpret_cast<int8_t*>(sub_block);
  k_scales(layout, sub_block)[lane] = quantize(
      k, layout.k_width, 127, [&](int i, int8_t code) { codes[k_element(layout, i, lane)] = code; });
  if (layout.v_width == 0) return;
  codes += layout.v_offset;
  v_scales(layout, sub_block)[lane] = quantize(
      v, layout.v_width, 127, [&](int i, int8_t code) { codes[v_element(layout, i, lane)] = code; });
}

void put_nibble(uint8_t& byte, bool high, int8_t code) {
  auto nibble = static_cast<uint8_t>(code + kNibbleOffset);
  byte = static_cast<uint8_t>(high ? (byte & 0x0f) | nibble << 4 : (byte & 0xf0) | nibble);
}

void store_int4(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
                int lane) {
  float rotated[kWidestRotation];
  std::copy_n(k, layout.k_width, rotated);
  rotate(rotated, layout.k_width);
  k_scales(layout, sub_block)[lane] =
      quantize(rotated, layout.k_width, 7, [&](int i, int8_t code) {
        put_nibble(sub_block[k_element(layout, i, lane)], high_half(i, kKeysOfHalf), code);
      });
  std::copy_n(v, layout.v_width, rotated);
  rotate(rotated, layout.v_width);
  uint8_t* values = sub_block + layout.v_offset;
  v_scales(layout, sub_block)[lane] =
      quantize(rotated, layout.v_width, 7, [&](int i, int8_t code) {
        put_nibble(values[v_element(layout, i, lane)], high_half(i, kValuesOfHalf), code);
      });
}

void store_fp8(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
               int lane) {
  constexpr int kLargest = 448;
  k_scales(layout, sub_block)[lane] =
      scaled(k, layout.k_width, kLargest, [&](int first, vf values, int lanes) {
        for (int i = 0; i < lanes; ++i)
          sub_block[k_element(layout, first + i, lane)] = float_to_fp8(values[i]);
      });
  if (layout.v_width == 0) return;
  uint8_t* row = sub_block + layout.v_offset;
  v_scales(layout, sub_block)[lane] =
      scaled(v, layout.v_width, kLargest, [&](int first, vf values, int lanes) {
        for (int i = 0; i < lanes; ++i)
          row[v_element(layout, first + i, lane)] = float_to_fp8(values[i]);
      });
}

void store_floats(const SubBlockLayout& layout, const float* k, const float* v, uint8_t* sub_block,
                  int lane) {
  for (int i = 0; i < layout.k_width; ++i)
    store_element(layout.format, sub_block, k_element(layout, i, lane), k[i]);
  uint8_t* row = sub_block + layout.v_offset;
  for (int i = 0; i < layout.v_width; ++i)
    store_element(layout.format, row, v_element(layout, i, lane), v[i]);
}

using StoreToken = void (*)(const SubBlockLayout&, const float*, const float*, uint8_t*, int);

StoreToken store_of(int format) {
  switch (format) {
    case RL_INT8:
      return store_int8;
    case RL_INT4:
      return store_int4;
    case RL_FP8:
      return store_fp8;
    default:
      return store_floats;
  }
}

void write_tokens(const rl_kv_group& group, const SubBlockLayout& layout, int layer,
                  const rl_sequence& sequence, const int32_t* block_table, int first, int last,
                  const float* k, int64_t k_stride, const float* v, int64_t v_stride) {
  int heads = group.num_kv_heads;
  StoreToken store = store_of(layout.format);
  for (int token = first; token < last; ++token) {
    int64_t slot = sequence.start + token;
    int64_t row = sequence.first_row + token;
    if (!is_here(group, block_table[slot / group.block_tokens])) continue;
    for (int head = 0; head < heads; ++head) {
      uint8_t* sub_block = sub_block_at(group, layout, layer, head, block_table, slot);
      const float* k_head = k + row * k_stride + head * layout.k_width;
      const float* v_head = v + row * v_stride + head * layout.v_width;
      store(layout, k_head, v_head, sub_block, slot % kSubTokens);
    }
  }
}

}  // namespace

void rotate(float* x, int width) {
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  float factor = 1 / std::sqrt(static_cast<float>(width));
  for (int i = 0; i < width; i += W) {  // between lanes of a vector
    vf values = load(x + i);
    for (int half = 1; half < W; half *= 2) {
      vf sign = to_float(1 - 2 * ((lanes & half) / half));
      values = values * sign + __builtin_shuffle(values, lanes ^ half);
    }
    store(x + i, values);
  }
  for (int half = W; half < width; half *= 2)  // between vectors
    for (int i = 0; i < width; i += W) {
      if (i & half) continue;
      vf low = load(x + i), high = load(x + i + half);
      store(x + i, low + high);
      store(x + i + half, low - high);
    }
  for (int i = 0; i < width; i += W) store(x + i, load(x + i) * factor);
}

SubBlockLayout sub_block_layout(const rl_kv_group& group) {
  SubBlockLayout layout = {};
  layout.format = group.format;
  layout.k_width = group.k_width;
  layout.v_width = group.v_width;
  layout.v_stride = static_cast<int>(round_up(group.v_width, 16));
  layout.element_bits = bits_of_element(group.format);
  int64_t k_elements = group.format == RL_INT8 ? round_up(group.k_width, 4) : group.k_width;
  layout.v_offset = k_elements * kSubTokens * layout.element_bits / 8;
  layout.k_scales_offset =
      layout.v_offset + int64_t{kSubTokens} * layout.v_stride * layout.element_bits / 8;
  int64_t scales = has_scales(group.format) ? kSubTokens * int64_t{sizeof(float)} : 0;
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
      if (sequence.cuts) continue;
      int first = std::max(first_row - sequence.first_row, 0);
      int last = std::min(first_row + kWriteTokens - sequence.first_row, sequence.num_tokens);
      write_tokens(group, layout, layer, sequence, sequence.block_tables[group_index], first, last,
                   k, k_stride, v, v_stride);
    }
  });
}

void copy_slot(const SubBlockLayout& layout, const uint8_t* from, int from_lane, uint8_t* to,
               int to_lane) {
  int64_t size = layout.element_bits / 8;
  const uint8_t* v_from = from + layout.v_offset;
  uint8_t* v_to = to + layout.v_offset;
  if (has_scales(layout.format)) {
    std::memcpy(to + layout.k_scales_offset + to_lane * sizeof(float),
                from + layout.k_scales_offset + from_lane * sizeof(float), sizeof(float));
    if (layout.v_width)
      std::memcpy(to + layout.v_scales_offset + to_lane * sizeof(float),
                  from + layout.v_scales_offset + from_lane * sizeof(float), sizeof(float));
  }
  if (layout.format == RL_INT8 || layout.format == RL_INT4) {
    for (int k = 0; k < layout.k_width; k += 4)
      std::memcpy(to + k_element(layout, k, to_lane), from + k_element(layout, k, from_lane), 4);
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
  bool is_scaled = has_scales(layout.format);
  for (int64_t slot = start; slot < int64_t{start} + count; ++slot) {
    int lane = slot % kSubTokens;
    for (int head = 0; head < group->num_kv_heads; ++head) {
      uint8_t* sub_block = sub_block_at(*group, layout, layer, head, block_table, slot);
      float scale = is_scaled ? k_scales(layout, sub_block)[lane] : 1;
      for (int i = 0; i < layout.k_width; ++i)
        k[i] = scale * load_element(layout.format, sub_block, k_element(layout, i, lane),
                                    high_half(i, kKeysOfHalf));
      if (layout.v_width && is_scaled) scale = v_scales(layout, sub_block)[lane];
      for (int i = 0; i < layout.v_width; ++i)
        v[i] = scale * load_element(layout.format, sub_block + layout.v_offset,
                                    v_element(layout, i, lane), high_half(i, kValuesOfHalf));
      if (layout.format == RL_INT4) rotate(k, layout.k_width), rotate(v, layout.v_width);
      k += layout.k_width, v += layout.v_width;
    }
  }
}
