// Activations as matrix kernels read them: panels of a few tokens, tokens innermost.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace rl {

// At most as many tokens as have their sums in registers together, of vectors.
constexpr int kPanelTokens = W == 8 ? 4 : 8;

// Whether so many tokens are multiplied by AMX: bfloats always are, as their sums are rounded in the
// order of the instruction; codes where there are more than a panel of vectors.
inline bool takes_amx(const rl_matrix& m, int32_t num_tokens) {
#if defined(__AMX_TILE__)
  return m.format == RL_BF16 || (is_quantized(m.format) && num_tokens > kPanelTokens);
#else
  (void)m, (void)num_tokens;
  return false;
#endif
}

// Tokens of the longest panels: with AMX two tiles, which share a reading of weights.
#if defined(__AMX_TILE__)
constexpr int kMostPanelTokens = 2 * kAmxRows;
#else
constexpr int kMostPanelTokens = kPanelTokens;
#endif

// How many panels so many tokens are cut into: of 6 where the sums of every block become floats, for which
// two vectors of rows times 6 tokens leave registers, and main memory is not what is waited for.
inline int32_t num_panels_of(const rl_matrix& m, int32_t num_tokens) {
  if (takes_amx(m, num_tokens))
    return static_cast<int32_t>(ceil_div(num_tokens, kMostPanelTokens));
  bool in_sixes = W == 16 && is_quantized(m.format) && step_columns(m) <= kBlockColumns &&
                  num_tokens > 64;
  return static_cast<int32_t>(ceil_div(num_tokens, in_sixes ? 6 : kPanelTokens));
}

// Whether the integer sums of a step of columns (matrix.h) fit their lanes; otherwise those of a block.
#if defined(RL_SUMS_OF_16_BITS)
constexpr bool kSumsOfSteps = false;
#else
constexpr bool kSumsOfSteps = true;
#endif

// Whether codes are expanded to bytes once for all panels: where AMX multiplies them, where they would be joined of
// several lines, and where products with factors are bytes; of a few panels that is not worth it, with factors
// because wide vectors have no units to spare.
inline bool is_expanded(const rl_matrix& m, int32_t num_tokens) {
  constexpr int32_t kJoined = W == 16 ? 3 : 1, kWithFactors = W == 16 ? 4 : 6;
  const int32_t count = num_panels_of(m, num_tokens);
  const bool joined = m.format == RL_Q5 || m.format == RL_Q6;
  const bool multiplied = m.has_factors && kSumsOfSteps;  // sums of 16 bits take nibbles
  return is_quantized(m.format) && (takes_amx(m, num_tokens) || (joined && count > kJoined) ||
                                    (multiplied && count > kWithFactors));
}

// Whether codes are multiplied less their middle.
constexpr bool takes_signed(int format) {
#if defined(RL_NEON)
  return format == RL_Q8;
#else
  return format < 0;
#endif
}

// What integer sums start from.
struct Units {
  int32_t columns;   // whose sum is started at once
  int32_t multiple;  // with factors their middle code, so that they start by a load

  Units(const rl_matrix& m, int32_t num_tokens) {
    const int32_t step = step_columns(m);
    const bool of_blocks = m.has_factors && !is_expanded(m, num_tokens);  // factors multiply the sums
    columns = (kSumsOfSteps && !of_blocks) || step < kBlockColumns ? step : kBlockColumns;
    multiple = m.has_factors ? middle_code(of_blocks ? m.format : RL_Q8) : 1;
  }

  // But for their middle code, it is minus the sum of some bytes, times `multiple`. Where sums are of 16 bits
  // it is two halves.
  int32_t minus(int32_t sum) const {
#if defined(RL_SUMS_OF_16_BITS)
    int32_t low = -sum / 2, high = -sum - low;
    low *= multiple, high *= multiple;
    return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (low & 0xffff));
#else
    return -sum * multiple;
#endif
  }
};

// Rows of floats: row t begins at data + t * stride.
struct Rows {
  const float* data;
  int64_t stride;
  int32_t num_tokens;
  int32_t columns;
};

// Panel p holds M tokens from `first_token(p)` on: panels are of equal length, or the first of them
// are one longer than the others. They come in blocks of `panels_each`, as equal as can be, which
// stay in a near cache while all tiles pass. For float matrices a panel is float [columns][M], or,
// where bfloats are multiplied in pairs, bfloat [columns / 2][M][2], a pair taking the place of a
// float. For quantized ones it is bytes [quads][M][4] (columns padded with zeros to a multiple of
// 32), and for each step of columns the scale of the bytes, float [steps][M]; beside minimums also
// the sum of the bytes times the scale, float [steps][M]; where sums start from them, for each unit
// of columns what `Units::minus` makes of the sum of its bytes, [units][M]. Panels of fewer tokens are
// not padded. For AMX some columns of a token lie together: panels of bytes or of pairs are
// [blocks][M][block_bytes], and a block is a step of columns or a part of one, or 16 pairs (columns
// padded with zeros to whole blocks).
struct Panels {
  int32_t num_tokens;
  int32_t count;  // of panels
  int32_t panels_each;
  int32_t padded_columns;
  int32_t num_steps;
  int32_t num_units;
  int32_t block_bytes;  // 0 where the panels are not AMX's
  float* floats;
  int8_t* bytes;
  float* scales;
  float* sums;          // null without minimums
  int32_t* minus_sums;  // null with minimums, and for AMX
  int64_t num_bytes;    // of all of these

  int32_t num_panels() const { return count; }
  int64_t num_blocks() const { return ceil_div(count, panels_each); }
  int64_t first_of_block(int64_t block) const { return block * panels_each; }
  int64_t last_of_block(int64_t block) const {  // the one after it
    return std::min<int64_t>((block + 1) * panels_each, count);
  }
  int64_t first_token(int64_t panel) const {
    return panel * (num_tokens / count) + std::min<int64_t>(panel, num_tokens % count);
  }
  int32_t panel_tokens(int64_t panel) const {
    return num_tokens / count + (panel < num_tokens % count);
  }
  const float* panel_floats(int64_t p) const { return floats + first_token(p) * padded_columns; }
  const int8_t* panel_bytes(int64_t p) const { return bytes + first_token(p) * padded_columns; }
  const float* panel_scales(int64_t p) const { return scales + first_token(p) * num_steps; }
  const float* panel_sums(int64_t p) const { return sums + first_token(p) * num_steps; }
  const int32_t* panel_minus_sums(int64_t p) const {
    return minus_sums + first_token(p) * num_units;
  }
};

// Scratch for the panels that a matrix needs, and the panels laid out in it.
int64_t panel_bytes(const rl_matrix& matrix, int32_t num_tokens);
Panels panels_in(const rl_matrix& matrix, int32_t num_tokens, void* scratch);

// Whether two matrices read the same panels of the same activations.
bool same_panels(const rl_matrix& a, const rl_matrix& b);

// Fills panels with rows in the form that `matrix` needs. Bytes are x / scale to nearest, with
// scale = max|x| / 127 over an activation group (matrix.h); what is not a number stays so, through
// the scale.
void fill_panels(Pool& pool, const rl_matrix& matrix, const Rows& rows, const Panels& panels);

// The same for as many rows as panels, all of one size, in one job.
void fill_each(Pool& pool, const rl_matrix& matrix, const Rows* rows, const Panels* panels,
               int count);

}  // namespace rl
