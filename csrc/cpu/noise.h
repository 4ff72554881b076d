// Noise for draws by Gumbel-max: Philox4x32-10 (Salmon et al., SC'11) of a row's seed, position and sample
// index and the token's number; see ridgeline.core.philox for the counter.
#pragma once

#include <algorithm>
#include <cmath>

#include "ridgeline_cpu.h"
#include "simd.h"

namespace rl {

constexpr double kMostUniform = 1 - 0x1p-24;

inline double uniform(uint32_t word) { return (static_cast<double>(word >> 9) + 0.5) * 0x1p-23; }
inline double gumbel(double u) { return -std::log(-std::log(u)); }

// High and low halves of a * b.
template <class Word>
struct Product64 {
  Word high, low;
};
inline Product64<uint32_t> multiply_wide(uint32_t a, uint32_t b) {
  uint64_t product = static_cast<uint64_t>(a) * b;
  return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
}
inline Product64<vu> multiply_wide(vu a, uint32_t b) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  typedef __m512i Lanes;
  auto product = [&](vu x) { return (vu)_mm512_mul_epu32((Lanes)x, _mm512_set1_epi32(static_cast<int>(b))); };
#else
  typedef __m256i Lanes;
  auto product = [&](vu x) { return (vu)_mm256_mul_epu32((Lanes)x, _mm256_set1_epi32(static_cast<int>(b))); };
#endif
  typedef uint64_t Pairs __attribute__((vector_size(4 * W)));
  const Pairs even = (Pairs)product(a), odd = (Pairs)product((vu)((Pairs)a >> 32));
  const Pairs low = (Pairs{} + 0xffffffffu);
  return {(vu)(even >> 32 | (odd & ~low)), (vu)((even & low) | odd << 32)};
#elif defined(RL_NEON)
  const auto four = (uint32x4_t)a;
  auto low = (uint32x4_t)vmull_n_u32(vget_low_u32(four), b), high = (uint32x4_t)vmull_high_n_u32(four, b);
  return {(vu)vuzp2q_u32(low, high), (vu)vuzp1q_u32(low, high)};
#else
  Product64<vu> out;
  for (int i = 0; i < W; ++i) {
    auto one = multiply_wide(a[i], b);
    out.high[i] = one.high, out.low[i] = one.low;
  }
  return out;
#endif
}

// The noise of tokens 4 c to 4 c + 3, for a number c or for a vector of them.
template <class Word>
struct Words {
  Word of[4];
};
template <class Word>
Words<Word> philox(Word c0, const rl_sampling& row) {
  const Word zero = c0 ^ c0;
  Word c[4] = {c0, zero + row.position, zero + row.sample_index, zero};
  uint32_t k0 = static_cast<uint32_t>(row.seed), k1 = static_cast<uint32_t>(row.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto p0 = multiply_wide(c[0], 0xD2511F53u), p1 = multiply_wide(c[2], 0xCD9E8D57u);
    const Word next[4] = {p1.high ^ c[1] ^ k0, p1.low, p0.high ^ c[3] ^ k1, p0.low};
    std::copy_n(next, 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

// Tokens whose noise one call makes, and the largest uniform number among that of those from `first` on.
constexpr int32_t kNoiseTokens = 4 * W;
inline double most_uniform(int32_t first, const rl_sampling& row) {
  vu counters = (vu{} + static_cast<uint32_t>(first / 4));
  for (int i = 0; i < W; ++i) counters[i] += static_cast<uint32_t>(i);
  const Words<vu> words = philox(counters, row);
  auto larger = [](auto a, auto b) { return a > b ? a : b; };
  return uniform(reduce(larger(larger(words.of[0], words.of[1]), larger(words.of[2], words.of[3])), larger));
}

}  // namespace rl
