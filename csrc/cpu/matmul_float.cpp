// Float matrices times float activations, summed over columns in order.
#include "matmul_tile.h"

#include "simd.h"

namespace rl {
namespace {

template <int F>
inline vf weights(const uint8_t* tile, int64_t index) {
  if constexpr (F == RL_F32) return load(reinterpret_cast<const float*>(tile) + index);
  if constexpr (F == RL_F16) return load_half(reinterpret_cast<const uint16_t*>(tile) + index);
  if constexpr (F == RL_BF16) return load_bfloat(reinterpret_cast<const uint16_t*>(tile) + index);
}

template <int F, int M>
void multiply(const rl_matrix& matrix, const uint8_t* tile, const Panels& panels, int64_t panel,
              float* out) {
  // As many rows at once as registers hold: independent sums hide the latency of an addition.
  constexpr int kVectors = kTileRows / W;
  constexpr int R = M * kVectors <= 12 ? kVectors : 1;
  const float* x = panels.panel_floats(panel);
  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    for (int64_t k = 0; k < matrix.columns; ++k) {
      RL_UNROLL
      for (int r = 0; r < R; ++r) {
        vf w = weights<F>(tile, k * kTileRows + row + r * W);
        RL_UNROLL
        for (int m = 0; m < M; ++m) result[r][m] = fma(w, splat(x[k * M + m]), result[r][m]);
      }
      if (k % 2 == 0) __builtin_prefetch(tile + k * kTileRows * (F == RL_F32 ? 4 : 2) + 2048);
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int m = 0; m < M; ++m) store(out + m * kTileRows + row + r * W, result[r][m]);
  }
}

template <int F>
constexpr TileKernel kKernels[kPanelTokens] = {multiply<F, 1>, multiply<F, 2>, multiply<F, 3>,
                                               multiply<F, 4>, multiply<F, 5>, multiply<F, 6>,
                                               multiply<F, 7>, multiply<F, 8>};

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
