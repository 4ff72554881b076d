// Float matrices times float activations, summed over columns in order.
#include <array>
#include <utility>

#include "matmul_tile.h"
#include "simd.h"

namespace rl {
namespace {

// Columns that are taken together, and their weights in W rows from row `row` on.
template <int F>
constexpr int kTaken = F == RL_BF16 ? 2 : 1;

template <int F>
inline void weights(const uint8_t* tile, int64_t column, int row, vf (&out)[kTaken<F>]) {
  int64_t index = column * kTileRows + row;
  if constexpr (F == RL_F32) {
    out[0] = load(reinterpret_cast<const float*>(tile) + index);
  } else if constexpr (F == RL_F16) {
    out[0] = load_half(reinterpret_cast<const uint16_t*>(tile) + index);
  } else {
    vi pairs = bits_of(load(reinterpret_cast<const float*>(tile) + column / 2 * kTileRows + row));
    out[0] = float_of(pairs << 16);
    out[1] = float_of(pairs & static_cast<int32_t>(0xffff0000));
  }
}

template <int F, int M>
void multiply(const rl_matrix&, const uint8_t* tile, const Panels& panels, int64_t panel,
              float* out) {
  // As many rows at once as registers hold: independent sums hide the latency of an addition.
  constexpr int kVectors = kTileRows / W;
  constexpr int R = M * kVectors <= 12 ? kVectors : 1;
  const float* x = panels.panel_floats(panel);
  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    for (int64_t k = 0; k < panels.padded_columns; k += kTaken<F>) {
      RL_UNROLL
      for (int r = 0; r < R; ++r) {
        vf w[kTaken<F>];
        weights<F>(tile, k, row + r * W, w);
        RL_UNROLL
        for (int i = 0; i < kTaken<F>; ++i)
          RL_UNROLL
          for (int m = 0; m < M; ++m)
            result[r][m] = fma(w[i], splat(x[(k + i) * M + m]), result[r][m]);
      }
      if (k % 2 == 0) __builtin_prefetch(tile + k * kTileRows * (F == RL_F32 ? 4 : 2) + 2048);
    }
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) store(out + m * kTileRows + row + r * W, result[r][m]);
  }
}

#if defined(__AVX512BF16__)

// Pairs of bfloats times pairs of bfloats: activations are rounded as well.
template <int M>
void multiply_pairs(const rl_matrix&, const uint8_t* tile, const Panels& panels,
                    int64_t panel, float* out) {
  const int32_t* x = reinterpret_cast<const int32_t*>(panels.panel_floats(panel));
  __m512 result[M] = {};
  for (int64_t k = 0; k < panels.padded_columns; ++k) {
    __m512i w = _mm512_loadu_si512(tile + k * 64);
    __builtin_prefetch(tile + k * 64 + 2048);
    RL_UNROLL
    for (int m = 0; m < M; ++m)
      asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(result[m]) : "v"(w), "m"(x[k * M + m]));
  }
  for (int m = 0; m < M; ++m) store(out + m * kTileRows, (vf)result[m]);
}

#endif

template <int F, size_t... I>
constexpr std::array<TileKernel, kPanelTokens> kernels(std::index_sequence<I...>) {
#if defined(__AVX512BF16__)
  if constexpr (F == RL_BF16) return {multiply_pairs<I + 1>...};
#endif
  return {multiply<F, I + 1>...};
}
template <int F>
constexpr auto kKernels = kernels<F>(std::make_index_sequence<kPanelTokens>());

}  // namespace

TileKernel float_kernel(int format, int num_tokens) {
  switch (format) {
    case RL_F32:
      return kKernels<RL_F32>[num_tokens - 1];
    case RL_F16:
      return kKernels<RL_F16>[num_tokens - 1];
    default:
      return kKernels<RL_BF16>[num_tokens - 1];
  }
}

}  // namespace rl
