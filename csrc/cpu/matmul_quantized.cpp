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

// Adds the products of a block, or of one half of it (quads 0 to 3, or 4 to 7), for R vectors of
// rows from row `row` on.
template <int F, int M, int R>
inline void add_block(const uint8_t* block, bool first_half, bool second_half, int row,
                      const int8_t* x, vi (&totals)[R][M]) {
  Sums<F> sums[R][M] = {};
  RL_UNROLL
  for (int t = 0; t < 4; ++t) {
    Codes<F> first[R], second[R];
    RL_UNROLL
    for (int r = 0; r < R; ++r) read_quads<F>(block, row + r * W, t, first[r], second[r]);
    if (first_half) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) {
        Quad quad = quad_at(x + (t * M + m) * 4);
        RL_UNROLL
        for (int r = 0; r < R; ++r) sums[r][m].add(first[r], quad);
      }
    }
    if (second_half) {
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
    for (int m = 0; m < M; ++m) totals[r][m] += sums[r][m].total();
}

// How far ahead of its use a line is fetched.
constexpr int kPrefetchBytes = 2048;

template <int F, int M>
void multiply_tile(const rl_matrix& matrix, const uint8_t* tile, const Panels& panels,
                   int64_t panel, float* out) {
  constexpr int R = row_vectors<F, M>();
  const int step = step_columns(matrix), blocks_per_step = step / kBlockColumns;
  const int num_steps = static_cast<int>(ceil_div(matrix.columns, step));
  const int64_t groups = num_groups(matrix);
  const int steps_per_group = groups > 1 ? matrix.group / step : num_steps;
  const auto* scales = reinterpret_cast<const uint16_t*>(tile);
  const uint16_t* mins = matrix.has_min ? scales + groups * kTileRows : nullptr;
  const uint8_t* blocks = tile + scale_bytes(matrix);
  const int block_size = block_lines(F) * 64;
  const float middle = -static_cast<float>(1 << (code_bits(F) - 1));
  const int8_t* x = panels.panel_bytes(panel);
  const float* x_scales = panels.panel_scales(panel);
  const float* x_sums = panels.panel_sums(panel);

  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    vf scale[R] = {}, min[R] = {};
    const uint8_t* block = blocks;
    const int8_t* quads = x;
    for (int s = 0; s < num_steps; ++s) {
      vi totals[R][M] = {};
      if (step < kBlockColumns) {
        add_block<F, M, R>(block, !(s & 1), s & 1, row, quads, totals);
        block += s & 1 ? block_size : 0;
        quads += s & 1 ? kBlockColumns * M : 0;
      } else {
        for (int b = 0; b < blocks_per_step; ++b) {
          for (int line = 0; line < block_size; line += 64)
            __builtin_prefetch(block + kPrefetchBytes + line);
          add_block<F, M, R>(block, true, true, row, quads, totals);
          block += block_size;
          quads += kBlockColumns * M;
        }
      }
      if (s % steps_per_group == 0) {
        int64_t at = s / steps_per_group * kTileRows + row;
        RL_UNROLL
        for (int r = 0; r < R; ++r) {
          scale[r] = load_half(scales + at + r * W);
          min[r] = mins ? load_half(mins + at + r * W) : scale[r] * middle;
        }
      }
      RL_UNROLL
      for (int r = 0; r < R; ++r) {
        RL_UNROLL
        for (int m = 0; m < M; ++m) {
          vf product = to_float(totals[r][m]) * x_scales[s * M + m];
          result[r][m] = fma(product, scale[r], result[r][m]);
          result[r][m] = fma(splat(x_sums[s * M + m]), min[r], result[r][m]);
        }
      }
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        store(out + m * kTileRows + row + r * W, result[r][m] * matrix.multiplier);
  }
}

template <int F, int M>
void multiply(const rl_matrix& matrix, const uint8_t* tiles, int count, const Panels& panels,
              int64_t panel, float* out) {
  const int64_t bytes = tile_bytes(matrix);
  for (int n = 0; n < count; ++n)
    multiply_tile<F, M>(matrix, tiles + n * bytes, panels, panel, out + n * M * kTileRows);
}

template <int F, size_t... I>
constexpr std::array<TileKernel, kPanelTokens> kernels(std::index_sequence<I...>) {
  return {multiply<F, I + 1>...};
}
template <int F>
constexpr auto kKernels = kernels<F>(std::make_index_sequence<kPanelTokens>());

}  // namespace

TileKernel quantized_kernel(int format, int num_tokens) {
  switch (format) {
    case RL_Q4:
      return kKernels<RL_Q4>[num_tokens - 1];
    case RL_Q5:
      return kKernels<RL_Q5>[num_tokens - 1];
    case RL_Q6:
      return kKernels<RL_Q6>[num_tokens - 1];
    default:
      return kKernels<RL_Q8>[num_tokens - 1];
  }
}

}  // namespace rl
