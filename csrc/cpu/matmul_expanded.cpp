// Codes that are expanded to bytes once, for many panels: joined, or multiplied with their factors; and the
// products of the latter.
#include <array>
#include <utility>

#include "matmul_blocks.h"

namespace rl {
namespace {

constexpr int kFactorBlocks = kFactorGroup / kBlockColumns;

// For vectors a group is its blocks and the scales of its rows as floats.
constexpr int kProductsGroup = kFactorBlocks * kExpandedBlock + kTileRows * 4;
constexpr int kProductsOffset = 128;  // of bytes that are signed

// Fetches the block that is some kilobytes behind this one.
template <int F>
RL_INLINE inline void fetch_block(const uint8_t* block) {
  constexpr int kAhead = 2048;
  for (int i = 0; i < block_lines(F) * 64; i += 64) fetch_ahead(block + kAhead + i);
}

// Bytes are codes minus `middle`.
template <int F>
void expand_blocks(const uint8_t* block, int64_t count, int middle, uint8_t* codes) {
  for (int64_t b = 0; b < count; ++b, block += block_lines(F) * 64, codes += kExpandedBlock) {
    fetch_block<F>(block);
    for (int row = 0; row < kTileRows; row += W) {
      RL_UNROLL
      for (int t = 0; t < 4; ++t) {
        Line first, second;
        read_quads<F>(block, row, t, first, second);
        store_line(codes + 64 * t + 4 * row, less(first, middle));
        store_line(codes + 64 * (t + 4) + 4 * row, less(second, middle));
      }
    }
  }
}

// A group: bytes are codes minus their middle, times the factor, plus `offset`.
template <int F>
void expand_products(const uint8_t* block, const int8_t* factors, int offset, uint8_t* codes) {
  for (int b = 0; b < kFactorBlocks; ++b, block += block_lines(F) * 64, codes += kExpandedBlock) {
    fetch_block<F>(block);
    for (int row = 0; row < kTileRows; row += W) {
      const FactorLine<F> factor(factors + b * kTileRows + row, offset);
      RL_UNROLL
      for (int t = 0; t < 4; ++t) {
        Line first, second;
        read_quads<F>(block, row, t, first, second);
        store_line(codes + 64 * t + 4 * row, factor.times(first));
        store_line(codes + 64 * (t + 4) + 4 * row, factor.times(second));
      }
    }
  }
}

auto* expander(int format) {
  switch (format) {
    case RL_Q2:
      return expand_blocks<RL_Q2>;
    case RL_Q3:
      return expand_blocks<RL_Q3>;
    case RL_Q4:
      return expand_blocks<RL_Q4>;
    case RL_Q5:
      return expand_blocks<RL_Q5>;
    case RL_Q6:
      return expand_blocks<RL_Q6>;
    default:
      return expand_blocks<RL_Q8>;
  }
}

auto* expander_of_products(int format) {
  switch (format) {
    case RL_Q2:
      return expand_products<RL_Q2>;
    case RL_Q3:
      return expand_products<RL_Q3>;
    default:
      return expand_products<RL_Q4>;
  }
}

// The products of expanded tiles, R vectors of their rows, with a panel of M tokens.
template <int M, int R>
void multiply_products(const uint8_t* codes, int64_t next_tile, NextTiles& next, float multiplier,
                       const Panels& panels, int64_t panel, float* out) {
  static constexpr int32_t kZeros[M] = {};
  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    const uint8_t* group = codes;
    const int8_t* quads = panels.panel_bytes(panel);
    const int32_t* minus_sums = panels.panel_minus_sums(panel);
    const float* x_scales = panels.panel_scales(panel);
    for (int step = 0; step < panels.num_steps; ++step) {
      next.fetch();
      Sums<RL_Q8> sums[R][M];
      start_sums_at(takes_signed(RL_Q8) ? kZeros : minus_sums, sums);
      for (int b = 0; b < kFactorBlocks; ++b, quads += kBlockColumns * M)
        add_block<RL_Q8, true, M, R>(group + b * kExpandedBlock, next_tile, true, true, row, quads,
                                     sums);
      vf scale[R];
      RL_UNROLL
      for (int r = 0; r < R; ++r)
        scale[r] = load(reinterpret_cast<const float*>(group + r * W / kTileRows * next_tile +
                                                       kFactorBlocks * kExpandedBlock) +
                        (row + r * W) % kTileRows);
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        RL_UNROLL
        for (int r = 0; r < R; ++r)
          result[r][m] = fma(to_float(sums[r][m].total()) * x_scales[m], scale[r], result[r][m]);
      group += kProductsGroup;
      minus_sums += M;
      x_scales += M;
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        store(out + (r * W / kTileRows * M + m) * kTileRows + (row + r * W) % kTileRows,
              result[r][m] * multiplier);
  }
}

template <int M>
void multiply(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes, int count,
              const Panels& panels, int64_t panel, float* out) {
  if constexpr (kSumsOfSteps) {  // otherwise nothing is expanded with its factors
    constexpr int R = row_vectors<RL_Q8, true, M>(), N = tiles_of(R);
    const int64_t bytes = expanded_bytes(matrix, panels);
    NextTiles next(matrix, tiles, count, panels, panel, ceil_div(count, N) * panels.num_steps);
    for (int n = 0; n < count;) {
      const bool together = n + N <= count;
      (together ? multiply_products<M, R> : multiply_products<M, R / N>)(
          codes + n * bytes, bytes, next, matrix.multiplier, panels, panel,
          out + n * M * kTileRows);
      n += together ? N : 1;
    }
  }
}

template <size_t... I>
constexpr std::array<TileKernel, kPanelTokens> kernels(std::index_sequence<I...>) {
  return {multiply<I + 1>...};
}

constexpr auto kKernels = kernels(std::make_index_sequence<kPanelTokens>());

}  // namespace

TileKernel products_kernel(int num_tokens) {
  return kKernels[static_cast<size_t>(num_tokens - 1)];
}

int64_t expanded_bytes(const rl_matrix& matrix, const Panels& panels) {
  if (!is_expanded(matrix, panels.num_tokens)) return 0;
  if (matrix.has_factors && !panels.block_bytes) return num_groups(matrix) * kProductsGroup;
  return num_blocks(matrix) * kExpandedBlock;
}

void expand(const rl_matrix& matrix, const Panels& panels, const uint8_t* tiles, int count,
            uint8_t* codes) {
  const int middle = panels.block_bytes && !matrix.has_min ? middle_code(matrix.format) : 0;
  const int64_t blocks = num_blocks(matrix);
  const int64_t each = matrix.has_factors ? kFactorBlocks : blocks_per_span(matrix);
  auto* expand_some = expander(matrix.format);
  auto* expand_some_products = expander_of_products(matrix.format);
  for (int n = 0; n < count; ++n) {
    const uint8_t* tile = tiles + n * tile_bytes(matrix);
    for (int64_t b = 0; b < blocks; b += each) {
      const uint8_t* some = tile + block_offset(matrix, b);
      if (!matrix.has_factors) {
        const int64_t num_blocks = std::min(each, blocks - b);
        expand_some(some, num_blocks, middle, codes);
        codes += num_blocks * kExpandedBlock;
        continue;
      }
      const uint8_t* group = tile + group_offset(matrix, b / each);
      auto* factors = reinterpret_cast<const int8_t*>(group + factors_offset(matrix));
      expand_some_products(some, factors, panels.block_bytes ? 0 : kProductsOffset, codes);
      codes += kFactorBlocks * kExpandedBlock;
      if (panels.block_bytes) continue;
      for (int row = 0; row < kTileRows; row += W, codes += 4 * W)
        store(reinterpret_cast<float*>(codes), load_half(reinterpret_cast<const uint16_t*>(group) + row));
    }
  }
}

}  // namespace rl
