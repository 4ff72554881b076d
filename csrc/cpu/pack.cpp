// Packing: from rows of floats, or of codes, to tiles.
#include <algorithm>
#include <new>
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace rl {
namespace {

constexpr int kScaleCandidates = 9;  // on either side of the scale that just fits the extreme

float element(const void* source, int format, int64_t index) {
  if (format == RL_F32) return static_cast<const float*>(source)[index];
  uint16_t bits = static_cast<const uint16_t*>(source)[index];
  return format == RL_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// Writes a block's codes of W rows: codes[quad] has those of four columns in its lanes' bytes.
void put_codes(int format, uint8_t* block, int row, const vi codes[kQuads]) {
  auto put = [&](int line, vi bytes) { std::memcpy(block + line * 64 + row * 4, &bytes, sizeof bytes); };
  if (format == RL_Q8) {
    for (int quad = 0; quad < kQuads; ++quad) put(quad, codes[quad]);
    return;
  }
  if (format == RL_Q2) {
    for (int line = 0; line < 2; ++line) {
      vi pairs{};
      for (int t = 0; t < 4; ++t) pairs |= codes[4 * line + t] << 2 * t;
      put(line, pairs);
    }
    return;
  }
  if (format == RL_Q3) {
    vi above = codes[3] | codes[7] << 3;
    for (int t = 0; t < 3; ++t)
      put(t, codes[t] | codes[t + 4] << 3 | (above >> 2 * t & 0x03030303) << 6);
    return;
  }
  for (int t = 0; t < 4; ++t) put(t, (codes[t] & 0x0f0f0f0f) | (codes[t + 4] & 0x0f0f0f0f) << 4);
  if (format == RL_Q5) {
    vi high{};
    for (int quad = 0; quad < kQuads; ++quad) high |= (codes[quad] >> 4 & 0x01010101) << quad;
    put(4, high);
  }
  if (format == RL_Q6) {
    vi high[2] = {};
    for (int quad = 0; quad < kQuads; ++quad)
      high[quad / 4] |= (codes[quad] >> 4 & 0x03030303) << 2 * (quad % 4);
    put(4, high[0]);
    put(5, high[1]);
  }
}

vf rounded(vf x) { return to_float(round_to_int(x)); }

// The scale of `count` values of W rows, x[k * 16 + row], for codes in [-middle, middle - 1].
// Of some scales near the one that maps the extreme value to -middle (as GGUF's Q4_0 has it) or to
// middle - 1, the codes are found, and then the scale with the least squared error for them.
vf best_scale(const float* x, int count, int middle) {
  vf extreme{}, largest{}, probe{};
  for (int k = 0; k < count; ++k) {
    vf value = load(x + k * kTileRows), size = abs(value);
    probe += value - value;  // 0, or not a number, and then so is the scale
    extreme = select((vi)(size > largest), value, extreme);
    largest = max(size, largest);
  }
  vi nothing = (vi)(largest == 0.0f);
  vf safe = select(nothing, splat(1.0f), extreme);
  vf best = select(nothing, splat(0.0f), safe * (-1.0f / static_cast<float>(middle)));
  if (middle > 32) return select(nothing, probe, largest * (1.0f / (middle - 1)) + probe);
  vf best_gain = splat(-1.0f);
  const float low = -static_cast<float>(middle), high = static_cast<float>(middle - 1);
  for (int c = -kScaleCandidates; c <= kScaleCandidates; ++c) {
    vf inverse = -(static_cast<float>(middle) + 0.1f * static_cast<float>(c)) / safe;
    vf products{}, squares{};
    for (int k = 0; k < count; ++k) {
      vf value = load(x + k * kTileRows);
      vf code = max(min(rounded(value * inverse), splat(high)), splat(low));
      products = fma(value, code, products);
      squares = fma(code, code, squares);
    }
    vf divisor = select((vi)(squares > 0.0f), squares, splat(1.0f));
    vf gain = products * products / divisor;
    vi better = (vi)(gain > best_gain) & (vi)(squares > 0.0f) & ~nothing;
    best = select(better, products / divisor, best);
    best_gain = select(better, gain, best_gain);
  }
  return best + probe;
}

// A scale for all of `count` values of W rows and a factor for each 32 of them, which make the least
// squared error of some: the largest of the blocks' best scales takes a factor near the largest.
void best_factors(const float* x, int count, int middle, float multiplier, vf* scale, vi* factors) {
  constexpr int kCandidates = 7;
  constexpr int kMostBlocks = 4;
  const int num_blocks = static_cast<int>(ceil_div(count, kBlockColumns));
  vf best[kMostBlocks], largest{};
  for (int b = 0; b < num_blocks; ++b) {
    int start = b * kBlockColumns;
    best[b] = best_scale(x + start * kTileRows, std::min(count - start, kBlockColumns), middle);
    largest = select((vi)(abs(best[b]) > abs(largest)) | (vi)(best[b] != best[b]), best[b], largest);
  }
  // A power of two that brings values to about 1, so that no square of theirs overflows.
  const vf unit = float_of((254 << 23) - (bits_of(largest) & 0x7f800000));
  const vf low = splat(-static_cast<float>(middle)), high = splat(static_cast<float>(middle - 1));
  vf least_error = splat(INFINITY);
  *scale = largest;
  for (int c = 0; c < kCandidates; ++c) {
    vf candidate = largest / (kLargestFactor - 0.5f * static_cast<float>(c));
    for (int lane = 0; lane < W; ++lane)
      candidate[lane] = half_to_float(float_to_half(candidate[lane] / multiplier)) * multiplier;
    vf safe = select((vi)(candidate == 0.0f), splat(1.0f), candidate), error{};
    vi tried[kMostBlocks];
    for (int b = 0; b < num_blocks; ++b) {
      vf ratio = best[b] / safe;
      vf nearest = max(min(rounded(ratio), splat(kLargestFactor)), splat(kLeastFactor));
      vf least = select((vi)(ratio < 0.0f), splat(-1.0f), splat(1.0f));
      nearest = select((vi)(nearest == 0.0f) & (vi)(best[b] != 0.0f), least, nearest);
      tried[b] = round_to_int(nearest);
      vf step = safe * nearest;
      vf inverse = select((vi)(step == 0.0f), splat(0.0f), 1.0f / step);
      for (int k = b * kBlockColumns; k < count && k < (b + 1) * kBlockColumns; ++k) {
        vf value = load(x + k * kTileRows);
        vf left = value - step * max(min(rounded(value * inverse), high), low);
        left *= unit;
        error = fma(left, left, error);
      }
    }
    vi better = (vi)(error < least_error);
    least_error = select(better, error, least_error);
    *scale = select(better, candidate, *scale);
    for (int b = 0; b < num_blocks; ++b) factors[b] = better ? tried[b] : factors[b];
  }
}

uint16_t* scales_of(const rl_matrix& m, uint8_t* tile, int64_t group) {
  return reinterpret_cast<uint16_t*>(tile + group_offset(m, group));
}

// The factors of a block.
int8_t* factors_of(const rl_matrix& m, uint8_t* tile, int64_t block) {
  const int64_t each = m.group / kBlockColumns;
  return reinterpret_cast<int8_t*>(tile + group_offset(m, block / each) + factors_offset(m)) +
         block % each * kTileRows;
}

// Scales and factors of a tile of floats, and the inverses of their products, [blocks][16].
void choose_factors(const rl_matrix& m, const float* x, float* inverses, uint8_t* tile) {
  for (int64_t g = 0; g < num_groups(m); ++g) {
    int64_t first = g * m.group;
    int count = static_cast<int>(std::min<int64_t>(m.columns - first, m.group));
    for (int row = 0; row < kTileRows; row += W) {
      vf scale;
      vi factors[4] = {};
      best_factors(x + first * kTileRows + row, count, middle_code(m.format), m.multiplier, &scale,
                   factors);
      for (int lane = 0; lane < W; ++lane) {
        scales_of(m, tile, g)[row + lane] = float_to_half(scale[lane] / m.multiplier);
        for (int b = 0; b < 4 && b * kBlockColumns < count; ++b) {
          int64_t block = first / kBlockColumns + b, at = block * kTileRows + row + lane;
          factors_of(m, tile, block)[row + lane] = static_cast<int8_t>(factors[b][lane]);
          float step = scale[lane] * static_cast<float>(factors[b][lane]);
          inverses[at] = step != 0 ? 1 / step : 0;
        }
      }
    }
  }
}

// Scales of a tile of floats, and their inverses, [groups][16].
void choose_scales(const rl_matrix& m, const float* x, float* inverses, uint8_t* tile) {
  int middle = middle_code(m.format);
  for (int64_t g = 0; g < num_groups(m); ++g) {
    int64_t first = g * m.group;
    int count = static_cast<int>(m.columns - first < m.group ? m.columns - first : m.group);
    for (int row = 0; row < kTileRows; row += W) {
      float group_scales[W];
      store(group_scales, best_scale(x + first * kTileRows + row, count, middle));
      for (int lane = 0; lane < W; ++lane) {
        uint16_t half = float_to_half(group_scales[lane] / m.multiplier);
        scales_of(m, tile, g)[row + lane] = half;
        float scale = half_to_float(half) * m.multiplier;
        inverses[g * kTileRows + row + lane] = scale != 0 ? 1 / scale : 0;
      }
    }
  }
}

// One tile of floats x[columns][16] to codes. `inverses` is room for as many rows of 16 floats as the
// tile has groups, or blocks with factors.
void quantize_tile(const rl_matrix& m, const float* x, float* inverses, uint8_t* tile) {
  const int middle = middle_code(m.format), lowest = m.format == RL_Q8 ? 1 : 0;
  const int span = m.has_factors ? kBlockColumns : m.group;
  (m.has_factors ? choose_factors : choose_scales)(m, x, inverses, tile);
  for (int64_t b = 0; b < num_blocks(m); ++b) {
    for (int row = 0; row < kTileRows; row += W) {
      vi codes[kQuads] = {};
      for (int k = 0; k < kBlockColumns; ++k) {
        int64_t column = b * kBlockColumns + k;
        vi code = splat_i(middle);
        if (column < m.columns) {
          vf inverse = load(inverses + column / span * kTileRows + row);
          code += round_to_int(load(x + column * kTileRows + row) * inverse);
          code = code < lowest ? splat_i(lowest) : code;
          code = code > 2 * middle - 1 ? splat_i(2 * middle - 1) : code;
        }
        codes[k / 4] |= code << 8 * (k % 4);
      }
      put_codes(m.format, tile + block_offset(m, b), row, codes);
    }
  }
}

// x[columns][16] of up to 16 rows; `read(i)` is element i of the first row, and the others follow.
template <class Read>
void transpose_rows(const Read& read, int64_t columns, int num_rows, float* x) {
  for (int64_t first = 0; first < columns; first += kBlockColumns) {  // a few lines of each row
    int64_t stop = first + kBlockColumns < columns ? first + kBlockColumns : columns;
    for (int row = 0; row < num_rows; ++row)
      for (int64_t k = first; k < stop; ++k) x[k * kTileRows + row] = read(row * columns + k);
  }
}

void gather_rows(const void* source, int format, int64_t start, int64_t columns, int num_rows,
                 float* x) {
  const auto* words = static_cast<const uint16_t*>(source) + start;
  if (format == RL_F32) {
    const auto* floats = static_cast<const float*>(source) + start;
    transpose_rows([=](int64_t i) { return floats[i]; }, columns, num_rows, x);
  } else if (format == RL_F16) {
    transpose_rows([=](int64_t i) { return half_to_float(words[i]); }, columns, num_rows, x);
  } else {
    transpose_rows([=](int64_t i) { return bfloat_to_float(words[i]); }, columns, num_rows, x);
  }
}

void copy_tile(const rl_matrix& m, const float* x, uint8_t* tile) {
  for (int64_t k = 0; k < m.columns; ++k) {
    for (int row = 0; row < kTileRows; ++row) {
      float value = x[k * kTileRows + row];
      int64_t at = float_index(m, k, row);
      if (m.format == RL_F32)
        reinterpret_cast<float*>(tile)[at] = value;
      else
        reinterpret_cast<uint16_t*>(tile)[at] =
            m.format == RL_F16 ? float_to_half(value) : float_to_bfloat(value);
    }
  }
}

// The codes of one row of a block.
void read_codes(int format, const uint8_t* block, int row, uint8_t (&codes)[kBlockColumns]) {
  const uint8_t* p = block + 4 * row;
  if (format == RL_Q8) {
    for (int quad = 0; quad < kQuads; ++quad) std::memcpy(codes + 4 * quad, p + 64 * quad, 4);
    return;
  }
  if (format == RL_Q2) {
    for (int k = 0; k < kBlockColumns; ++k)
      codes[k] = p[k / 16 * 64 + k % 4] >> k % 16 / 4 * 2 & 3;
    return;
  }
  if (format == RL_Q3) {
    for (int k = 0; k < kBlockColumns; ++k) {
      int t = k / 4 % 4, i = k % 4, shift = k / 16 * 3;
      int above = p[i] >> 6 | p[64 + i] >> 6 << 2 | p[128 + i] >> 6 << 4;
      codes[k] = (t < 3 ? p[64 * t + i] : above) >> shift & 7;
    }
    return;
  }
  for (int k = 0; k < kBlockColumns / 2; ++k) {
    int t = k / 4, i = k % 4;
    codes[k] = p[64 * t + i] & 15;
    codes[k + 16] = p[64 * t + i] >> 4;
    if (format == RL_Q5) {
      codes[k] |= (p[64 * 4 + i] >> t & 1) << 4;
      codes[k + 16] |= (p[64 * 4 + i] >> (t + 4) & 1) << 4;
    } else if (format == RL_Q6) {
      codes[k] |= (p[64 * 4 + i] >> 2 * t & 3) << 4;
      codes[k + 16] |= (p[64 * 5 + i] >> 2 * t & 3) << 4;
    }
  }
}

void unpack_row(const rl_matrix& m, const uint8_t* tile, int row, float* out) {
  if (!is_quantized(m.format)) {
    for (int64_t k = 0; k < m.columns; ++k) out[k] = element(tile, m.format, float_index(m, k, row));
    return;
  }
  const float middle = -static_cast<float>(middle_code(m.format));
  const int span = m.group < kBlockColumns ? m.group : kBlockColumns;  // columns of one scale
  for (int64_t first = 0; first < m.columns; first += kBlockColumns) {
    uint8_t codes[kBlockColumns];
    read_codes(m.format, tile + block_offset(m, first / kBlockColumns), row, codes);
    for (int start = 0; start < kBlockColumns; start += span) {
      int64_t column = first + start;
      if (column >= m.columns) break;
      const uint8_t* group = tile + group_offset(m, column / m.group);
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(group);
      float scale = half_to_float(scales[row]) * m.multiplier;
      if (m.has_factors)
        scale *= reinterpret_cast<const int8_t*>(group + factors_offset(m))
            [column % m.group / kBlockColumns * kTileRows + row];
      float min = m.has_min ? half_to_float(scales[kTileRows + row]) * m.multiplier : scale * middle;
      int count = static_cast<int>(m.columns - column < span ? m.columns - column : span);
      for (int k = 0; k < count; ++k) out[column + k] = scale * codes[start + k] + min;
    }
  }
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" {

int64_t rl_matrix_bytes(const rl_matrix* m) { return num_tiles(*m) * tile_bytes(*m); }

int32_t rl_pack(rl_pool* pool, const rl_matrix* m, const void* source, int32_t source_format,
                int32_t first_row, int32_t num_rows) try {
  reinterpret_cast<Pool*>(pool)->run(ceil_div(num_rows, kTileRows), [&](int64_t i, int) {
    int64_t left = num_rows - i * kTileRows, groups = m->group ? num_groups(*m) : 0;
    if (m->has_factors) groups = num_blocks(*m);
    std::vector<float> x(static_cast<size_t>(m->columns + groups) * kTileRows);
    gather_rows(source, source_format, i * kTileRows * m->columns, m->columns,
                static_cast<int>(left < kTileRows ? left : kTileRows), x.data());
    auto* tile = const_cast<uint8_t*>(tile_at(*m, first_row / kTileRows + i));
    std::memset(tile, 0, static_cast<size_t>(tile_bytes(*m)));
    if (is_quantized(m->format))
      quantize_tile(*m, x.data(), x.data() + static_cast<size_t>(m->columns) * kTileRows, tile);
    else
      copy_tile(*m, x.data(), tile);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

void rl_pack_codes(rl_pool* pool, const rl_matrix* m, const uint8_t* codes, const float* scales,
                   const float* mins, const int8_t* factors) {
  int64_t groups = num_groups(*m), blocks = ceil_div(m->columns, kBlockColumns);
  int middle = m->has_min ? 0 : middle_code(m->format);
  reinterpret_cast<Pool*>(pool)->run(num_tiles(*m), [&](int64_t i, int) {
    auto* tile = const_cast<uint8_t*>(tile_at(*m, i));
    std::memset(tile, 0, static_cast<size_t>(tile_bytes(*m)));
    for (int row = 0; row < kTileRows; ++row) {
      int64_t r = i * kTileRows + row;
      for (int64_t g = 0; g < groups && r < m->rows; ++g) {
        uint16_t* out = scales_of(*m, tile, g) + row;
        *out = float_to_half(scales[r * groups + g] / m->multiplier);
        if (m->has_min) out[kTileRows] = float_to_half(mins[r * groups + g] / m->multiplier);
      }
      for (int64_t b = 0; m->has_factors && b < blocks && r < m->rows; ++b)
        factors_of(*m, tile, b)[row] = factors[r * blocks + b];
    }
    for (int64_t b = 0; b < num_blocks(*m); ++b) {
      alignas(64) int32_t codes_of[kQuads][kTileRows];
      for (int row = 0; row < kTileRows; ++row) {
        int64_t r = i * kTileRows + row, first = b * kBlockColumns, left = m->columns - first;
        int32_t quads[kQuads];
        std::memset(quads, middle, sizeof quads);
        if (r < m->rows && left > 0)
          std::memcpy(quads, codes + r * m->columns + first,
                      static_cast<size_t>(left < kBlockColumns ? left : kBlockColumns));
        for (int quad = 0; quad < kQuads; ++quad) codes_of[quad][row] = quads[quad];
      }
      for (int row = 0; row < kTileRows; row += W) {
        vi quads[kQuads];
        for (int quad = 0; quad < kQuads; ++quad)
          std::memcpy(&quads[quad], &codes_of[quad][row], sizeof(vi));
        put_codes(m->format, tile + block_offset(*m, b), row, quads);
      }
    }
  });
}

void rl_unpack_rows(rl_pool* pool, const rl_matrix* m, const int32_t* rows, int32_t num_rows,
                    float* destination) {
  reinterpret_cast<Pool*>(pool)->run(num_rows, [&](int64_t i, int) {
    unpack_row(*m, tile_at(*m, rows[i] / kTileRows), rows[i] % kTileRows,
               destination + i * m->columns);
  });
}

}  // extern "C"
