// Packing: from rows of floats, or of codes, to tiles.
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

// Writes the code of (row, column) of a tile whose blocks are zero.
void put_code(const rl_matrix& m, uint8_t* blocks, int64_t column, int row, int code) {
  int in_block = static_cast<int>(column % kBlockColumns);
  int quad = in_block / 4, at = row * 4 + in_block % 4;
  uint8_t* block = blocks + column / kBlockColumns * block_lines(m.format) * 64;
  if (m.format == RL_Q8) {
    block[quad * 64 + at] = static_cast<uint8_t>(code);
    return;
  }
  block[quad % 4 * 64 + at] |= static_cast<uint8_t>((code & 15) << (quad < 4 ? 0 : 4));
  if (m.format == RL_Q5) block[4 * 64 + at] |= static_cast<uint8_t>((code >> 4) << quad);
  if (m.format == RL_Q6)
    block[(4 + quad / 4) * 64 + at] |= static_cast<uint8_t>((code >> 4) << 2 * (quad % 4));
}

int get_code(const rl_matrix& m, const uint8_t* blocks, int64_t column, int row) {
  int in_block = static_cast<int>(column % kBlockColumns);
  int quad = in_block / 4, at = row * 4 + in_block % 4;
  const uint8_t* block = blocks + column / kBlockColumns * block_lines(m.format) * 64;
  if (m.format == RL_Q8) return block[quad * 64 + at];
  int code = block[quad % 4 * 64 + at] >> (quad < 4 ? 0 : 4) & 15;
  if (m.format == RL_Q5) code |= (block[4 * 64 + at] >> quad & 1) << 4;
  if (m.format == RL_Q6) code |= (block[(4 + quad / 4) * 64 + at] >> 2 * (quad % 4) & 3) << 4;
  return code;
}

vf rounded(vf x) { return to_float(round_to_int(x)); }

// The scale of `count` values of W rows, x[k * 16 + row], for codes in [-middle, middle - 1].
// Of some scales near the one that maps the extreme value to -middle (as GGUF's Q4_0 has it) or to
// middle - 1, the codes are found, and then the scale with the least squared error for them.
vf best_scale(const float* x, int count, int middle) {
  vf extreme{}, largest{};
  for (int k = 0; k < count; ++k) {
    vf value = load(x + k * kTileRows), size = abs(value);
    extreme = select((vi)(size > largest), value, extreme);
    largest = max(size, largest);
  }
  vi nothing = (vi)(largest == 0.0f);
  vf safe = select(nothing, splat(1.0f), extreme);
  vf best = select(nothing, splat(0.0f), safe * (-1.0f / static_cast<float>(middle)));
  if (middle > 32) return select(nothing, splat(0.0f), largest * (1.0f / (middle - 1)));
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
  return best;
}

// One tile of floats x[columns][16] to codes.
void quantize_tile(const rl_matrix& m, const float* x, uint8_t* tile) {
  auto* scales = reinterpret_cast<uint16_t*>(tile);
  uint8_t* blocks = tile + scale_bytes(m);
  int middle = 1 << (code_bits(m.format) - 1), lowest = m.format == RL_Q8 ? 1 : 0;
  for (int64_t g = 0; g < num_groups(m); ++g) {
    int64_t first = g * m.group;
    int count = static_cast<int>(m.columns - first < m.group ? m.columns - first : m.group);
    for (int row = 0; row < kTileRows; row += W) {
      float group_scales[W];
      store(group_scales, best_scale(x + first * kTileRows + row, count, middle));
      for (int lane = 0; lane < W; ++lane) {
        uint16_t half = float_to_half(group_scales[lane] / m.multiplier);
        scales[g * kTileRows + row + lane] = half;
        float scale = half_to_float(half) * m.multiplier;
        float inverse = scale != 0 ? 1 / scale : 0;
        for (int k = 0; k < count; ++k) {
          float value = x[(first + k) * kTileRows + row + lane] * inverse;
          int code = static_cast<int>(nearbyintf(value)) + middle;
          code = code < lowest ? lowest : code > 2 * middle - 1 ? 2 * middle - 1 : code;
          put_code(m, blocks, first + k, row + lane, code);
        }
      }
    }
  }
  int64_t padded = num_blocks(m) * kBlockColumns;
  for (int64_t column = m.columns; column < padded; ++column)
    for (int row = 0; row < kTileRows; ++row) put_code(m, blocks, column, row, middle);
}

void copy_tile(const rl_matrix& m, const float* x, uint8_t* tile) {
  for (int64_t i = 0; i < static_cast<int64_t>(m.columns) * kTileRows; ++i) {
    if (m.format == RL_F32)
      reinterpret_cast<float*>(tile)[i] = x[i];
    else
      reinterpret_cast<uint16_t*>(tile)[i] =
          m.format == RL_F16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
  }
}

float value_at(const rl_matrix& m, const uint8_t* tile, int64_t column, int row) {
  int64_t index = column * kTileRows + row;
  if (!is_quantized(m.format)) return element(tile, m.format, index);
  const auto* scales = reinterpret_cast<const uint16_t*>(tile);
  int64_t at = column / m.group * kTileRows + row;
  float scale = half_to_float(scales[at]);
  float code = static_cast<float>(get_code(m, tile + scale_bytes(m), column, row));
  float value = m.has_min
                    ? scale * code + half_to_float(scales[num_groups(m) * kTileRows + at])
                    : scale * (code - static_cast<float>(1 << (code_bits(m.format) - 1)));
  return value * m.multiplier;
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" {

int64_t rl_matrix_bytes(const rl_matrix* m) { return num_tiles(*m) * tile_bytes(*m); }

void rl_pack(rl_pool* pool, const rl_matrix* m, const void* source, int32_t source_format,
             int32_t first_row, int32_t num_rows) {
  reinterpret_cast<Pool*>(pool)->run(ceil_div(num_rows, kTileRows), [&](int64_t i, int) {
    std::vector<float> x(static_cast<size_t>(m->columns) * kTileRows);
    for (int row = 0; row < kTileRows && i * kTileRows + row < num_rows; ++row) {
      int64_t start = (i * kTileRows + row) * m->columns;
      for (int64_t k = 0; k < m->columns; ++k)
        x[k * kTileRows + row] = element(source, source_format, start + k);
    }
    auto* tile = const_cast<uint8_t*>(tile_at(*m, first_row / kTileRows + i));
    std::memset(tile, 0, static_cast<size_t>(tile_bytes(*m)));
    is_quantized(m->format) ? quantize_tile(*m, x.data(), tile) : copy_tile(*m, x.data(), tile);
  });
}

void rl_pack_codes(rl_pool* pool, const rl_matrix* m, const uint8_t* codes, const float* scales,
                   const float* mins) {
  int64_t groups = num_groups(*m), padded = num_blocks(*m) * kBlockColumns;
  int middle = m->has_min ? 0 : 1 << (code_bits(m->format) - 1);
  reinterpret_cast<Pool*>(pool)->run(num_tiles(*m), [&](int64_t i, int) {
    auto* tile = const_cast<uint8_t*>(tile_at(*m, i));
    std::memset(tile, 0, static_cast<size_t>(tile_bytes(*m)));
    auto* out = reinterpret_cast<uint16_t*>(tile);
    for (int row = 0; row < kTileRows; ++row) {
      int64_t r = i * kTileRows + row;
      for (int64_t g = 0; g < groups && r < m->rows; ++g) {
        out[g * kTileRows + row] = float_to_half(scales[r * groups + g] / m->multiplier);
        if (m->has_min)
          out[(groups + g) * kTileRows + row] = float_to_half(mins[r * groups + g] / m->multiplier);
      }
      for (int64_t k = 0; k < padded; ++k) {
        int code = r < m->rows && k < m->columns ? codes[r * m->columns + k] : middle;
        put_code(*m, tile + scale_bytes(*m), k, row, code);
      }
    }
  });
}

void rl_unpack_rows(rl_pool* pool, const rl_matrix* m, const int32_t* rows, int32_t num_rows,
                    float* destination) {
  reinterpret_cast<Pool*>(pool)->run(num_rows, [&](int64_t i, int) {
    const uint8_t* tile = tile_at(*m, rows[i] / kTileRows);
    for (int64_t k = 0; k < m->columns; ++k)
      destination[i * m->columns + k] = value_at(*m, tile, k, rows[i] % kTileRows);
  });
}

}  // extern "C"
