// Float matrices times float activations, summed over columns in order.
#include <array>
#include <utility>

#include "matmul_tile.h"
#include "simd.h"

namespace rl {
namespace {

// Columns that are taken together: bfloats lie in pairs.
template <int F>
constexpr int kTaken = F == RL_BF16 ? 2 : 1;

// Column `column` + i, i < kTaken, in W rows from row `row` on.
template <int F>
inline vf weights(const uint8_t* tile, int64_t column, int i, int row) {
  int64_t index = column * kTileRows + row;
  if constexpr (F == RL_F32) return load(reinterpret_cast<const float*>(tile) + index);
  if constexpr (F == RL_F16) return load_half(reinterpret_cast<const uint16_t*>(tile) + index);
  vi pairs = bits_of(load(reinterpret_cast<const float*>(tile) + column / 2 * kTileRows + row));
  return float_of(i == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000));
}

template <int F, int M, int N>
void multiply_tiles(const uint8_t* tiles, int64_t tile_bytes, const Panels& panels, int64_t panel,
                    float* out) {
  constexpr int kVectors = kTileRows / W;
  constexpr int R = M * kVectors <= kMostSums ? kVectors : M * 2 <= kMostSums ? 2 : 1;
  // Broadcasts of a pair of columns would not fit the registers beside the sums of several tokens.
  constexpr int kAtOnce = M == 1 ? kTaken<F> : 1;
#if defined(RL_SUMS_OF_16_BITS)  // what Zen 3 reads fastest
  constexpr int64_t kAhead = M == 1 ? 512 : M == 2 ? 768 : 2048;
#else
  constexpr int64_t kAhead = 2048;
#endif
  const float* x = panels.panel_floats(panel);
  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[N][R][M] = {};
    for (int64_t k = 0; k < panels.padded_columns; k += kTaken<F>) {
      RL_UNROLL
      for (int first = 0; first < kTaken<F>; first += kAtOnce) {
        vf values[kAtOnce][M];
        RL_UNROLL
        for (int i = 0; i < kAtOnce; ++i)
          RL_UNROLL
          for (int m = 0; m < M; ++m) values[i][m] = splat(x[(k + first + i) * M + m]);
        RL_UNROLL
        for (int n = 0; n < N; ++n)
          RL_UNROLL
          for (int r = 0; r < R; ++r)
            RL_UNROLL
            for (int i = 0; i < kAtOnce; ++i) {
              vf w = weights<F>(tiles + n * tile_bytes, k, first + i, row + r * W);
              RL_UNROLL
              for (int m = 0; m < M; ++m) result[n][r][m] = fma(w, values[i][m], result[n][r][m]);
            }
      }
      RL_UNROLL
      for (int n = 0; n < N; ++n)
        fetch_ahead(tiles + n * tile_bytes + k * kTileRows * (F == RL_F32 ? 4 : 2) + kAhead);
    }
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m)
          store(out + (n * M + m) * kTileRows + row + r * W, result[n][r][m]);
  }
}

#if defined(__AVX512BF16__)

// Pairs of bfloats times pairs of bfloats: activations are rounded as well. How far ahead lines are asked
// for, and how many tiles are streamed together, is what Zen 4 reads fastest, for which this level is.
template <int M, int N>
void multiply_pairs(const uint8_t* tiles, int64_t tile_bytes, const Panels& panels, int64_t panel,
                    float* out) {
  constexpr int kAhead = M <= 2 ? 0 : 8192;
  const int32_t* x = reinterpret_cast<const int32_t*>(panels.panel_floats(panel));
  __m512 result[N][M] = {};
  for (int64_t k = 0; k < panels.padded_columns; ++k) {
    __m512i w[N];
    RL_UNROLL
    for (int n = 0; n < N; ++n) {
      const uint8_t* line = tiles + n * tile_bytes + k * 64;
      w[n] = _mm512_loadu_si512(line);
      if (kAhead) fetch_ahead(line + kAhead);
    }
    RL_UNROLL
    for (int m = 0; m < M; ++m) {
      const int32_t* pair = x + k * M + m;
      if constexpr (N == 1) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(result[0][m]) : "v"(w[0]), "m"(*pair));
      } else {
        __m512i in_all_lanes;
        asm("vpbroadcastd %1, %0" : "=v"(in_all_lanes) : "m"(*pair));
        RL_UNROLL
        for (int n = 0; n < N; ++n)
          asm("vdpbf16ps %2, %1, %0" : "+v"(result[n][m]) : "v"(w[n]), "v"(in_all_lanes));
      }
    }
  }
  // Unrolled here as well: an array that a variable indexes anywhere lives in memory everywhere.
  RL_UNROLL
  for (int n = 0; n < N; ++n)
    RL_UNROLL
    for (int m = 0; m < M; ++m) store(out + (n * M + m) * kTileRows, (vf)result[n][m]);
}

#endif

template <int F, int M, int N>
void multiply_together(const uint8_t* tiles, int64_t bytes, const Panels& panels, int64_t panel,
                       float* out) {
#if defined(__AVX512BF16__)
  if constexpr (F == RL_BF16) return multiply_pairs<M, N>(tiles, bytes, panels, panel, out);
#endif
  multiply_tiles<F, M, N>(tiles, bytes, panels, panel, out);
}

template <int F, int M>
void multiply(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t*, int count,
              const Panels& panels, int64_t panel, float* out) {
  constexpr int N = float_tiles_together(M);
  const int64_t bytes = tile_bytes(matrix);
  int n = 0;
#if defined(__AVX512BF16__)
  // Chains enough for what main memory gives, of which one stream is read faster than two.
  if constexpr (F == RL_BF16 && M >= 4)
    for (; panels.num_panels() == 1 && n < count; ++n)
      multiply_pairs<M, 1>(tiles + n * bytes, bytes, panels, panel, out + n * M * kTileRows);
#endif
  for (; n + N <= count; n += N)
    multiply_together<F, M, N>(tiles + n * bytes, bytes, panels, panel, out + n * M * kTileRows);
  for (; n < count; ++n)
    multiply_together<F, M, 1>(tiles + n * bytes, bytes, panels, panel, out + n * M * kTileRows);
}

template <int F, size_t... I>
constexpr std::array<TileKernel, kPanelTokens> kernels(std::index_sequence<I...>) {
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
