// Draws of tokens, and what the head notes of logits for them.
#pragma once

#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace rl {

// Logits that a thread makes together.
constexpr int32_t kRunTokens = kTileRows;
inline int32_t num_runs_of(int32_t vocab_size) {
  return static_cast<int32_t>(ceil_div(vocab_size, kRunTokens));
}

// The largest of up to kRunTokens logits, or not a number if one of them is not.
inline float largest_of_run(const float* logits, int32_t count) {
  auto larger = [](auto a, auto b) { return (a > b) | (a != a) ? a : b; };
  if (count == kRunTokens) {
    vf most = load(logits);
    for (int i = W; i < kRunTokens; i += W) most = larger(most, load(logits + i));
    return reduce(most, larger);
  }
  float most = logits[0];
  for (int32_t i = 1; i < count; ++i) most = larger(most, logits[i]);
  return most;
}

// tokens[i] is drawn by rows[i], as rl_sample has it. `maxima` are those of the runs of each row,
// [num_rows, num_runs_of(vocab_size)], or null if nobody noted them.
void draw_tokens(Pool& pool, const rl_sampling* rows, int32_t num_rows, int32_t vocab_size,
                 const float* maxima, int32_t* tokens);

}  // namespace rl
