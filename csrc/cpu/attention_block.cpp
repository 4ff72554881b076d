// One block of rows over one split of the cache.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "attention_bytes.h"

namespace rl {
namespace {

int panel_rows(int num_rows) {
  int panels = (num_rows + kTileRowsMax - 1) / kTileRowsMax;
  return (num_rows + panels - 1) / panels;
}

using ScoreRows = void (*)(const Operands&, int, int, const float*, int, float*);
using MixRows = void (*)(const ChunkValues&, const float*, const float*, float*, int);

// The tiles of a format by their number of rows, from 1.
template <int F, int... R>
struct TileTable {
  static constexpr ScoreRows score[] = {score_rows<F, R>...};
  static constexpr MixRows mix[] = {mix_rows<F, R>...};
};
using ScoreBytes = void (*)(const Operands&, int, int, const QueryRows&, float*);
using MixBytes = void (*)(const ChunkValues&, const WeightRows&, float*, int);
template <int F, int... R>
struct BytesTable {
  static constexpr ScoreBytes score[] = {score_bytes<F, R>...};
  static constexpr MixBytes mix[] = {mix_bytes<F, R>...};
};
#if defined(__AVX512F__)
template <int F>
using Tiles = TileTable<F, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;
template <int F>
using BytesTiles = BytesTable<F, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;
#elif defined(RL_VECTORS)
template <int F>
using Tiles = TileTable<F, 1, 2, 3, 4, 5, 6>;
template <int F>
using BytesTiles = BytesTable<F, 1, 2, 3, 4, 5, 6>;
#else
template <int F>
using Tiles = TileTable<F, 1, 2>;
template <int F>
using BytesTiles = BytesTable<F, 1, 2>;
#endif

// Whether products are of integers: int8 and int4 K and V. The V of latents is K, and lies otherwise.
constexpr bool is_integer(int format) { return format == RL_INT8 || format == RL_INT4; }
bool of_integers(const rl_kv_group& group) { return is_integer(group.format) && group.v_width > 0; }

// Calls body(first row, number of rows) for each panel.
template <class Body>
void for_panels(int num_rows, const Body& body) {
  int step = panel_rows(num_rows);
  for (int row = 0; row < num_rows; row += step) body(row, std::min(step, num_rows - row));
}

// The slots that a block's rows see: those of any row, from first to last and sinks, and those of all.
struct Seen {
  Visible by_any;
  Visible by_all;

  // Whether every row sees the whole chunk that begins at a slot.
  bool all_see(int start) const {
    return by_all.first <= start && start + kChunkTokens <= by_all.last;
  }
};

// A chunk of the cache as one block of rows sees it: sub-blocks [first, last) of it.
struct Chunk {
  int start;  // slot
  int first;
  int last;
  Operands sub_blocks;
};

// Puts the slots of a draft's path one behind the other.
const uint8_t* gather(const RowBlock& block, const SubBlockLayout& layout, int start, int last,
                      uint8_t* gathered) {
  const rl_sequence& sequence = *block.sequence;
  int first_draft = sequence.start + sequence.num_tokens - sequence.num_drafts;
  int token = block.first_row / (block.attention->num_heads / block.group->num_kv_heads);
  uint64_t path = sequence.ancestors[token];
  for (int i = first_draft; i < start; ++i) path &= path - 1;
  for (int slot = start; slot < std::min(start + kSubTokens, last); ++slot) {
    int source = slot;
    if (slot >= first_draft) {
      source = first_draft + __builtin_ctzll(path);
      path &= path - 1;
    }
    bool apart = slot >= first_draft && block.draft_group;
    const uint8_t* from = sub_block_at(apart ? *block.draft_group : *block.group, layout,
                                       apart ? 0 : block.layer, block.kv_head,
                                       apart ? block.draft_table : block.block_table, source);
    copy_slot(layout, from, source % kSubTokens, gathered, slot % kSubTokens);
  }
  return gathered;
}

Chunk find_chunk(const RowBlock& block, const SubBlockLayout& layout, int start, Visible seen,
                 BlockScratch& scratch) {
  const rl_sequence& sequence = *block.sequence;
  int first_draft = sequence.start + sequence.num_tokens - sequence.num_drafts;
  Chunk chunk = {};
  chunk.start = start;
  bool of_sinks = start < seen.sinks, of_sinks_alone = start + kChunkTokens <= seen.first;
  chunk.first = of_sinks ? 0 : std::max(seen.first - start, 0) / kSubTokens;
  int last_slot = of_sinks_alone ? seen.sinks : seen.last;
  chunk.last = (std::min(last_slot - start, kChunkTokens) + kSubTokens - 1) / kSubTokens;
  auto is_seen = [&](int slot) { return slot < seen.sinks || slot + kSubTokens > seen.first; };
  for (int s = chunk.first; s < chunk.last; ++s) {
    int slot = start + s * kSubTokens;
    // What lies between sinks and window may be anyone's: the first sub-block stands for it, unweighed.
    if (!is_seen(slot)) {
      chunk.sub_blocks.now[s] = chunk.sub_blocks.later[s] = chunk.sub_blocks.now[0];
      continue;
    }
    bool path = sequence.ancestors && std::min(slot + kSubTokens, seen.last) > first_draft;
    auto at = [&](int where) {
      return sub_block_at(*block.group, layout, block.layer, block.kv_head, block.block_table,
                          where);
    };
    chunk.sub_blocks.now[s] =
        path ? gather(block, layout, slot, seen.last, scratch.gathered + s * layout.bytes)
             : at(slot);
    int next = slot + kChunkTokens;
    bool is_next = next < seen.last && is_seen(next);
    chunk.sub_blocks.later[s] = is_next ? at(next) : chunk.sub_blocks.now[s];
  }
  return chunk;
}

template <int F>
void convert_keys(const uint8_t* sub_block, int width, float* keys) {
  for (int k = 0; k < width; ++k)
    for (int lane = 0; lane < kSubTokens; lane += W)
      store(keys + k * kSubTokens + lane, load_k<F>(sub_block, k, lane));
}

// Latents: the first elements of K are V.
void transpose_keys(const float* keys, int width, int stride, float* values) {
  for (int k = 0; k < width; ++k)
    for (int t = 0; t < kSubTokens; ++t) values[t * stride + k] = keys[k * kSubTokens + t];
}

template <int F>
void convert_values(const uint8_t* from, int num_elements, float* to) {
  for (int i = 0; i < num_elements; i += W) store(to + i, load_elements<F>(from, i));
}

// Scores of the chunk, as the products of codes of q and K.
template <int F>
void score_integers(const RowBlock& block, const Chunk& chunk, BlockScratch& scratch) {
  int quads = (block.group->k_width + 3) / 4;
  const auto* codes = reinterpret_cast<const QueryCode*>(scratch.q);
  for_panels(block.num_rows, [&](int row, int rows) {
    QueryRows panel{codes + row * quads * 4, scratch.q_starts + row, scratch.q_scales + row, quads};
    BytesTiles<F>::score[rows - 1](chunk.sub_blocks, chunk.first, chunk.last, panel,
                                   scratch.scores + row * kChunkTokens);
  });
}

// The same of floats.
template <int F>
void score_floats(const RowBlock& block, const Chunk& chunk, bool convert, BlockScratch& scratch) {
  int width = block.group->k_width;
  auto panels = [&](const ScoreRows* kernels, const Operands& keys, int first, int last) {
    for_panels(block.num_rows, [&](int row, int rows) {
      kernels[rows - 1](keys, first, last, scratch.q + row * width, width,
                        scratch.scores + row * kChunkTokens);
    });
  };
  if constexpr (!is_integer(F)) {  // latents of int8 are always converted
    if (!convert) return panels(Tiles<F>::score, chunk.sub_blocks, chunk.first, chunk.last);
  }
  Operands converted = {};
  for (int s = chunk.first; s < chunk.last; ++s) {
    convert_keys<F>(chunk.sub_blocks.now[s], width, scratch.keys);
    if (block.group->v_width == 0)
      transpose_keys(scratch.keys, block.out_width, block.out_stride,
                     scratch.values + s * kSubTokens * block.out_stride);
    converted.now[s] = reinterpret_cast<const uint8_t*>(scratch.keys);
    panels(Tiles<RL_F32>::score, converted, s, s + 1);
  }
}

// The softmax weights of one row, as vectors.
using Weights = vf[kChunkTokens / W];

// Weights as words, with what they are to be multiplied by, and what sums over V start from.
template <int F>
RL_INLINE inline void as_words(const Weights& weights, int row, BlockScratch& scratch) {
  float scale = scale_of(weights, kLargestWeight), inverse = scale > 0 ? 1 / scale : 0;
  int16_t* words = scratch.weights + row * kChunkTokens;
  vi total{};
  RL_UNROLL
  for (int i = 0; i < kChunkTokens / W; ++i) {
    vi word = round_to_int(weights[i] * inverse);
    store_codes(words + i * W, word);
    if constexpr (F == RL_INT4) total += word << 16 >> 16;  // 0 for NaN
  }
  scratch.weight_scales[row] = scale;
  scratch.weight_starts[row] = F == RL_INT4 ? -kNibbleOffset * sum(total) : 0;
}

// Turns scores into weights 2^(score - maximum), and updates maximum, sum and decay.
template <int F>
void weigh_chunk(const RowBlock& block, const SubBlockLayout& layout, const Chunk& chunk,
                 BlockScratch& scratch, float* maximum) {
  constexpr int kVectors = kChunkTokens / W;
  const float cap = block.attention->softcap;
  const bool integers = of_integers(*block.group);
  float k_scales[kChunkTokens] = {}, v_scales[kChunkTokens] = {};
  if constexpr (has_scales(F)) {
    for (int s = chunk.first; s < chunk.last; ++s) {
      const uint8_t* sub_block = chunk.sub_blocks.now[s];
      int64_t v_offset = layout.v_width ? layout.v_scales_offset : layout.k_scales_offset;
      std::memcpy(k_scales + s * kSubTokens, sub_block + layout.k_scales_offset, 64);
      std::memcpy(v_scales + s * kSubTokens, sub_block + v_offset, 64);
    }
  }
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  for (int row = 0; row < block.num_rows; ++row) {
    float* scores = scratch.scores + row * kChunkTokens;
    const int first = scratch.visible[row].first - chunk.start;
    const int last = scratch.visible[row].last - chunk.start;
    const int sinks = scratch.visible[row].sinks - chunk.start;
    const bool partly = first > 0 || last < kChunkTokens;
    auto sees = [&](int i) {
      vi slots = lanes + i * W;
      return ((vi)(slots >= first) & (vi)(slots < last)) | (vi)(slots < sinks);
    };
    Weights x;
    vf best = splat(maximum[row]);
    RL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      x[i] = load(scores + i * W);
      if constexpr (has_scales(F)) x[i] *= load(k_scales + i * W);
      if (cap > 0) x[i] = tanh(x[i]) * (cap * kLog2E);
      if (partly) x[i] = select(sees(i), x[i], splat(-INFINITY));
      best = max(best, x[i]);
    }
    const float new_maximum = max_lane(best);
    const vf decay = exp2_of_negative(splat(maximum[row] - new_maximum));
    maximum[row] = new_maximum;
    scratch.decay[row] = decay[0];
    vf sum = load(scratch.lane_sums + row * W) * decay;
    RL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      x[i] = exp2_of_negative(x[i] - splat(new_maximum));
      sum += x[i];
      if constexpr (has_scales(F)) {
        x[i] *= load(v_scales + i * W);
        if (partly) x[i] = select(sees(i), x[i], vf{});  // 0 times what is not finite is not 0
      }
    }
    store(scratch.lane_sums + row * W, sum);
    if (integers) {
      as_words<F>(x, row, scratch);
    } else {
      RL_UNROLL
      for (int i = 0; i < kVectors; ++i) store(scores + i * W, x[i]);
    }
  }
}

// Puts row r of the panel that begins at row `first` among the queries as bytes.
void quantize_query(int format, const float* q, int width, float factor, int first, int rows, int r,
                    BlockScratch& scratch) {
  int quads = (width + 3) / 4;
  auto* codes = reinterpret_cast<QueryCode*>(scratch.q) + first * quads * 4 + r * 4;
  float scale = scale_of(q, width, 127);
  float inverse = scale > 0 ? 1 / scale : 0;
  vi total{};
  for (int i = 0; i < quads * 4; i += W) {
    vi values = round_to_int(load_some(q + i, width - i) * inverse) << 24 >> 24;  // 0 for NaN
    total += values;
    QueryCode packed[W];
    store_codes(packed, values);
    for (int quad = 0; quad < W / 4 && i / 4 + quad < quads; ++quad)
      std::memcpy(codes + (i / 4 + quad) * rows * 4, packed + quad * 4, 4 * sizeof(QueryCode));
  }
  scratch.q_starts[first + r] = -(format == RL_INT4 ? kNibbleOffset : kKeyOffset) * sum(total);
  scratch.q_scales[first + r] = scale * factor;
}

// Whether V of tokens [first, last) of a chunk is finite in all elements.
template <int F>
__attribute__((noinline)) bool is_finite(const ChunkValues& values, int first, int last,
                                         int width) {
  constexpr int32_t kExponent = 0x7f800000;
  vi odd = {};
  for (int t = first; t < last; ++t) {
    const uint8_t* stored = values.sub_blocks.now[t / kSubTokens];
    int64_t start = int64_t{t % kSubTokens} * values.stride;
    for (int i = 0; i < width; i += W) {
      vi exponents = bits_of(load_elements<F>(stored, start + i)) & kExponent;
      for (int lane = width - i; lane < W; ++lane) exponents[lane] = 0;  // padding is anything
      odd |= exponents == kExponent;
    }
  }
  int32_t any = 0;
  for (int lane = 0; lane < W; ++lane) any |= odd[lane];
  return any == 0;
}

// One row over its own tokens alone, with the bits of a tile.
template <int F>
__attribute__((noinline)) void mix_alone(const ChunkValues& values, int first, int last,
                                         const float* weights, float decay, float* out,
                                         int out_stride) {
  for (int column = 0; column < out_stride; column += W) {
    vf sum = load(out + column) * splat(decay);
    for (int t = first; t < last; ++t) {
      const uint8_t* stored = values.sub_blocks.now[t / kSubTokens];
      vf elements = load_elements<F>(stored, int64_t{t % kSubTokens} * values.stride + column);
      sum = fma(splat(weights[t]), elements, sum);
    }
    store(out + column, sum);
  }
}

// Adds V times the weights to every row. Rows of a block do not all see the same slots; the weights
// of what a row does not see are 0, and 0 times a number leaves the sum as it is. Where there is
// something else among those slots each row goes over its own alone.
template <int F>
void mix_values(const RowBlock& block, const MixRows* kernels, const ChunkValues& values,
                const Chunk& chunk, const Seen& seen, const BlockScratch& scratch, float* out) {
  int first = values.first_sub_block * kSubTokens, last = values.last_token;
  auto in_chunk = [&](int slot) { return std::clamp(slot - chunk.start, first, last); };
  // Codes are finite; their scales are in the weights.
  bool together = has_scales(block.group->format) || seen.all_see(chunk.start) ||
                  (is_finite<F>(values, first, in_chunk(seen.by_all.first), block.out_width) &&
                   is_finite<F>(values, in_chunk(seen.by_all.last), last, block.out_width));
  if (together) {
    for_panels(block.num_rows, [&](int row, int rows) {
      kernels[rows - 1](values, scratch.scores + row * kChunkTokens, scratch.decay + row,
                        out + row * block.out_stride, block.out_stride);
    });
    return;
  }
  for (int row = 0; row < block.num_rows; ++row) {
    Visible own = scratch.visible[row];
    auto mix = [&](int from, int to, float decay) {
      mix_alone<F>(values, in_chunk(from), in_chunk(to), scratch.scores + row * kChunkTokens, decay,
                   out + row * block.out_stride, block.out_stride);
    };
    mix(0, own.sinks, scratch.decay[row]);
    mix(own.first, own.last, 1.0f);
  }
}

template <int F>
void mix_chunk(const RowBlock& block, const SubBlockLayout& layout, const Chunk& chunk,
               const Seen& seen, bool convert, BlockScratch& scratch, float* out) {
  ChunkValues values = {};
  values.stride = convert ? block.out_stride : layout.v_stride;
  values.first_sub_block = chunk.first;
  values.last_token = std::min(seen.by_any.last - chunk.start, chunk.last * kSubTokens);
  for (int s = chunk.first; s < chunk.last; ++s) {
    const uint8_t* stored = chunk.sub_blocks.now[s] + layout.v_offset;
    if (convert) {
      float* converted = scratch.values + s * kSubTokens * block.out_stride;
      int tokens = std::min(kSubTokens, values.last_token - s * kSubTokens);
      if constexpr (F != RL_INT4)
        if (layout.v_width) convert_values<F>(stored, tokens * layout.v_stride, converted);
      stored = reinterpret_cast<const uint8_t*>(converted);
    }
    values.sub_blocks.now[s] = stored;
    values.sub_blocks.later[s] = chunk.sub_blocks.later[s] + layout.v_offset;
  }
  if constexpr (is_integer(F)) {
    if (block.group->v_width > 0)
      return for_panels(block.num_rows, [&](int row, int rows) {
        WeightRows panel{scratch.weights + row * kChunkTokens, scratch.weight_starts + row,
                         scratch.weight_scales + row, scratch.decay + row};
        BytesTiles<F>::mix[rows - 1](values, panel, out + row * block.out_stride, block.out_stride);
      });
  } else {
    if (!convert) return mix_values<F>(block, Tiles<F>::mix, values, chunk, seen, scratch, out);
  }
  mix_values<RL_F32>(block, Tiles<RL_F32>::mix, values, chunk, seen, scratch, out);
}

template <int F>
void split(const RowBlock& block, const SubBlockLayout& layout, int first, const Seen& seen,
           BlockScratch& scratch, const Partial& partial) {
  Visible by_any = seen.by_any;
  // Converting to floats once pays as soon as several panels read the result; latents are always
  // transposed.
  bool several = F != RL_F32 && block.num_rows > kTileRowsMax;
  bool integers = of_integers(*block.group);
  bool convert = !integers && (layout.v_width == 0 || several);
  for (int start = first; start < first + kSplitTokens; start += kChunkTokens) {
    bool is_seen = start < by_any.sinks || start + kChunkTokens > by_any.first;
    if (!is_seen || start >= by_any.last) continue;
    Chunk chunk = find_chunk(block, layout, start, by_any, scratch);
    if constexpr (is_integer(F))
      if (integers) score_integers<F>(block, chunk, scratch);
    if constexpr (F != RL_INT4)
      if (!integers) score_floats<F>(block, chunk, convert, scratch);
    weigh_chunk<F>(block, layout, chunk, scratch, partial.maximum);
    mix_chunk<F>(block, layout, chunk, seen, convert, scratch, partial.out);
  }
}

Seen seen_slots(const RowBlock& block, const BlockScratch& scratch) {
  Seen seen = {scratch.visible[0], scratch.visible[0]};
  for (int row = 1; row < block.num_rows; ++row) {
    Visible own = scratch.visible[row];
    seen.by_any.first = std::min(seen.by_any.first, own.first);
    seen.by_any.last = std::max(seen.by_any.last, own.last);
    seen.by_any.sinks = std::max(seen.by_any.sinks, own.sinks);
    seen.by_all.first = std::max(seen.by_all.first, own.first);
    seen.by_all.last = std::min(seen.by_all.last, own.last);
  }
  return seen;
}

}  // namespace

Visible visible_slots(const rl_sequence& sequence, int token, const rl_attention& attention) {
  int first_draft = sequence.num_tokens - sequence.num_drafts;
  int last = sequence.start + token + 1;
  if (sequence.ancestors && token >= first_draft)
    last = sequence.start + first_draft + __builtin_popcountll(sequence.ancestors[token]);
  int window = attention.window, first = window > 0 ? std::max(last - window, 0) : 0;
  if (attention.chunked) first = (last - 1) / window * window;
  if (attention.bidirectional) {
    int stop = sequence.start + sequence.num_tokens;
    return {first, window > 0 ? std::min(last - 1 + window, stop) : stop, 0};
  }
  if (window > 0 || sequence.window == 0) return {first, last, 0};
  first = std::max(last - sequence.window, 0);
  if (first <= sequence.sinks) return {0, last, 0};
  return {first, last, sequence.sinks};
}

void begin_block(const RowBlock& block, BlockScratch& scratch) {
  const rl_attention& attention = *block.attention;
  int width = block.group->k_width;
  int heads = attention.num_heads / block.group->num_kv_heads;
  float scale =
      attention.softcap > 0 ? attention.scale / attention.softcap : attention.scale * kLog2E;
  for_panels(block.num_rows, [&](int first, int rows) {
    for (int r = 0; r < rows; ++r) {
      int row = block.first_row + first + r, token = row / heads;
      scratch.visible[first + r] = visible_slots(*block.sequence, token, attention);
      int64_t head = block.kv_head * heads + row % heads;
      const float* q = block.q + (int64_t{block.sequence->first_row} + token) * block.q_stride +
                       head * width;
      if (block.group->format == RL_INT4) {
        std::copy_n(q, width, scratch.keys);
        rotate(scratch.keys, width);
        q = scratch.keys;
      }
      if (of_integers(*block.group)) {
        quantize_query(block.group->format, q, width, scale, first, rows, r, scratch);
        continue;
      }
      float* panel = scratch.q + first * width + r;
      for (int k = 0; k < width; ++k) panel[k * rows] = q[k] * scale;
    }
  });
}

bool sees_split(const RowBlock& block, const BlockScratch& scratch, int split) {
  Visible seen = seen_slots(block, scratch).by_any;
  bool is_seen = split * kSplitTokens < seen.sinks || seen.first < (split + 1) * kSplitTokens;
  return is_seen && split * kSplitTokens < seen.last;
}

void attend_split(const RowBlock& block, int split_index, BlockScratch& scratch,
                  const Partial& partial) {
  SubBlockLayout layout = sub_block_layout(*block.group);
  Seen seen = seen_slots(block, scratch);
  std::fill_n(partial.maximum, block.num_rows, kNoMaximum);
  std::fill_n(partial.out, int64_t{block.num_rows} * block.out_stride, 0.0f);
  std::fill_n(scratch.lane_sums, block.num_rows * W, 0.0f);
  int first = split_index * kSplitTokens;
  switch (block.group->format) {
    case RL_F32:
      split<RL_F32>(block, layout, first, seen, scratch, partial);
      break;
    case RL_F16:
      split<RL_F16>(block, layout, first, seen, scratch, partial);
      break;
    case RL_BF16:
      split<RL_BF16>(block, layout, first, seen, scratch, partial);
      break;
    case RL_FP8:
      split<RL_FP8>(block, layout, first, seen, scratch, partial);
      break;
    case RL_INT4:
      split<RL_INT4>(block, layout, first, seen, scratch, partial);
      break;
    default:
      split<RL_INT8>(block, layout, first, seen, scratch, partial);
  }
  for (int row = 0; row < block.num_rows; ++row)
    partial.sum[row] = sum(load(scratch.lane_sums + row * W));
}

void merge(const Partial& total, const Partial& part, int num_rows, int out_stride) {
  for (int row = 0; row < num_rows; ++row) {
    float maximum = std::max(total.maximum[row], part.maximum[row]);
    vf before = exp2_of_negative(splat(total.maximum[row] - maximum));
    vf after = exp2_of_negative(splat(part.maximum[row] - maximum));
    total.maximum[row] = maximum;
    total.sum[row] = fma(splat(total.sum[row]), before, splat(part.sum[row]) * after)[0];
    float* out = total.out + row * out_stride;
    const float* added = part.out + row * out_stride;
    for (int i = 0; i < out_stride; i += W)
      store(out + i, fma(load(out + i), before, load(added + i) * after));
  }
}

}  // namespace rl
