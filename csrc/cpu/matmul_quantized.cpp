// Codes times bytes. The sum over columns runs in one order whatever the number of tokens:
// integer sums within a step (exact), then float sums over the steps in order.
#include <array>
#include <utility>

#include "matmul_blocks.h"

namespace rl {
namespace {

template <int F, int M, int R>
RL_INLINE inline void start_sums(const int32_t* minus_sums, Sums<F> (&sums)[R][M]) {
  RL_UNROLL
  for (int m = 0; m < M; ++m) {
    Sums<F> start(splat_i(minus_sums[m]));
    RL_UNROLL
    for (int r = 0; r < R; ++r) sums[r][m] = start;
  }
}

// Fetches the bytes of N tiles in their order, and behind these tiles those of the next N. One of several
// panels fetches its share of the tiles that are `count` tiles behind instead, which the same thread
// multiplies next: the memory has the time of all panels for them.
template <int F, int N, int M>
class Prefetch {
 public:
  Prefetch(const rl_matrix& matrix, const uint8_t* tile, int count, const Panels& panels,
           int64_t panel)
      : tile_bytes_(tile_bytes(matrix)),
        bytes_per_block_(tile_bytes_ / num_blocks(matrix)),
        ahead_(kAhead),
        at_(tile + ahead_) {
    if (panels.num_panels() == 1) return;
    const PanelShare share(panels, panel, tile_bytes_);
    share_ = ceil_div(share.bytes, num_blocks(matrix));
    at_ = tile + count * tile_bytes_ + share.first;
  }

  template <bool kFromBytes, int kBlockBytes>
  RL_INLINE void next_block() {
    if (kFromBytes || share_) return next_share();
    if (kAhead == 0) return;
    RL_UNROLL
    for (int n = 0; n < N; ++n)
      RL_UNROLL
      for (int i = 0; i <= kBlockBytes; i += 64) fetch_ahead(at_ + n * tile_bytes_ + i);
    at_ += bytes_per_block_;
    ahead_ += bytes_per_block_;
    if (N > 1 && ahead_ >= tile_bytes_) {
      at_ += (N - 1) * tile_bytes_;
      ahead_ -= tile_bytes_;
    }
  }

 private:
  RL_INLINE void next_share() {
    for (int64_t i = 0; i < share_; i += 64)
      RL_UNROLL
      for (int n = 0; n < N; ++n) fetch_ahead(at_ + n * tile_bytes_ + i);
    at_ += share_;
  }

  // The more tokens, the less the memory is asked for, and the later a line that is a little late. For
  // one, and two whose codes are bytes, Zen 4 streams a tile best where nothing is asked for.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
  static constexpr int64_t kAhead = M == 1 || (M == 2 && F == RL_Q8) ? 0 : 8192;
#elif defined(RL_SUMS_OF_16_BITS)
  static constexpr int64_t kAhead = N > 1 ? 1024 : 8192;
#else
  static constexpr int64_t kAhead = M <= 2 ? 4096 : 8192;
#endif
  int64_t tile_bytes_, bytes_per_block_;
  int64_t ahead_;      // of the start of the tile
  int64_t share_ = 0;  // of a block's bytes
  const uint8_t* at_;
};

// What is known of a matrix when its kernel is compiled. The last kind, int4 as it is quantized on
// load, leaves nothing to ask within a step, and the sums stay in registers.
enum class Kind {
  kBlocks,     // a step is some blocks
  kHalves,     // a step is half a block
  kSymmetricBlock,  // a step is one block, and there are no mins
  kFactors,         // a step is some blocks, each with factors
};

Kind kind_of(const rl_matrix& matrix) {
  int step = step_columns(matrix);
  if (matrix.has_factors) return Kind::kFactors;
  if (step < kBlockColumns) return Kind::kHalves;
  return step == kBlockColumns && !matrix.has_min ? Kind::kSymmetricBlock : Kind::kBlocks;
}

// The groups of a tile, one after the other. What has a kind of its own has two in a span.
template <Kind K>
class Groups {
 public:
  Groups(const rl_matrix& matrix, const uint8_t* tile)
      : per_span_(kPlain || kFactors ? 2 : groups_per_span(matrix)),
        bytes_(kPlain ? kScaleBytes : kFactors ? kScaleBytes + kFactorGroup / 2 : group_bytes(matrix)),
        span_bytes_(span_bytes(matrix)),
        left_(num_groups(matrix)),
        next_span_(tile) {}

  // To the next one. True where it begins a span, whose blocks are at `blocks()`.
  RL_INLINE bool advance() {
    if (left_of_span_ > 0) {
      --left_of_span_;
      group_ += bytes_;
      return false;
    }
    const int64_t count = left_ < per_span_ ? left_ : per_span_;
    left_ -= count;
    left_of_span_ = count - 1;
    group_ = next_span_;
    blocks_ = group_ + round_up(count * bytes_, 64);
    next_span_ += span_bytes_;
    return true;
  }
  const uint16_t* scales() const { return reinterpret_cast<const uint16_t*>(group_); }
  const int8_t* factors() const {  // of a matrix without minimums
    return reinterpret_cast<const int8_t*>(group_ + kScaleBytes);
  }
  const uint8_t* blocks() const { return blocks_; }

 private:
  static constexpr bool kPlain = K == Kind::kSymmetricBlock, kFactors = K == Kind::kFactors;
  static constexpr int64_t kScaleBytes = kTileRows * 2;
  int64_t per_span_, bytes_, span_bytes_, left_, left_of_span_ = 0;
  const uint8_t *next_span_, *group_ = nullptr, *blocks_ = nullptr;
};

// R vectors of rows, S of which have their sums in registers at a time.
template <int F, bool FromBytes, int M, int R, int S, Kind K>
void multiply_tiles(const rl_matrix& matrix, const uint8_t* tile, const uint8_t* codes, int count,
                    const Panels& panels, int64_t panel, float* out) {
  constexpr int N = tiles_of(R);
  constexpr int kBytes = block_bytes<F, FromBytes>();
  static constexpr int32_t kZeros[M] = {};
  constexpr bool is_plain = K == Kind::kSymmetricBlock, has_factors = K == Kind::kFactors;
  constexpr bool halves = K == Kind::kHalves;
  const int step = is_plain ? kBlockColumns : has_factors ? kFactorGroup : step_columns(matrix);
  const int blocks_per_step = is_plain || halves ? 1 : step / kBlockColumns;
  const bool has_min = !is_plain && !has_factors && matrix.has_min;
  const int num_steps = static_cast<int>(ceil_div(matrix.columns, step));
  const int64_t groups = num_groups(matrix), bytes_of_tile = tile_bytes(matrix);
  const int64_t next_tile = FromBytes ? num_blocks(matrix) * kExpandedBlock : bytes_of_tile;
  const int steps_per_group = groups > 1 ? matrix.group / step : num_steps;

  for (int row = 0; row < kTileRows; row += R * W) {
    vf result[R][M] = {};
    vf scale[R] = {}, min[R] = {};
    Groups<K> group(matrix, tile);
    const uint8_t* block = codes;
    const int8_t* quads = panels.panel_bytes(panel);
    const bool from_zero = has_min != takes_signed(F);
    const int32_t* minus_sums = from_zero ? kZeros : panels.panel_minus_sums(panel);
    const int next_unit = from_zero ? 0 : M;
    const float* x_scales = panels.panel_scales(panel);
    const float* x_sums = has_min ? panels.panel_sums(panel) : nullptr;
    Prefetch<F, N, M> prefetch(matrix, tile, count, panels, panel);
    int steps_left = 0;
    for (int s = 0; s < num_steps; ++s) {
      if (steps_left == 0) {
        if (group.advance() && !FromBytes) block = group.blocks();
        steps_left = steps_per_group;
      }
      vi totals[R][M] = {};
      auto start = [&](auto& sums) RL_INLINE {
        if constexpr (has_factors)
          start_sums_at(minus_sums, sums);
        else
          start_sums(minus_sums, sums);
      };
      if constexpr (kSumsOfSteps && !has_factors && !halves) {
        Sums<F> sums[R][M];
        start(sums);
        minus_sums += next_unit;
        for (int b = 0; b < blocks_per_step; ++b) {
          prefetch.template next_block<FromBytes, kBytes>();
          add_block<F, FromBytes, M, R>(block, next_tile, true, true, row, quads, sums);
          block += kBytes;
          quads += kBlockColumns * M;
        }
        RL_UNROLL
        for (int r = 0; r < R; ++r)
          RL_UNROLL
          for (int m = 0; m < M; ++m) totals[r][m] = sums[r][m].total();
      } else {
        const bool first_half = !halves || !(s & 1), second_half = !halves || (s & 1);
        const int8_t* factors = has_factors ? group.factors() : nullptr;
        for (int b = 0; b < blocks_per_step; ++b) {
          if (first_half) prefetch.template next_block<FromBytes, kBytes>();
          RL_UNROLL
          for (int first = 0; first < R; first += S) {
            Sums<F> sums[S][M];
            start(sums);
            add_block<F, FromBytes, M, S>(block + (row + first * W) / kTileRows * next_tile, next_tile,
                                          first_half, second_half, (row + first * W) % kTileRows,
                                          quads, sums);
            RL_UNROLL
            for (int r = first; r < first + S; ++r) {
              vi lanes{};
              if (has_factors)
                lanes = factor_lanes(factors + r * W / kTileRows * bytes_of_tile +
                                     (row + r * W) % kTileRows);
              RL_UNROLL
              for (int m = 0; m < M; ++m) {
                if constexpr (has_factors)
                  add_products(totals[r][m], (vi)sums[r - first][m].v, lanes);
                else
                  totals[r][m] += sums[r - first][m].total();
              }
            }
          }
          minus_sums += next_unit;
          if (has_factors) factors += kTileRows;
          if (!second_half) continue;
          block += kBytes;
          quads += kBlockColumns * M;
        }
      }
      if (steps_left-- == steps_per_group) {
        RL_UNROLL
        for (int r = 0; r < R; ++r) {
          const uint16_t* scales =
              group.scales() + row + r * W / kTileRows * bytes_of_tile / 2 + r * W % kTileRows;
          scale[r] = load_half(scales);
          if (has_min) min[r] = load_half(scales + kTileRows);
        }
      }
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        RL_UNROLL
        for (int r = 0; r < R; ++r)
          result[r][m] = fma(to_float(totals[r][m]) * x_scales[m], scale[r], result[r][m]);
      x_scales += M;
      if (has_min) {
        RL_UNROLL
        for (int m = 0; m < M; ++m)
          RL_UNROLL
          for (int r = 0; r < R; ++r) result[r][m] = fma(splat(x_sums[m]), min[r], result[r][m]);
        x_sums += M;
      }
    }
    RL_UNROLL
    for (int r = 0; r < R; ++r)
      RL_UNROLL
      for (int m = 0; m < M; ++m)
        store(out + (r * W / kTileRows * M + m) * kTileRows + (row + r * W) % kTileRows,
              result[r][m] * matrix.multiplier);
  }
}

// `count` tiles, those of R vectors of rows together.
template <int F, bool FromBytes, int M, int R, int S, Kind K>
void multiply_some(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes, int count,
                   const Panels& panels, int64_t panel, float* out) {
  constexpr int N = tiles_of(R), kAlone = R / N;
  for (int n = 0; n < count;) {
    const bool together = n + N <= count;
    (together ? multiply_tiles<F, FromBytes, M, R, S, K>
              : multiply_tiles<F, FromBytes, M, kAlone, S < kAlone ? S : kAlone, K>)(
        matrix, tiles + n * tile_bytes(matrix),
        FromBytes ? codes + n * expanded_bytes(matrix, panels) : nullptr, count, panels, panel,
        out + n * M * kTileRows);
    n += together ? N : 1;
  }
}

template <int F, bool FromBytes, int M>
void multiply(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes, int count,
              const Panels& panels, int64_t panel, float* out) {
  // Of a panel's tokens; beside totals there are registers for fewer vectors of rows.
  constexpr int kSums = row_vectors<F, FromBytes, M>();
  constexpr int kSumsBesideTotals = W == 8 || (W == 4 && kRegisters == 32 && M <= 4) ? 2 : 1;
  constexpr int kTiles = FromBytes ? 1 : quantized_tiles_together(M);
  constexpr auto vectors = [](int sums) { return kTiles > 1 ? kTiles * kTileRows / W : sums; };
  auto* some = multiply_some<F, FromBytes, M, vectors(kSums), kSums, Kind::kBlocks>;
  const Kind kind = kind_of(matrix);
  if (kind == Kind::kHalves)
    some = multiply_some<F, FromBytes, M, vectors(kSums), kSums, Kind::kHalves>;
  if (kind == Kind::kSymmetricBlock)
    some = multiply_some<F, FromBytes, M, vectors(kSums), kSums, Kind::kSymmetricBlock>;
  if constexpr (code_bits(F) <= 4 && !FromBytes)
    if (kind == Kind::kFactors)
      some = multiply_some<F, false, M, vectors(kSumsBesideTotals), kSumsBesideTotals, Kind::kFactors>;
  some(matrix, tiles, codes, count, panels, panel, out);
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
    case RL_Q2:
      return kKernels<RL_Q2>[m];
    case RL_Q3:
      return kKernels<RL_Q3>[m];
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

}  // namespace rl
