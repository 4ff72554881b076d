#include "activations.h"

#include "simd.h"

namespace rl {
namespace {

constexpr int kChunkColumns = 2048;  // of one tile of work; a multiple of every activation group

// Whether a matrix is multiplied with pairs of bfloats.
bool takes_pairs(const rl_matrix& m) {
#if defined(__AVX512BF16__)
  return m.format == RL_BF16;
#else
  (void)m;
  return false;
#endif
}

// Columns of a panel: bytes, floats or pairs.
int32_t padded_columns(const rl_matrix& m) {
  if (is_quantized(m.format))
    return static_cast<int32_t>(round_up(m.columns, activation_group(m)));
  if (takes_pairs(m)) return (m.columns + 1) / 2;
  return m.format == RL_BF16 ? m.columns + m.columns % 2 : m.columns;
}

// Columns [first, last) of a row as slot m of a panel of M tokens.
void copy_row(const rl_matrix& matrix, const float* x, int32_t first, int32_t last, int m, int M,
              float* panel) {
  if (takes_pairs(matrix)) {
    auto* pairs = reinterpret_cast<uint16_t*>(panel);
    for (int32_t k = first; k < last; ++k)
      for (int i = 0; i < 2; ++i)
        pairs[(static_cast<int64_t>(k) * M + m) * 2 + i] =
            2 * k + i < matrix.columns ? float_to_bfloat(x[2 * k + i]) : uint16_t{0};
  } else {
    for (int32_t k = first; k < last; ++k)
      panel[static_cast<int64_t>(k) * M + m] = k < matrix.columns ? x[k] : 0.0f;
  }
}

int32_t num_steps(const rl_matrix& m) {
  return is_quantized(m.format) ? padded_columns(m) / step_columns(m) : 0;
}

int32_t num_units(const rl_matrix& m) {
  return is_quantized(m.format) ? padded_columns(m) / unit_columns(m) : 0;
}

struct Quantized {
  float scale, inverse;
};

// The scale of `count` elements of x, of which those from `valid` on count as zero.
Quantized scale_of(const float* x, int valid) {
  vf largest{}, probe{};
  int i = 0;
  for (; i + W <= valid; i += W) {
    vf values = load(x + i);
    largest = max(abs(values), largest);
    probe += values - values;  // 0, or not a number
  }
  float best = max_lane(largest), odd = sum(probe);
  for (; i < valid; ++i) {
    best = std::fabs(x[i]) > best ? std::fabs(x[i]) : best;
    odd += x[i] - x[i];
  }
  float scale = best / 127.0f;
  return {scale + odd, scale > 0 ? 1.0f / scale : 0.0f};
}

// Quantizes columns [first, first + group) of one row into slot m of a panel of M tokens.
void quantize_group(const rl_matrix& matrix, const float* x, int32_t first, int group, int m, int M,
                    int8_t* bytes, float* scales, float* sums, int32_t* minus_sums) {
  int valid = matrix.columns - first;
  valid = valid < 0 ? 0 : valid > group ? group : valid;
  Quantized q = scale_of(x + first, valid);
  int step = step_columns(matrix), unit = unit_columns(matrix);
  int32_t step_sum = 0;
  for (int start = 0; start < group; start += unit) {
    vi total{};
    for (int i = start; i < start + unit; i += W) {
      vf values{};
      if (i + W <= valid) {
        values = load(x + first + i);
      } else {
        for (int lane = 0; lane < W && i + lane < valid; ++lane) values[lane] = x[first + i + lane];
      }
      vi codes = round_to_int(values * q.inverse);
      total += codes << 24 >> 24;  // of the bytes, also where something is not a number
      int8_t packed[W];
      for (int lane = 0; lane < W; ++lane) packed[lane] = static_cast<int8_t>(codes[lane]);
      for (int quad = 0; quad < W / 4; ++quad)
        std::memcpy(bytes + (((first + i) / 4 + quad) * M + m) * 4, packed + 4 * quad, 4);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < W; ++lane) sum += total[lane];
    minus_sums[(first + start) / unit * M + m] = minus_sum(sum);
    step_sum += sum;
    if ((start + unit) % step == 0) {
      int index = (first + start) / step * M + m;
      scales[index] = q.scale;
      sums[index] = q.scale * static_cast<float>(step_sum);
      step_sum = 0;
    }
  }
}

}  // namespace

int64_t panel_bytes(const rl_matrix& m, int32_t num_tokens) {
  int64_t elements = static_cast<int64_t>(num_tokens) * padded_columns(m);
  if (!is_quantized(m.format)) return round_up(elements * 4, 64);
  int64_t of_steps = round_up(static_cast<int64_t>(num_tokens) * num_steps(m) * 4, 64);
  int64_t of_units = round_up(static_cast<int64_t>(num_tokens) * num_units(m) * 4, 64);
  return round_up(elements, 64) + 2 * of_steps + of_units;
}

Panels panels_in(const rl_matrix& m, int32_t num_tokens, void* scratch) {
  Panels panels{};
  panels.num_tokens = num_tokens;
  panels.padded_columns = padded_columns(m);
  panels.num_steps = num_steps(m);
  panels.num_units = num_units(m);
  auto* bytes = static_cast<uint8_t*>(scratch);
  if (!is_quantized(m.format)) {
    panels.floats = reinterpret_cast<float*>(bytes);
    return panels;
  }
  int64_t of_steps = round_up(static_cast<int64_t>(num_tokens) * panels.num_steps * 4, 64);
  int64_t of_units = round_up(static_cast<int64_t>(num_tokens) * panels.num_units * 4, 64);
  panels.scales = reinterpret_cast<float*>(bytes);
  panels.sums = reinterpret_cast<float*>(bytes + of_steps);
  panels.minus_sums = reinterpret_cast<int32_t*>(bytes + 2 * of_steps);
  panels.bytes = reinterpret_cast<int8_t*>(bytes + 2 * of_steps + of_units);
  return panels;
}

bool same_panels(const rl_matrix& a, const rl_matrix& b) {
  if (a.columns != b.columns || is_quantized(a.format) != is_quantized(b.format)) return false;
  if (!is_quantized(a.format)) return a.format == b.format;
  return step_columns(a) == step_columns(b) && activation_group(a) == activation_group(b);
}

void fill_panels(Pool& pool, const rl_matrix& matrix, const Rows& rows, const Panels& panels) {
  fill_each(pool, matrix, &rows, &panels, 1);
}

void fill_each(Pool& pool, const rl_matrix& matrix, const Rows* all_rows, const Panels* all_panels,
               int count) {
  int32_t padded = all_panels[0].padded_columns;
  int64_t chunks = ceil_div(padded, kChunkColumns), tiles = all_panels[0].num_panels() * chunks;
  bool quantized = is_quantized(matrix.format);
  int group = quantized ? activation_group(matrix) : 0;
  auto fill = [&](int64_t item, int) {
    const Rows& rows = all_rows[item / tiles];
    const Panels& panels = all_panels[item / tiles];
    int64_t tile = item % tiles, panel = tile / chunks;
    int32_t first = static_cast<int32_t>(tile % chunks) * kChunkColumns;
    int32_t last = first + kChunkColumns < padded ? first + kChunkColumns : padded;
    int M = panels.panel_tokens(panel);
    int64_t offset = panel * kPanelTokens;
    for (int m = 0; m < M; ++m) {
      const float* x = rows.data + (offset + m) * rows.stride;
      if (!quantized) {
        copy_row(matrix, x, first, last, m, M, panels.floats + offset * padded);
        continue;
      }
      for (int32_t k = first; k < last; k += group)
        quantize_group(matrix, x, k, group, m, M, panels.bytes + offset * padded,
                       panels.scales + offset * panels.num_steps,
                       panels.sums + offset * panels.num_steps,
                       panels.minus_sums + offset * panels.num_units);
    }
  };
  pool.run(tiles * count, fill);
}

}  // namespace rl
