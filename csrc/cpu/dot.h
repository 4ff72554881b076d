// Sums of products of codes (unsigned, 4 to 8 bits) and activations (signed bytes), four columns at
// a time: a vector of weights holds a quad of columns for each of W rows.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace rl {

// Codes<F> is a quad of W rows, Quad the same quad of one token's activations in every lane, and
// Sums<F> the running sums of W rows. The few instructions that decide the speed are written out:
// compilers reorder the additions until the sums no longer fit the registers.
#if defined(__AVX512VNNI__)

template <int F>
struct Codes {
  __m512i v;
};
struct Quad {
  const int32_t* p;  // broadcast by the instruction that uses it
};
inline Quad quad_at(const int8_t* p) { return {reinterpret_cast<const int32_t*>(p)}; }

template <int F>
struct Sums {
  __m512i v = _mm512_setzero_si512();
  void add(Codes<F> codes, Quad quad) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(v) : "v"(codes.v), "m"(*quad.p));
  }
  vi total() const { return (vi)v; }
};

inline __m512i line(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512i low_bits(__m512i x, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(x, shift), _mm512_set1_epi8(static_cast<char>(mask)));
}
inline __m512i raised(__m512i x) { return _mm512_slli_epi16(x, 4); }
inline __m512i both(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }

#elif defined(__AVX2__)

using Quad = __m256i;
inline Quad quad_at(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

inline __m256i line(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256i low_bits(__m256i x, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(x, shift), _mm256_set1_epi8(static_cast<char>(mask)));
}

#if defined(__AVXVNNI__)

template <int F>
struct Codes {
  __m256i v;
};
template <int F>
struct Sums {
  __m256i v = _mm256_setzero_si256();
  void add(Codes<F> codes, Quad quad) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(v) : "x"(codes.v), "x"(quad));
  }
  vi total() const { return (vi)v; }
};
inline __m256i raised(__m256i x) { return _mm256_slli_epi16(x, 4); }
inline __m256i both(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }

#else

// Without VNNI products are summed in 16 bits. A nibble times a byte, in pairs, is at most
// 2 * 15 * 127 = 3,810, so the eight quads of a block fit; longer codes are taken as two nibbles.
template <int F>
struct Codes {
  __m256i low, high;
};
template <>
struct Codes<RL_Q4> {
  __m256i low;
};

inline __m256i wide(__m256i sums16) { return _mm256_madd_epi16(sums16, _mm256_set1_epi16(1)); }

inline void add_products(__m256i& sums16, __m256i codes, Quad quad) {
  __m256i products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sums16), "=&x"(products)
      : "x"(codes), "x"(quad));
}

template <int F>
struct Sums {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  void add(Codes<F> codes, Quad quad) {
    add_products(low, codes.low, quad);
    add_products(high, codes.high, quad);
  }
  vi total() const { return (vi)wide(low) + ((vi)wide(high) << 4); }
};
template <>
struct Sums<RL_Q4> {
  __m256i low = _mm256_setzero_si256();
  void add(Codes<RL_Q4> codes, Quad quad) { add_products(low, codes.low, quad); }
  vi total() const { return (vi)wide(low); }
};

#endif

#else

struct Bytes {
  uint8_t b[4 * W];
};
using Quad = const int8_t*;
inline Quad quad_at(const int8_t* p) { return p; }
template <int F>
struct Codes {
  Bytes v;
};
template <int F>
struct Sums {
  vi v{};
  void add(const Codes<F>& codes, Quad x) {
    for (int row = 0; row < W; ++row)
      for (int i = 0; i < 4; ++i) v[row] += codes.v.b[4 * row + i] * x[i];
  }
  vi total() const { return v; }
};
inline Bytes line(const uint8_t* p) {
  Bytes out;
  std::memcpy(out.b, p, sizeof out.b);
  return out;
}
inline Bytes low_bits(Bytes x, int shift, int mask) {
  for (auto& b : x.b) b = static_cast<uint8_t>(b >> shift & mask);
  return x;
}
inline Bytes raised(Bytes x) {
  for (auto& b : x.b) b = static_cast<uint8_t>(b << 4);
  return x;
}
inline Bytes both(Bytes a, Bytes b) {
  for (int i = 0; i < 4 * W; ++i) a.b[i] |= b.b[i];
  return a;
}

#endif

// Joins a nibble and the bits above it; `Part` is a vector of bytes.
template <int F, class Part>
inline Codes<F> join(Part low, Part high) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  return {low, high};
#else
  return {both(low, raised(high))};
#endif
}

// Quads t and t + 4 of a block, for W rows from byte 4 * `row` of each line.
template <int F>
inline void read_quads(const uint8_t* block, int row, int t, Codes<F>& first, Codes<F>& second) {
  const uint8_t* p = block + 4 * row;
  if constexpr (F == RL_Q8) {
    auto a = line(p + 64 * t), b = line(p + 64 * (t + 4));
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    first = {low_bits(a, 0, 15), low_bits(a, 4, 15)};
    second = {low_bits(b, 0, 15), low_bits(b, 4, 15)};
#else
    first = {a};
    second = {b};
#endif
  } else {
    auto nibbles = line(p + 64 * t);
    auto low = low_bits(nibbles, 0, 15), high = low_bits(nibbles, 4, 15);
    if constexpr (F == RL_Q4) {
      first = {low};
      second = {high};
    } else if constexpr (F == RL_Q5) {
      auto fifth = line(p + 64 * 4);
      first = join<F>(low, low_bits(fifth, t, 1));
      second = join<F>(high, low_bits(fifth, t + 4, 1));
    } else {
      first = join<F>(low, low_bits(line(p + 64 * 4), 2 * t, 3));
      second = join<F>(high, low_bits(line(p + 64 * 5), 2 * t, 3));
    }
  }
}

}  // namespace rl
