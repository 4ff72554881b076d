// Codes times bytes. The sum over columns runs in one order whatever the number of tokens:
// integer sums within a step (exact), then float sums over the steps in order.
#include <array>
#include <utility>

#include "dot.h"
#include "matmul_tile.h"

namespace rl {
namespace {

// Vectors of rows whose sums are in registers together. Two share each broadcast of activations,
// where there are registers for that.
template <int F, int M>
constexpr int row_vectors() {
  return W == 8 && (F == RL_Q4 || M <= 2) ? 2 : 1;
}

constexpr int kExpandedBlock = kBlockColumns * kTileRows;

template <int F, bool FromBytes>
constexpr int block_bytes() {
  return FromBytes ? kExpandedBlock : block_lines(F) * 64;
}

// The sums of a block, or of one half of it (quads 0 to 3, or 4 to 7), for R vectors of rows from
// row `row` on.
template <int F, bool FromBytes, int M, int R>
RL_INLINE inline void sum_block(const uint8_t* block, bool first_half, bool second_half, int row,
                      const int8_t* x, const vi (&minus_sums)[M], vi (&totals)[R][M]) {
  Sums<F> sums[R][M];
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int m = 0; m < M; ++m) sums[r][m] = Sums<F>(minus_sums[m]);
  RL_UNROLL
  for (int t = 0; t < 4; ++t) {
    Codes<F> first[R], second[R];
    RL_UNROLL
    for (int r = 0; r < R; ++r) {
      Line a, b;
      read_quads<FromBytes ? RL_Q8 : F>(block, row + r * W, t, a, b);
      first[r] = codes_of<F>(a);
      second[r] = codes_of<F>(b);
    }
    bool in_pairs = kInPairs<F> && first_half && second_half;
    if constexpr (kInPairs<F>)
      if (in_pairs) {
        RL_UNROLL
        for (int m = 0; m < M; ++m) {
          Quad low = quad_at(x + (t * M + m) * 4), high = quad_at(x + ((t + 4) * M + m) * 4);
          RL_UNROLL
          for (int r = 0; r < R; ++r) sums[r][m].add_both(first[r], low, second[r], high);
        }
      }
    if (first_half && !in_pairs) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) {
        Quad quad = quad_at(x + (t * M + m) * 4);
        RL_UNROLL
        for (int r = 0; r < R; ++r) sums[r][m].add(first[r], quad);
      }
    }
    if (second_half && !in_pairs) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) {
        Quad quad = quad_at(x + ((t + 4) * M + m) * 4);
        RL_UNROLL
        for (int r = 0; r < R; ++r) sums[r][m].add(second[r], quad);
      }
    }
  }
  RL_UNROLL
  for (int r = 0; r < R; ++r)
    RL_UNROLL
    for (int m = 0; m < M; ++m) totals[r][m] = sums[r][m].total();
}

// How far ahead of its use a line is fetched.
constexpr int kPrefetchBytes = 2048;

inline void prefetch_block(const uint8_t* block, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(block + kPrefetchBytes + line);
}

template <int F, bool FromBytes, int M>
void multiply_tile(const rl_matrix& matrix, const uint8_t* tile, const uint8_t* blocks,
                   const Panels& panels, int64_t panel, float* out) {
  constexpr int R = row_vectors<F, M>();
  constexpr int kBytes = block_bytes<F, FromBytes>();
  const int step = step_columns(matrix), blocks_per_step = step / kBlockColumns;
  const int num_steps = static_cast<int>(ceil_div(matrix.columns, step));
  const int64_t groups = num_groups(matrix);
  const int steps_per_group = groups > 1 ? matrix.group / step : num_steps;
  const auto* scales = reinterpret_cast<const uint16_t*>(tile);
  const uint16_t* mins = matrix.has_min ? scales + groups * kTileRows : nullptr;
  const float* x_sums = panels.panel_sums(panel);

  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    vf scale[R] = {}, min[R] = {};
    const uint8_t* block = blocks;
    const int8_t* quads = panels.panel_bytes(panel);
    const int32_t* minus_sums = panels.panel_minus_sums(panel);
    const float* x_scales = panels.panel_scales(panel);
    auto sum_next = [&](bool first_half, bool second_half, vi (&totals)[R][M]) RL_INLINE {
      vi start[M];
      RL_UNROLL
      for (int m = 0; m < M; ++m) start[m] = mins ? vi{} : splat_i(minus_sums[m]);
      if (!FromBytes) prefetch_block(block, kBytes);
      sum_block<F, FromBytes, M, R>(block, first_half, second_half, row, quads, start, totals);
      minus_sums += M;
      block += second_half ? kBytes : 0;
      quads += second_half ? kBlockColumns * M : 0;
    };
    int steps_left = 0;
    for (int s = 0; s < num_steps; ++s) {
      vi totals[R][M];
      if (step < kBlockColumns) {
        sum_next(!(s & 1), s & 1, totals);
      } else {
        sum_next(true, true, totals);
        for (int b = 1; b < blocks_per_step; ++b) {
          vi more[R][M];
          sum_next(true, true, more);
          RL_UNROLL
          for (int r = 0; r < R; ++r)
            RL_UNROLL
            for (int m = 0; m < M; ++m) totals[r][m] += more[r][m];
        }
      }
      if (steps_left == 0) {
        int64_t at = s / steps_per_group * kTileRows + row;
        RL_UNROLL
        for (int r = 0; r < R; ++r) {
          scale[r] = load_half(scales + at + r * W);
          if (mins) min[r] = load_half(mins + at + r * W);
        }
        steps_left = steps_per_group;
      }
      --steps_left;
      RL_UNROLL
      for (int r = 0; r < R; ++r)
        RL_UNROLL
        for (int m = 0; m < M; ++m)
          result[r][m] = fma(to_float(totals[r][m]) * x_scales[m], scale[r], result[r][m]);
      if (mins) {
        RL_UNROLL
        for (int r = 0; r < R; ++r)
          RL_UNROLL
          for (int m = 0; m < M; ++m)
            result[r][m] = fma(splat(x_sums[s * M + m]), min[r], result[r][m]);
      }
      x_scales += M;
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        store(out + m * kTileRows + row + r * W, result[r][m] * matrix.multiplier);
  }
}

template <int F, bool FromBytes, int M>
void multiply(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes, int count,
              const Panels& panels, int64_t panel, float* out) {
  for (int n = 0; n < count; ++n) {
    const uint8_t* tile = tiles + n * tile_bytes(matrix);
    const uint8_t* blocks =
        FromBytes ? codes + n * expanded_bytes(matrix) : tile + scale_bytes(matrix);
    multiply_tile<F, FromBytes, M>(matrix, tile, blocks, panels, panel, out + n * M * kTileRows);
  }
}

template <int F>
void expand_blocks(const uint8_t* block, int64_t count, uint8_t* codes) {
  for (int64_t b = 0; b < count; ++b, block += block_lines(F) * 64, codes += kExpandedBlock) {
    prefetch_block(block, block_lines(F) * 64);
    for (int row = 0; row < kTileRows; row += W) {
      RL_UNROLL
      for (int t = 0; t < 4; ++t) {
        Line first, second;
        read_quads<F>(block, row, t, first, second);
        store_line(codes + 64 * t + 4 * row, first);
        store_line(codes + 64 * (t + 4) + 4 * row, second);
      }
    }
  }
}

template <int F, bool FromBytes, size_t... I>
constexpr std::array<TileKernel, kPanelTokens> kernels(std::index_sequence<I...>) {
  return {multiply<F, FromBytes, I + 1>...};
}

template <int F, bool FromBytes = false>
constexpr auto kKernels = kernels<F, FromBytes>(std::make_index_sequence<kPanelTokens>());

}  // namespace

TileKernel quantized_kernel(int format, int num_tokens, bool from_bytes) {
  auto m = static_cast<size_t>(num_tokens - 1);
  switch (format) {
    case RL_Q4:
      return kKernels<RL_Q4>[m];
    case RL_Q5:
      return from_bytes ? kKernels<RL_Q5, true>[m] : kKernels<RL_Q5>[m];
    case RL_Q6:
      return from_bytes ? kKernels<RL_Q6, true>[m] : kKernels<RL_Q6>[m];
    default:
      return kKernels<RL_Q8>[m];
  }
}

int64_t expanded_bytes(const rl_matrix& matrix) {
  bool expands = matrix.format == RL_Q5 || matrix.format == RL_Q6;
  return expands ? num_blocks(matrix) * kExpandedBlock : 0;
}

void expand(const rl_matrix& matrix, const uint8_t* tiles, int count, uint8_t* codes) {
  for (int n = 0; n < count; ++n) {
    const uint8_t* blocks = tiles + n * tile_bytes(matrix) + scale_bytes(matrix);
    uint8_t* out = codes + n * expanded_bytes(matrix);
    if (matrix.format == RL_Q5)
      expand_blocks<RL_Q5>(blocks, num_blocks(matrix), out);
    else
      expand_blocks<RL_Q6>(blocks, num_blocks(matrix), out);
  }
}

}  // namespace rl
