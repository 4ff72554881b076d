#include "activations.h"

#include <algorithm>

#include "simd.h"

namespace rl {
namespace {

constexpr int kLongestGroup = 128;   // of activations
constexpr int kItemElements = 4096;  // of one tile of work, about

// Whether a matrix is multiplied with pairs of bfloats.
bool takes_pairs(const rl_matrix& m) {
#if defined(__AVX512BF16__)
  return m.format == RL_BF16;
#else
  (void)m;
  return false;
#endif
}

// Bytes of a token that lie together for AMX: as many as a tile holds, in a step that is whole blocks.
int32_t block_bytes(const rl_matrix& m) {
  int step = step_columns(m);
  return is_quantized(m.format) ? std::min(step & -step, kAmxBytes) : kAmxBytes;
}

// Columns of a panel: bytes, floats or pairs.
int32_t padded_columns(const rl_matrix& m, int32_t num_tokens) {
  if (is_quantized(m.format))
    return static_cast<int32_t>(round_up(m.columns, activation_group(m)));
  if (takes_amx(m, num_tokens))
    return static_cast<int32_t>(round_up(m.columns, kAmxBytes / 2)) / 2;
  if (takes_pairs(m)) return (m.columns + 1) / 2;
  return m.format == RL_BF16 ? m.columns + m.columns % 2 : m.columns;
}

// Columns [first, last) of a row as slot m of a panel of M tokens.
void copy_row(const rl_matrix& matrix, const float* x, int32_t first, int32_t last, int m, int M,
              float* panel) {
  if (takes_pairs(matrix)) {
    float* to = panel + static_cast<int64_t>(first) * M + m;
    for (int32_t k = first; k < last; k += W / 2) {
      int16_t pairs[W];
      store_codes(pairs, bfloats_of(load_some(x + 2 * k, matrix.columns - 2 * k)));
      for (int i = 0; i < W / 2 && k + i < last; ++i, to += M) std::memcpy(to, pairs + 2 * i, 4);
    }
  } else {
    for (int32_t k = first; k < last; ++k)
      panel[static_cast<int64_t>(k) * M + m] = k < matrix.columns ? x[k] : 0.0f;
  }
}

// The same for AMX, pairs in blocks of tokens.
void copy_pairs(const float* x, int32_t columns, int32_t first, int32_t last, int m,
                const Panels& panels, int64_t panel) {
  constexpr int kPairs = kAmxBytes / 4;
  const int M = panels.panel_tokens(panel);
  float* to = panels.floats + panels.first_token(panel) * panels.padded_columns + m * kPairs;
  for (int32_t k = first; k < last; k += W / 2)
    store_codes(reinterpret_cast<int16_t*>(to + k / kPairs * kPairs * M + k % kPairs),
                bfloats_of(load_some(x + 2 * k, columns - 2 * k)));
}

int32_t num_steps(const rl_matrix& m) {
  return is_quantized(m.format) ? padded_columns(m, 0) / step_columns(m) : 0;
}

int32_t num_units(const rl_matrix& m, int32_t num_tokens) {
  return is_quantized(m.format) ? padded_columns(m, num_tokens) / Units(m, num_tokens).columns : 0;
}

// What sums of the bytes are for: minimums are multiplied with them; products by vectors start from minus
// them, unless codes are meant as they are multiplied. Those by AMX start from 0.
bool takes_sums(const rl_matrix& m) { return m.has_min; }
bool takes_minus_sums(const rl_matrix& m, int32_t num_tokens) {
  return static_cast<bool>(m.has_min) == takes_signed(m.format) && !takes_amx(m, num_tokens);
}

// The bytes of quantized panels: one part after the other.
struct PartBytes {
  int64_t scales, sums, minus_sums, codes;

  PartBytes(const rl_matrix& m, int32_t num_tokens) {
    auto of_tokens = [&](int64_t each) { return round_up(num_tokens * each, 64); };
    scales = of_tokens(num_steps(m) * 4);
    sums = takes_sums(m) ? scales : 0;
    minus_sums = takes_minus_sums(m, num_tokens) ? of_tokens(num_units(m, num_tokens) * 4) : 0;
    codes = of_tokens(padded_columns(m, num_tokens));
  }
  int64_t all() const { return scales + sums + minus_sums + codes; }
};

// Slot m of a panel of M tokens, from some column on: what `quantize` writes, and moves behind. Null
// where panels have none.
struct Slot {
  int8_t* bytes;
  float* scales;
  float* sums;
  int32_t* minus_sums;
};

// Quantizes one activation group of kSteps steps, of which the columns from `valid` on are zero.
template <int kSteps, bool kSummed>
inline void quantize_group(const float* x, int group, const Units& units, int valid, int M, int block,
                           Slot& to) {
  float scale = scale_of(x, std::min(group, valid), 127);
  float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int step = 0, i = 0; step < kSteps; ++step) {
    int32_t sum_of_step = 0;
    for (int units_end = (step + 1) * group / kSteps; i < units_end;) {
      vi total{};
      for (int end = i + units.columns; i < end; i += W) {
        vi codes = round_to_int(load_some(x + i, valid - i) * inverse);
        if (kSummed) total += codes << 24 >> 24;  // of the bytes, also where something is not a number
        int8_t packed[W];
        store_codes(packed, codes);
        if (block) {
          std::memcpy(to.bytes, packed, W);
          to.bytes += (i + W) % block ? W : W + (M - 1) * block;
        } else {
          RL_UNROLL
          for (int column = 0; column < W; column += 4, to.bytes += 4 * M)
            std::memcpy(to.bytes, packed + column, 4);
        }
      }
      if (!kSummed) continue;
      int32_t sum_of_unit = sum(total);
      sum_of_step += sum_of_unit;
      if (!to.minus_sums) continue;
      *to.minus_sums = units.minus(sum_of_unit);
      to.minus_sums += M;
    }
    *to.scales = scale;
    to.scales += M;
    if (!to.sums) continue;
    *to.sums = scale * static_cast<float>(sum_of_step);
    to.sums += M;
  }
}

// Quantizes columns [first, last) of a row, whole activation groups, into slot m of a panel.
// `kSummed`: bytes are summed, for one of the panel's two kinds of sums.
template <bool kSummed>
void quantize_row(const rl_matrix& matrix, const float* x, int32_t first, int32_t last, int m,
                  const Panels& panels, int64_t panel) {
  const int group = activation_group(matrix), step = step_columns(matrix);
  const Units units(matrix, panels.num_tokens);
  const int M = panels.panel_tokens(panel);
  const int block = panels.block_bytes, together = block ? block : 4;
  const int64_t token = panels.first_token(panel);
  Slot to{};
  to.bytes = panels.bytes + token * panels.padded_columns + int64_t{first} * M + together * m;
  to.scales = panels.scales + token * panels.num_steps + first / step * M + m;
  if (panels.sums) to.sums = panels.sums + token * panels.num_steps + first / step * M + m;
  if (panels.minus_sums)
    to.minus_sums = panels.minus_sums + token * panels.num_units + first / units.columns * M + m;
  for (int32_t k = first; k < last; k += group) {
    if (step < group)
      quantize_group<2, kSummed>(x + k, group, units, matrix.columns - k, M, block, to);
    else
      quantize_group<1, kSummed>(x + k, group, units, matrix.columns - k, M, block, to);
  }
}

// Of as few blocks as there can be, of up to so many bytes each.
int32_t panels_each(int64_t bytes, int32_t num_panels) {
  constexpr int64_t kBlockBytes = 1 << 21;
  int64_t most = kBlockBytes * num_panels / std::max<int64_t>(bytes, 1);
  int64_t blocks = ceil_div(std::max(num_panels, 1), std::max<int64_t>(most, 1));
  return static_cast<int32_t>(ceil_div(std::max(num_panels, 1), blocks));
}

}  // namespace

int64_t panel_bytes(const rl_matrix& m, int32_t num_tokens) {
  if (is_quantized(m.format)) return PartBytes(m, num_tokens).all();
  return round_up(static_cast<int64_t>(num_tokens) * padded_columns(m, num_tokens) * 4, 64);
}

Panels panels_in(const rl_matrix& m, int32_t num_tokens, void* scratch) {
  Panels panels{};
  panels.num_tokens = num_tokens;
  panels.num_bytes = panel_bytes(m, num_tokens);
  panels.count = num_panels_of(m, num_tokens);
  panels.panels_each = panels_each(panels.num_bytes, panels.count);
  panels.padded_columns = padded_columns(m, num_tokens);
  panels.block_bytes = takes_amx(m, num_tokens) ? block_bytes(m) : 0;
  panels.num_steps = num_steps(m);
  panels.num_units = num_units(m, num_tokens);
  auto* bytes = static_cast<uint8_t*>(scratch);
  if (!is_quantized(m.format)) {
    panels.floats = reinterpret_cast<float*>(bytes);
    return panels;
  }
  const PartBytes parts(m, num_tokens);
  panels.scales = reinterpret_cast<float*>(bytes);
  bytes += parts.scales;
  if (takes_sums(m)) panels.sums = reinterpret_cast<float*>(bytes);
  bytes += parts.sums;
  if (takes_minus_sums(m, num_tokens)) panels.minus_sums = reinterpret_cast<int32_t*>(bytes);
  bytes += parts.minus_sums;
  panels.bytes = reinterpret_cast<int8_t*>(bytes);
  return panels;
}

bool same_panels(const rl_matrix& a, const rl_matrix& b) {
  if (a.columns != b.columns || is_quantized(a.format) != is_quantized(b.format)) return false;
  if (!is_quantized(a.format)) return a.format == b.format;
  const Units of_a(a, 1), of_b(b, 1);
  return step_columns(a) == step_columns(b) && of_a.columns == of_b.columns &&
         activation_group(a) == activation_group(b) && of_a.multiple == of_b.multiple &&
         takes_sums(a) == takes_sums(b);
}

void fill_panels(Pool& pool, const rl_matrix& matrix, const Rows& rows, const Panels& panels) {
  fill_each(pool, matrix, &rows, &panels, 1);
}

void fill_each(Pool& pool, const rl_matrix& matrix, const Rows* all_rows, const Panels* all_panels,
               int count) {
  if (all_panels[0].num_tokens == 0) return;
  int32_t padded = all_panels[0].padded_columns;
  int32_t chunk_columns = static_cast<int32_t>(
      round_up(kItemElements / all_panels[0].panel_tokens(0), kLongestGroup));
  int64_t chunks = ceil_div(padded, chunk_columns), tiles = all_panels[0].num_panels() * chunks;
  bool quantized = is_quantized(matrix.format);
  auto fill = [&](int64_t item, int) {
    const Rows& rows = all_rows[item / tiles];
    const Panels& panels = all_panels[item / tiles];
    int64_t tile = item % tiles, panel = tile / chunks;
    int32_t first = static_cast<int32_t>(tile % chunks) * chunk_columns;
    int32_t last = first + chunk_columns < padded ? first + chunk_columns : padded;
    int M = panels.panel_tokens(panel);
    int64_t offset = panels.first_token(panel);
    for (int m = 0; m < M; ++m) {
      const float* x = rows.data + (offset + m) * rows.stride;
      if (quantized)
        (panels.sums || panels.minus_sums ? quantize_row<true> : quantize_row<false>)(
            matrix, x, first, last, m, panels, panel);
      else if (panels.block_bytes)
        copy_pairs(x, matrix.columns, first, last, m, panels, panel);
      else
        copy_row(matrix, x, first, last, m, M, panels.floats + offset * padded);
    }
  };
  pool.run(tiles * count, fill);
}

}  // namespace rl
