// Products of batches by AMX. Codes: integer sums within a step (exact), then float sums over the
// steps in order, each with the roundings of matmul_quantized.cpp, so that a token has the same bits
// in batches of all sizes. Bfloats: sums in the order of the instruction, for any number of tokens.
#include "amx.h"
#include "dot.h"
#include "matmul_tile.h"

#if defined(__AMX_TILE__)

#include <algorithm>
#include <array>
#include <utility>

namespace rl {
namespace {

// The tokens of a panel as the rows of up to two tiles.
constexpr int first_half(int num_tokens) {
  return num_tokens <= kAmxRows ? num_tokens : (num_tokens + 1) / 2;
}

// Some tokens of a panel of `stride` tokens.
struct TileOfTokens {
  const int8_t* bytes;  // block b of token m: bytes + (b * stride + m) * block_bytes
  const float* scales;  // [steps][stride]
  const float* sums;    // [steps][stride], null without minimums
  int stride, block_bytes;
};

// A 16-row tile of codes times M tokens. While one step's sums are scaled, the next are made: sums are
// in registers 0 and 1, activations in 4 and 5, and weights in 6 and 7.
template <int M, bool kHasMin>
void multiply_codes(const rl_matrix& matrix, const uint8_t* tile, const uint8_t* codes,
                    NextTiles& next, TileOfTokens x, float* out) {
  const int step = step_columns(matrix), block = x.block_bytes;
  const int num_steps = static_cast<int>(ceil_div(matrix.columns, step));
  const int64_t groups = num_groups(matrix);
  const int steps_per_group = groups > 1 ? matrix.group / step : num_steps;
  alignas(64) int32_t sums[2][M * kTileRows];

  auto multiply = [&](auto buffer) RL_INLINE {
    constexpr int B = decltype(buffer)::value;
    tile_zero<B>();
    for (int column = 0; column < step; column += block) {
      tile_load<4 + B>(x.bytes, block);
      tile_load<6 + B>(codes, 64);
      tile_dot_bytes<B, 4 + B, 6 + B, !kHasMin>();
      x.bytes += x.stride * block;
      codes += kTileRows * block;
    }
    tile_store<B>(sums[B], 64);
    next.fetch();
  };

  vf result[M] = {};
  vf scale{}, min{};
  int steps_left = 0;
  int64_t group = 0;
  auto add = [&](const int32_t* totals) RL_INLINE {
    if (steps_left == 0) {
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + group_offset(matrix, group++));
      scale = load_half(scales);
      if (kHasMin) min = load_half(scales + kTileRows);
      steps_left = steps_per_group;
    }
    --steps_left;
    RL_UNROLL
    for (int m = 0; m < M; ++m) {
      vi total = bits_of(load(reinterpret_cast<const float*>(totals) + m * kTileRows));
      result[m] = fma(to_float(total) * x.scales[m], scale, result[m]);
    }
    x.scales += x.stride;
    if (kHasMin) {
      RL_UNROLL
      for (int m = 0; m < M; ++m) result[m] = fma(splat(x.sums[m]), min, result[m]);
      x.sums += x.stride;
    }
  };

  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 1> odd;
  multiply(even);
  int s = 0;
  for (; s + 2 < num_steps; s += 2) {
    multiply(odd);
    add(sums[0]);
    multiply(even);
    add(sums[1]);
  }
  if (s + 1 < num_steps) multiply(odd);
  add(sums[0]);
  if (s + 1 < num_steps) add(sums[1]);
  RL_UNROLL
  for (int m = 0; m < M; ++m) store(out + m * kTileRows, result[m] * matrix.multiplier);
}

using CodesKernel = void (*)(const rl_matrix&, const uint8_t* tile, const uint8_t* codes, NextTiles&,
                             TileOfTokens, float* out);

// Tokens of a tile that is multiplied with codes: no more than a panel of vectors are not multiplied
// here, and more than fill a tile are halved.
constexpr int kFewestRows = kAmxRows / 2;
static_assert(kFewestRows <= kPanelTokens + 1);

template <bool kHasMin, size_t... I>
constexpr std::array<CodesKernel, sizeof...(I)> codes_kernels(std::index_sequence<I...>) {
  return {multiply_codes<kFewestRows + I, kHasMin>...};
}
template <bool kHasMin>
constexpr auto kCodesKernels =
    codes_kernels<kHasMin>(std::make_index_sequence<kAmxRows - kFewestRows + 1>());

void multiply_panel_of_codes(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes,
                             int count, const Panels& panels, int64_t panel, float* out) {
  const int M = panels.panel_tokens(panel), half = first_half(M);
  const auto& kernels = matrix.has_min ? kCodesKernels<true> : kCodesKernels<false>;
  const int64_t bytes = expanded_bytes(matrix, panels);
  const int64_t steps = ceil_div(matrix.columns, step_columns(matrix));
  NextTiles next(matrix, tiles, count, panels, panel, count * steps * (M > half ? 2 : 1));
  for (int m = 0; m < M; m += half) {
    const int some = std::min(half, M - m), block = panels.block_bytes;
    const TileShapes::Shape of_sums{some, 64}, of_tokens{some, block}, of_weights{block / 4, 64};
    const TileShapes shapes(
        {of_sums, of_sums, {}, {}, of_tokens, of_tokens, of_weights, of_weights});
    TileOfTokens x{panels.panel_bytes(panel) + m * block, panels.panel_scales(panel) + m,
                   matrix.has_min ? panels.panel_sums(panel) + m : nullptr, M, block};
    for (int n = 0; n < count; ++n)
      kernels[static_cast<size_t>(some - kFewestRows)](matrix, tiles + n * tile_bytes(matrix),
                                             codes + n * bytes, next, x,
                                             out + (n * M + m) * kTileRows);
  }
}

// Columns of bfloats that a tile holds, and the bytes of a tile of weights.
constexpr int kAmxPairs = kAmxBytes / 4;
constexpr int kWeightTile = kAmxPairs * kAmxBytes;

// Calls body(n) for n < N, numbers that the compiler knows.
template <int N, class Body>
RL_INLINE inline void for_tiles(const Body& body) {
  body(std::integral_constant<int, 0>());
  if constexpr (N > 1) body(std::integral_constant<int, 1>());
  if constexpr (N > 2) body(std::integral_constant<int, 2>());
  if constexpr (N > 3) body(std::integral_constant<int, 3>());
}

// N tiles of bfloats times a panel of one or two tiles of tokens: activations are in registers 4 and 5,
// weights in 6 and 7, and sums in the first: with two tiles of tokens those of the second from 2 on.
template <int kHalves, int N>
void multiply_bfloats(const rl_matrix& matrix, const uint8_t* tiles, const Panels& panels,
                      int64_t panel, float* out) {
  constexpr int kSecond = 4 / kHalves;
  const int M = panels.panel_tokens(panel), half = first_half(M);
  const int64_t bytes_of_tile = tile_bytes(matrix), num_pairs = ceil_div(matrix.columns, 2);
  const int64_t whole = num_pairs / kAmxPairs, left = num_pairs % kAmxPairs;
  const auto* x = reinterpret_cast<const uint8_t*>(panels.panel_floats(panel));
  for_tiles<N>([](auto number) RL_INLINE {
    tile_zero<decltype(number)::value>();
    if constexpr (kHalves == 2) tile_zero<kSecond + decltype(number)::value>();
  });

  auto add_block = [&](const uint8_t* weights, int64_t stride) RL_INLINE {
    tile_load<4>(x, kAmxBytes);
    if constexpr (kHalves == 2) tile_load<5>(x + half * kAmxBytes, kAmxBytes);
    x += M * kAmxBytes;
    for_tiles<N>([&](auto number) RL_INLINE {
      constexpr int n = decltype(number)::value;
      tile_load<6 + n % 2>(weights + n * stride, kAmxBytes);
      tile_dot_bfloats<n, 4, 6 + n % 2>();
      if constexpr (kHalves == 2) tile_dot_bfloats<kSecond + n, 5, 6 + n % 2>();
    });
  };

  const bool is_only_panel = panels.num_panels() == 1;  // others find the tiles in a near cache
  for (int64_t b = 0; b < whole; ++b) {
    const uint8_t* weights = tiles + b * kWeightTile;
    for (int n = 0; is_only_panel && n < N; ++n)
      for (int i = 0; i < kWeightTile; i += 64)
        fetch_ahead(weights + n * bytes_of_tile + 2 * kWeightTile + i);
    add_block(weights, bytes_of_tile);
  }
  if (left) {
    alignas(64) uint8_t padded[N * kWeightTile] = {};
    for (int n = 0; n < N; ++n)
      std::memcpy(padded + n * kWeightTile, tiles + n * bytes_of_tile + whole * kWeightTile,
                  static_cast<size_t>(left) * 64);
    add_block(padded, kWeightTile);
  }

  for_tiles<N>([&](auto number) RL_INLINE {
    constexpr int n = decltype(number)::value;
    float* to = out + n * M * kTileRows;
    tile_store<n>(to, 64);
    if constexpr (kHalves == 2) tile_store<kSecond + n>(to + half * kTileRows, 64);
  });
}

template <int kHalves>
void multiply_panel_of_bfloats(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t*,
                               int count, const Panels& panels, int64_t panel, float* out) {
  constexpr int N = 4 / kHalves;
  const int M = panels.panel_tokens(panel);
  const int64_t bytes = tile_bytes(matrix);
  const TileShapes::Shape of_first{first_half(M), 64}, of_second{M - first_half(M), 64};
  const TileShapes::Shape of_rest = kHalves == 2 ? of_second : of_first, of_weights{kAmxPairs, 64};
  const TileShapes shapes(
      {of_first, of_first, of_rest, of_rest, of_first, of_rest, of_weights, of_weights});
  auto multiply = [&](auto together, int n) {
    multiply_bfloats<kHalves, decltype(together)::value>(matrix, tiles + n * bytes, panels, panel,
                                                         out + n * M * kTileRows);
  };
  int n = 0;
  for (; n + N <= count; n += N) multiply(std::integral_constant<int, N>(), n);
  for (; n + 2 <= count; n += 2) multiply(std::integral_constant<int, 2>(), n);
  for (; n < count; ++n) multiply(std::integral_constant<int, 1>(), n);
}

}  // namespace

TileKernel amx_kernel(int format, int num_tokens) {
  if (is_quantized(format)) return multiply_panel_of_codes;
  return num_tokens > kAmxRows ? multiply_panel_of_bfloats<2> : multiply_panel_of_bfloats<1>;
}

}  // namespace rl

#endif
