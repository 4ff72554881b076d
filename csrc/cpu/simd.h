// Vectors of the instruction set that this library is compiled for. GCC's vector types carry most
// of the arithmetic; what they cannot say is below, once for each level.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#define RL_VECTORS  // instructions are written out, where GCC's types do not say them
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)
#define RL_VECTORS
#define RL_NEON
#endif
#endif

// AVX2 alone sums products of bytes in 16 bits; see dot.h.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define RL_SUMS_OF_16_BITS
#endif

namespace rl {

#if defined(__AVX512F__)
constexpr int W = 16;  // float lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Vectors that registers hold, and how many of them may be sums, beside their operands.
#if defined(__AVX512F__) || defined(RL_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kMostSums = kRegisters * 3 / 4;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int32_t V4i __attribute__((vector_size(16)));
typedef float vf_in_memory __attribute__((vector_size(4 * W), aligned(4), may_alias));

// RL_UNROLL stands before a loop over registers, whose trip count the compiler knows; RL_INLINE marks
// parts of an inner loop, which it would rather call. Plain C++, with its loops over bytes, would
// take minutes to compile.
#if defined(RL_VECTORS)
#define RL_UNROLL _Pragma("GCC unroll 16")
#define RL_INLINE __attribute__((always_inline))
#else
#define RL_UNROLL
#define RL_INLINE
#endif

inline vf load(const float* p) { return *reinterpret_cast<const vf_in_memory*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_in_memory*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }
inline vi splat_i(int32_t x) { return x - vi{}; }
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vi bits_of(vf x) { return (vi)x; }
inline vf float_of(vi x) { return (vf)x; }
inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf abs(vf a) { return float_of(bits_of(a) & 0x7fffffff); }

// a * b + c, rounded once where the machine can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)  // at every level: compilers fuse either of two products
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Nearest integer, ties to even.
inline vi round_to_int(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(RL_NEON)
  return (vi)vcvtnq_s32_f32((float32x4_t)x);
#else
  vi out;
  for (int i = 0; i < W; ++i) out[i] = static_cast<int32_t>(nearbyintf(x[i]));
  return out;
#endif
}

// W lanes reduced to one, halves onto halves: with `both(a, b)` for vectors and for numbers.
template <class Vector, class Both>
RL_INLINE inline auto reduce(Vector x, const Both& both) {
  typedef decltype(x[0] + x[0]) Lane;
  typedef Lane V4 __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  typedef Lane V8 __attribute__((vector_size(32)));
  V8 eight = both((V8)_mm512_castsi512_si256((__m512i)x),
                  (V8)_mm512_extracti64x4_epi64((__m512i)x, 1));
#elif defined(__AVX2__)
  Vector eight = x;
#endif
#if defined(__AVX2__)
  V4 four = both((V4)_mm256_castsi256_si128((__m256i)eight),
                 (V4)_mm256_extracti128_si256((__m256i)eight, 1));
#else
  V4 four = x;
#endif
  V4 two = both(four, __builtin_shuffle(four, (V4i){2, 3, 2, 3}));
  return both(two, __builtin_shuffle(two, (V4i){1, 1, 1, 1}))[0];
}

inline float sum(vf x) {
  return reduce(x, [](auto a, auto b) { return a + b; });
}
inline int32_t sum(vi x) {
  return reduce(x, [](auto a, auto b) { return a + b; });
}
inline float max_lane(vf x) {
  return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// As `float_to_bfloat`, in the low half of each lane.
inline vi bfloats_of(vf x) {
  typedef uint32_t Bits __attribute__((vector_size(4 * W)));
  Bits word = (Bits)x;
  vi rounded = (vi)((word + 0x7fff + (word >> 16 & 1)) >> 16);
  return (vi)(x == x) ? rounded : splat_i(0x7fc0);
}

// The first `count` of W floats, then zeros.
inline vf load_some(const float* p, int count) {
  if (count >= W) return load(p);
  float lanes[W] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

// What makes the largest magnitude of some floats `largest_code`; not a number if one of them is not
// finite, so that what is read from their codes is not something plausible.
class Scale {
 public:
  void see(vf x) {
    vi magnitude = bits_of(x) & 0x7fffffff;  // without their signs floats are ordered as integers
    largest_ = magnitude > largest_ ? magnitude : largest_;
  }
  float of(int largest_code) const {
    int32_t best = reduce(largest_, [](auto a, auto b) { return a > b ? a : b; });
    if (best >= 0x7f800000) return NAN;
    float magnitude;
    std::memcpy(&magnitude, &best, sizeof magnitude);
    return magnitude / static_cast<float>(largest_code);
  }

 private:
  vi largest_{};
};
inline float scale_of(const float* x, int count, int largest_code) {
  Scale scale;
  for (int i = 0; i < count; i += W) scale.see(load_some(x + i, count - i));
  return scale.of(largest_code);
}
template <int N>
inline float scale_of(const vf (&x)[N], int largest_code) {
  Scale scale;
  RL_UNROLL
  for (int i = 0; i < N; ++i) scale.see(x[i]);
  return scale.of(largest_code);
}

// The low half of each lane, and the low byte.
inline void store_codes(int16_t* p, vi x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_set1_epi64x(0x0d0c090805040100);
  const __m256i four = _mm256_shuffle_epi8((__m256i)x, lowest);  // of each half
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permute4x64_epi64(four, 0b1000)));
#else
  for (int i = 0; i < W; ++i) p[i] = static_cast<int16_t>(x[i]);
#endif
}
inline void store_codes(int8_t* p, vi x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m256i four = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));  // of each half
  _mm_storeu_si64(p, _mm_unpacklo_epi32(_mm256_castsi256_si128(four),
                                        _mm256_extracti128_si256(four, 1)));
#else
  for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(x[i]);
#endif
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(RL_NEON)
  __fp16 half;
  std::memcpy(&half, &h, 2);
  return half;
#else
  uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 1023u, word;
  if (exponent == 31) {
    word = sign | 0x7f800000u | mantissa << 13;
  } else if (exponent) {
    word = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float value = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&word, &value, 4);
    word |= sign;
  }
  float out;
  std::memcpy(&out, &word, 4);
  return out;
#endif
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(RL_NEON)
  __fp16 half = x;
  uint16_t out;
  std::memcpy(&out, &half, 2);
  return out;
#else
  uint32_t word;
  std::memcpy(&word, &x, 4);
  uint16_t sign = word >> 16 & 0x8000;
  float magnitude = std::fabs(x);
  if (magnitude != magnitude) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(nearbyintf(magnitude * 0x1p24f));
  std::memcpy(&word, &magnitude, 4);
  word += 0xfff + (word >> 13 & 1);  // to nearest, ties to even
  return sign | static_cast<uint16_t>((word >> 13) - (112 << 10));
#endif
}

inline float bfloat_to_float(uint16_t b) {
  uint32_t word = static_cast<uint32_t>(b) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// W consecutive halves, bfloats or signed bytes as floats.
inline vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(RL_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vf out;
  for (int i = 0; i < W; ++i) out[i] = half_to_float(p[i]);
  return out;
#endif
}

inline vf load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (vf)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm256_slli_epi32(wide, 16);
#elif defined(RL_NEON)
  return (vf)vshll_n_u16(vld1_u16(p), 16);
#else
  vi out;
  for (int i = 0; i < W; ++i) out[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return (vf)out;
#endif
}

inline vi load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vi bytes;
  for (int i = 0; i < W; ++i) bytes[i] = p[i];
  return bytes;
#endif
}
inline vf load_int8(const int8_t* p) { return to_float(load_bytes(p)); }

// e^x to about 1 unit in the last place; 0 below -87.3, infinity above 88.7. Cody and Waite's
// reduction, then a polynomial of degree 6 (minimax on [-ln 2 / 2, ln 2 / 2]).
inline vf exp(vf x) {
  vf bounded = max(min(x, splat(88.72283f)), splat(-87.33654f));
  vi n = round_to_int(bounded * 1.44269504f);
  vf k = to_float(n);
  vf r = fma(k, splat(-0.693359375f), bounded);
  r = fma(k, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  // 2^n in two factors, since n reaches 128.
  vi half = n >> 1;
  vf y = p * float_of((half + 127) << 23) * float_of((n - half + 127) << 23);
  y = select((vi)(x < -87.33654f), vf{}, y);
  y = select((vi)(x > 88.72283f), splat(INFINITY), y);
  return select((vi)(x == x), y, x);
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf tanh(vf x) {
  vf a = abs(x);
  vf big = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  vf s = x * x;  // small arguments cancel in the formula above
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, s, splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  vf small = fma(x * s, p, x);
  vf signed_big = float_of(bits_of(big) | (bits_of(x) & static_cast<int32_t>(0x80000000)));
  return select((vi)(a < 0.625f), small, signed_big);
}

// Asks for a line that is read a few kilobytes later, into the second-level cache: the first has
// places for only a dozen or two of lines that are on their way, which those being read need.
RL_INLINE inline void fetch_ahead(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace rl
