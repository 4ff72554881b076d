// Sums of products of codes (unsigned, 2 to 8 bits) and activations (signed bytes), four columns at
// a time: a vector of weights holds a quad of columns for each of W rows.
#pragma once

#include "activations.h"

namespace rl {

// Codes<F> is a quad of W rows, Quad the same quad of one token's activations in every lane (in
// memory, where the only vector that uses it can broadcast it itself), and Sums<F> the running sums of
// W rows. The few instructions that decide the speed are written out: compilers reorder the additions
// until the sums no longer fit the registers.
//
// Sums start from the middle code times `minus_sum` (activations.h), so that codes need no offset.
// `bits` moves bytes right (left if negative) within 16-bit lanes and masks them, `both` joins the bits
// of two lines, and `less` takes a number off each byte. `factor_lanes` are the factors of W rows as
// `add_products` takes them, which adds sums that fit 16 bits times factors. `products_less` are codes
// with some bits flipped, times factors, which fill lanes of 16 bits, less a number for each byte.
#if defined(__AVX512VNNI__)

template <int F>
struct Codes {
  __m512i v;
};
struct QuadInMemory {
  const int32_t* p;
};
template <bool kUsedOnce>
inline auto quad_at(const int8_t* p) {
  auto* quad = reinterpret_cast<const int32_t*>(p);
  if constexpr (kUsedOnce) {
    return QuadInMemory{quad};
  } else {
    __m512i lanes;
    asm("vpbroadcastd %1, %0" : "=v"(lanes) : "m"(*quad));
    return lanes;
  }
}

template <int F>
struct Sums {
  __m512i v;
  Sums() = default;
  explicit Sums(vi minus_sum) : v((__m512i)(minus_sum << (code_bits(F) - 1))) {}
  void add(Codes<F> codes, QuadInMemory quad) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(v) : "v"(codes.v), "m"(*quad.p));
  }
  void add(Codes<F> codes, __m512i quad) {
    asm("vpdpbusd %2, %1, %0" : "+v"(v) : "v"(codes.v), "v"(quad));
  }
  vi total() const { return (vi)v; }
};

inline __m512i line(const uint8_t* p) {
  __m512i x = _mm512_loadu_si512(p);
  asm("" : "+v"(x));  // so that it is loaded once, and not by each instruction that uses it
  return x;
}
inline void store_line(uint8_t* p, __m512i x) { _mm512_storeu_si512(p, x); }
inline __m512i bits(__m512i x, int shift, int mask) {
  __m512i moved = shift >= 0 ? _mm512_srli_epi16(x, shift) : _mm512_slli_epi16(x, -shift);
  return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline __m512i both(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
inline __m512i less(__m512i x, int byte) {
  return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(byte)));
}

inline vi factor_lanes(const int8_t* p) {
  return load_bytes(p) & 0xffff;
}
inline void add_products(vi& totals, vi sums, vi factors) {
  asm("vpdpwssd %2, %1, %0" : "+v"(totals) : "v"(sums), "v"(factors));
}
inline __m512i line_of(vi lanes) { return (__m512i)lanes; }
inline __m512i products_less(__m512i codes, __m512i flips, __m512i factors, __m512i less) {
  __m512i products = _mm512_mullo_epi16(_mm512_xor_si512(codes, flips), factors);
  return _mm512_sub_epi8(products, less);
}

#elif defined(__AVX2__)

using Quad = __m256i;
template <bool>
inline Quad quad_at(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

inline __m256i line(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store_line(uint8_t* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
inline __m256i bits(__m256i x, int shift, int mask) {
  __m256i moved = shift >= 0 ? _mm256_srli_epi16(x, shift) : _mm256_slli_epi16(x, -shift);
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline __m256i both(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
inline __m256i less(__m256i x, int byte) {
  return _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(byte)));
}

#if !defined(RL_SUMS_OF_16_BITS)
inline vi factor_lanes(const int8_t* p) {
  return load_bytes(p) & 0xffff;
}
inline void add_products(vi& totals, vi sums, vi factors) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(totals) : "x"(sums), "x"(factors));
}
#else
inline vi factor_lanes(const int8_t* p) {
  const __m256i low_half_twice = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  return (vi)_mm256_shuffle_epi8((__m256i)load_bytes(p), low_half_twice);
}
inline void add_products(vi& totals, vi sums, vi factors) {
  totals += (vi)_mm256_madd_epi16((__m256i)sums, (__m256i)factors);
}
#endif
inline __m256i line_of(vi lanes) { return (__m256i)lanes; }
inline __m256i products_less(__m256i codes, __m256i flips, __m256i factors, __m256i less) {
  __m256i products = _mm256_mullo_epi16(_mm256_xor_si256(codes, flips), factors);
  return _mm256_sub_epi8(products, less);
}

template <int F>
struct Codes {
  __m256i v;
};

#if !defined(RL_SUMS_OF_16_BITS)

template <int F>
struct Sums {
  __m256i v;
  Sums() = default;
  explicit Sums(vi minus_sum) : v((__m256i)(minus_sum << (code_bits(F) - 1))) {}
  void add(Codes<F> codes, Quad quad) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(v) : "x"(codes.v), "x"(quad));
  }
  vi total() const { return (vi)v; }
};

#else

// Without VNNI the products of two pairs are summed in 16 bits. Of codes up to 6 bits and bytes
// they are at most 4 * 63 * 127 = 32,004; then they are widened.
template <int F>
struct Sums {
  __m256i v;
  Sums() = default;
  explicit Sums(vi minus_sum)
      : v(_mm256_madd_epi16((__m256i)minus_sum, _mm256_set1_epi16(1 << (code_bits(F) - 1)))) {}
  void add(Codes<F> codes, Quad quad) {
    __m256i products = _mm256_maddubs_epi16(codes.v, quad);
    v = _mm256_add_epi32(v, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  void add_both(Codes<F> first, Quad x, Codes<F> second, Quad y) {
    __m256i products, others;
    asm("vpmaddubsw %4, %3, %1\n\tvpmaddubsw %6, %5, %2\n\tvpaddw %2, %1, %1\n\t"
        "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(v), "=&x"(products), "=&x"(others)
        : "x"(first.v), "x"(x), "x"(second.v), "x"(y), "x"(_mm256_set1_epi16(1)));
  }
  vi total() const { return (vi)v; }
};

// Up to nibbles all eight quads of a block fit. Of these a lane holds the products of 16 bytes a, and starts from
// -4 times the sum of all 32: it stays within 16 * 127 * (15 - 4) + 16 * 127 * 4 = 30,480.
template <int F>
struct SumsOfBlocks {
  __m256i v;
  SumsOfBlocks() = default;
  explicit SumsOfBlocks(vi minus_sum)
      : v(_mm256_slli_epi16((__m256i)minus_sum, code_bits(F) - 1)) {}
  void add(Codes<F> codes, Quad quad) {
    __m256i products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
        : "+x"(v), "=&x"(products)
        : "x"(codes.v), "x"(quad));
  }
  vi total() const { return (vi)_mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
};
template <>
struct Sums<RL_Q2> : SumsOfBlocks<RL_Q2> {
  using SumsOfBlocks::SumsOfBlocks;
};
template <>
struct Sums<RL_Q3> : SumsOfBlocks<RL_Q3> {
  using SumsOfBlocks::SumsOfBlocks;
};
template <>
struct Sums<RL_Q4> : SumsOfBlocks<RL_Q4> {
  using SumsOfBlocks::SumsOfBlocks;
};

// Bytes are two nibbles; the middle code is that of the high ones.
template <>
struct Codes<RL_Q8> {
  Codes<RL_Q4> low, high;
};
template <>
struct Sums<RL_Q8> {
  Sums<RL_Q4> low, high;
  Sums() = default;
  explicit Sums(vi minus_sum) : low(vi{}), high(minus_sum) {}
  void add(const Codes<RL_Q8>& codes, Quad quad) {
    low.add(codes.low, quad);
    high.add(codes.high, quad);
  }
  vi total() const { return low.total() + (high.total() << 4); }
};

#endif

#else

typedef uint8_t Bytes __attribute__((vector_size(4 * W)));
template <int F>
struct Codes {
  Bytes v;
};

#if defined(RL_NEON)

// Both operands are signed. Codes of 8 bits are taken as signed as well, less 128, and their sums need no
// middle taken off.
using Quad = int8x16_t;
template <bool>
inline Quad quad_at(const int8_t* p) {
  return vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(p)));
}
template <int F>
struct Sums {
  vi v;
  Sums() = default;
  explicit Sums(vi minus_sum)
      : v(takes_signed(F) ? -minus_sum << 7 : minus_sum << (code_bits(F) - 1)) {}
  void add(const Codes<F>& codes, Quad x) {
    v = (vi)vdotq_s32((int32x4_t)v, (int8x16_t)(takes_signed(F) ? codes.v ^ 128 : codes.v), x);
  }
  vi total() const { return v; }
};

#else

using Quad = const int8_t*;
template <bool>
inline Quad quad_at(const int8_t* p) {
  return p;
}
template <int F>
struct Sums {
  vi v;
  Sums() = default;
  explicit Sums(vi minus_sum) : v(minus_sum << (code_bits(F) - 1)) {}
  void add(const Codes<F>& codes, Quad x) {
    for (int row = 0; row < W; ++row)
      for (int i = 0; i < 4; ++i) v[row] += codes.v[4 * row + i] * x[i];
  }
  vi total() const { return v; }
};

#endif

inline Bytes line(const uint8_t* p) {
  Bytes out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline void store_line(uint8_t* p, Bytes x) { std::memcpy(p, &x, sizeof x); }
inline Bytes bits(Bytes x, int shift, int mask) {
  auto by = static_cast<uint8_t>(shift >= 0 ? shift : -shift);
  return (shift >= 0 ? x >> by : x << by) & static_cast<uint8_t>(mask);
}
inline Bytes both(Bytes a, Bytes b) { return a | b; }
inline Bytes less(Bytes x, int byte) { return x - static_cast<uint8_t>(byte); }

inline vi factor_lanes(const int8_t* p) { return load_bytes(p); }
inline void add_products(vi& totals, vi sums, vi factors) { totals += sums * factors; }
inline Bytes line_of(vi lanes) { return (Bytes)lanes; }
inline Bytes products_less(Bytes codes, Bytes flips, Bytes factors, Bytes less) {
  typedef uint16_t Words __attribute__((vector_size(4 * W)));
  return (Bytes)((Words)(codes ^ flips) * (Words)factors) - less;
}

#endif

// Whether quads are best added two at a time.
template <int F>
#if defined(RL_SUMS_OF_16_BITS)
constexpr bool kInPairs = F == RL_Q5 || F == RL_Q6;
#else
constexpr bool kInPairs = false;
#endif

using Line = decltype(line(nullptr));

// Codes less their middle, times the factors of W rows, plus an offset. Of 4 bits that is, with a factor
// f >= 0, f * code - 8f, otherwise -f * (15 - code) + 7f: one product of 16 bits makes two bytes, as no
// product is beyond 240.
template <int F>
class FactorLine {
 public:
  FactorLine(const int8_t* factors, int offset) {
    vi factor = load_bytes(factors);
    vi negative = factor >> 31, size = (factor ^ negative) - negative;
    vi less = middle_code(F) * size + (factor & negative) - offset;
    flips_ = line_of(negative & (2 * middle_code(F) - 1) * 0x01010101);
    sizes_ = line_of(size | size << 16);
    less_ = line_of((vi)((vu)(less & 0xff) * 0x01010101u));
  }
  Line times(const Line& codes) const { return products_less(codes, flips_, sizes_, less_); }

 private:
  Line flips_, sizes_, less_;
};

// Bytes of W rows as codes.
template <int F>
inline Codes<F> codes_of(const Line& bytes) {
  return {bytes};
}
#if defined(RL_SUMS_OF_16_BITS)
template <>
inline Codes<RL_Q8> codes_of<RL_Q8>(const Line& bytes) {
  return {{bits(bytes, 0, 15)}, {bits(bytes, 4, 15)}};
}
#endif

// Quads t and t + 4 of a block as bytes, for W rows from byte 4 * `row` of each line.
template <int F>
inline void read_quads(const uint8_t* block, int row, int t, Line& first, Line& second) {
  const uint8_t* p = block + 4 * row;
  if constexpr (F == RL_Q8) {
    first = line(p + 64 * t);
    second = line(p + 64 * (t + 4));
  } else if constexpr (F == RL_Q2) {
    first = bits(line(p), 2 * t, 3);
    second = bits(line(p + 64), 2 * t, 3);
  } else if constexpr (F == RL_Q3) {
    if (t < 3) {
      Line pair = line(p + 64 * t);
      first = bits(pair, 0, 7);
      second = bits(pair, 3, 7);
    } else {
      Line middle = line(p + 64);
      first = both(bits(line(p), 6, 3), bits(middle, 4, 4));
      second = both(bits(middle, 7, 1), bits(line(p + 128), 5, 6));
    }
  } else {
    Line nibbles = line(p + 64 * t);
    first = bits(nibbles, 0, 15);
    second = bits(nibbles, 4, 15);
    if constexpr (F == RL_Q5) {
      Line fifth = line(p + 64 * 4);
      first = both(first, bits(fifth, t - 4, 16));
      second = both(second, bits(fifth, t, 16));
    } else if constexpr (F == RL_Q6) {
      first = both(first, bits(line(p + 64 * 4), 2 * t - 4, 48));
      second = both(second, bits(line(p + 64 * 5), 2 * t - 4, 48));
    }
  }
}

}  // namespace rl
