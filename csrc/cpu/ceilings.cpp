#include "ceilings.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <numeric>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#define RL_VECTORS
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define RL_VECTORS
#endif

#include "amx.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kIntervals = 8;
constexpr size_t kLine = 64;
constexpr size_t kBlock = 256;  // bytes of one stream that one turn of a loop reads
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kThreadSkew = 17 * kBlock;  // threads' streams never start a power of two apart
constexpr int kChains = 12;  // sums in flight: more than latency times issue width
constexpr int kShortSums = 8;  // the same, of 16 bits

// Vectors of the instruction set at hand

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif
typedef uint64_t Vector __attribute__((vector_size(kVectorBytes), may_alias));
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));

// Makes the compiler believe that a register has changed, so that no work on it is hoisted.
template <class T>
inline void touch(T& value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#else
  asm volatile("" : "+w"(value));
#endif
}

// On sums before a loop: equal ones would be computed once. After it: none is left out.
template <class T, size_t kCount>
inline void touch_all(T (&values)[kCount]) {
  for (T& value : values) touch(value);
}

// Reading. A pattern goes once through `bytes` bytes, an odd multiple of 4 · kBlock, so that pieces
// of it never lie a power of two apart: such pieces would fall into the same cache sets.

using ReadLoop = void (*)(const uint8_t* data, size_t bytes);

// `kStreams` pieces are read side by side, each `kAhead` bytes ahead of itself into the cache.
template <size_t kStreams, size_t kAhead>
void read_streams(const uint8_t* data, size_t bytes) {
  const size_t piece = bytes / kStreams;
  Vector sums[4] = {};
  for (size_t offset = 0; offset < piece; offset += kBlock) {
#pragma GCC unroll 4
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const uint8_t* block = data + stream * piece + offset;
      if (kAhead) {
#pragma GCC unroll 4
        for (size_t line = 0; line < kBlock; line += kLine) {
          __builtin_prefetch(block + kAhead + line);
        }
      }
#pragma GCC unroll 16
      for (size_t i = 0; i < kBlock / kVectorBytes; ++i) {
        sums[i % 4] ^= *reinterpret_cast<const Vector*>(block + i * kVectorBytes);
      }
    }
  }
  touch_all(sums);
}

#if defined(RL_VECTORS)

// sums += Σ over 4 neighbours of unsigned byte · signed byte, in 32 bits.
inline Ints dot4(Ints sums, Ints u8, Ints s8) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)u8, (__m512i)s8);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)u8, (__m256i)s8);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)u8, (int8x16_t)s8);
#else
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)u8, (__m256i)s8);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// The bare stream of a 4-bit matrix-vector product: unpacked and multiplied, but not scaled.
template <size_t kAhead>
void read_int4_gemv(const uint8_t* data, size_t bytes) {
  const Ints activations = Ints{} + 0x01ff02fe;
  const Ints low_mask = Ints{} + 0x0f0f0f0f;
  Ints low_sums[4] = {}, high_sums[4] = {};
  for (size_t offset = 0; offset < bytes; offset += kBlock) {
    const uint8_t* block = data + offset;
#pragma GCC unroll 4
    for (size_t line = 0; kAhead && line < kBlock; line += kLine) {
      __builtin_prefetch(block + kAhead + line, 0, 2);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kBlock / kVectorBytes; ++i) {
      Ints packed;
      std::memcpy(&packed, block + i * kVectorBytes, sizeof packed);
      low_sums[i % 4] = dot4(low_sums[i % 4], packed & low_mask, activations);
      high_sums[i % 4] = dot4(high_sums[i % 4], (packed >> 4) & low_mask, activations);
    }
  }
  touch_all(low_sums);
  touch_all(high_sums);
}

#endif  // RL_VECTORS

struct ReadPattern {
  const char* name;
  ReadLoop loop;
};

constexpr ReadPattern kReadPatterns[] = {
    {"one stream", read_streams<1, 0>},
    {"one stream, prefetch 1 KB", read_streams<1, 1024>},
    {"one stream, prefetch 2 KB", read_streams<1, 2048>},
    {"one stream, prefetch 4 KB", read_streams<1, 4096>},
    {"two streams", read_streams<2, 0>},
    {"two streams, prefetch 2 KB", read_streams<2, 2048>},
    {"four streams", read_streams<4, 0>},
    {"four streams, prefetch 1 KB", read_streams<4, 1024>},
#if defined(RL_VECTORS)
    {"int4 GEMV", read_int4_gemv<0>},
    {"int4 GEMV, prefetch 1 KB", read_int4_gemv<1024>},
    {"int4 GEMV, prefetch 2 KB", read_int4_gemv<2048>},
#endif
};

// Arithmetic. A loop makes `rounds` turns on registers.

using ComputeLoop = void (*)(int64_t rounds);

inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  touch(a);
  return sum + a * b;
#endif
}

void fma_fp32(int64_t rounds) {
  const Floats a = Floats{} + 1e-3f, b = Floats{} + 1e-3f;
  Floats sums[kChains] = {};
  touch_all(sums);
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 16
    for (Floats& sum : sums) sum = multiply_add(a, b, sum);
  }
  touch_all(sums);
}

#if defined(__AVX512BF16__)

void dpbf16(int64_t rounds) {
  const Ints ones = Ints{} + 0x3a833a83;
  Floats sums[kChains] = {};
  touch_all(sums);
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 16
    for (Floats& sum : sums) {
      sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)ones, (__m512bh)ones);
    }
  }
  touch_all(sums);
}

#elif defined(RL_VECTORS)

// Pairs of bf16 are widened (a shift, a mask) once and multiplied by six rows, as a matrix does.
void widened_bf16(int64_t rounds) {
  Ints pairs = Ints{} + 0x3a833a83;
  const Ints high_mask = Ints{} + (int32_t)0xffff0000;
  Floats b = Floats{} + 1e-3f, sums[kChains] = {};
  touch_all(sums);
  for (; rounds > 0; --rounds) {
    touch(pairs);
    const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & high_mask);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = (i % 2 ? odd : even) * b + sums[i];
    }
  }
  touch_all(sums);
}

#endif

#if defined(RL_VECTORS)

void dot_int8(int64_t rounds) {
  Ints u8 = Ints{} + 0x01010101, s8 = Ints{} + 0x01ff01ff, sums[kChains] = {};
  touch_all(sums);
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 16
    for (Ints& sum : sums) {
      touch(u8);
      sum = dot4(sum, u8, s8);
    }
  }
  touch_all(sums);
}

#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)

// Products of 4-bit weights are small: eight of them are summed in 16 bits before they are widened.
// The signed operands come from the L1 cache, as activations do.
void dot_int4(int64_t rounds) {
  alignas(64) Ints s8[kShortSums];
  for (Ints& vector : s8) vector = Ints{} + 0x01ff01ff;
  const Ints* activations = s8;
  Ints u8 = Ints{} + 0x01010101, sums[2] = {};
  const __m256i ones = _mm256_set1_epi16(1);
  for (; rounds > 0; --rounds) {
    __m256i pairs[kShortSums];
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
      touch(u8);
      asm volatile("" : "+r"(activations) : : "memory");
#pragma GCC unroll 8
      for (int i = 0; i < kShortSums; ++i) {
        const __m256i products = _mm256_maddubs_epi16((__m256i)u8, (__m256i)activations[i]);
        pairs[i] = step ? _mm256_add_epi16(pairs[i], products) : products;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kShortSums; ++i) sums[i % 2] += (Ints)_mm256_madd_epi16(pairs[i], ones);
  }
  touch_all(sums);
}

#endif

#if !defined(RL_VECTORS)

void multiply_int32(int64_t rounds) {
  Ints a = Ints{} + 3, b = Ints{} + 5, sums[kChains] = {};
  touch_all(sums);
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 16
    for (Ints& sum : sums) {
      touch(a);
      sum += a * b;
    }
  }
  touch_all(sums);
}

#endif

#if defined(__AMX_TILE__)

template <int R>
constexpr std::integral_constant<int, R> kTile{};

// A tile of random bytes, or of random bfloats between 1 and 2 of either sign: with zeros the clock is
// higher than any product's.
struct RandomTile {
  alignas(64) uint16_t pairs[rl::kAmxRows * rl::kAmxBytes / 2];

  RandomTile(bool of_bytes, uint32_t seed) {
    for (uint16_t& pair : pairs) {
      seed = seed * 1664525 + 1013904223;
      auto bits = static_cast<uint16_t>(seed >> 16);
      pair = of_bytes ? bits : static_cast<uint16_t>((bits & 0x807f) | 0x3f80);
    }
  }
};

// Four tiles of sums, of whole tiles that stay in their registers.
template <bool kBytes>
void multiply_tiles(int64_t rounds) {
  constexpr rl::TileShapes::Shape kWhole{rl::kAmxRows, rl::kAmxBytes};
  const rl::TileShapes shapes({kWhole, kWhole, kWhole, kWhole, kWhole, kWhole, kWhole, kWhole});
  const RandomTile x0(kBytes, 1), x1(kBytes, 2), weights0(kBytes, 3), weights1(kBytes, 4);
  rl::tile_load<4>(x0.pairs, rl::kAmxBytes);
  rl::tile_load<5>(x1.pairs, rl::kAmxBytes);
  rl::tile_load<6>(weights0.pairs, rl::kAmxBytes);
  rl::tile_load<7>(weights1.pairs, rl::kAmxBytes);
  auto add = [](auto sums, auto x, auto weights) {
    if constexpr (kBytes)
      rl::tile_dot_bytes<sums, x, weights, true>();
    else
      rl::tile_dot_bfloats<sums, x, weights>();
  };
  for (; rounds > 0; --rounds) {
    add(kTile<0>, kTile<4>, kTile<6>);
    add(kTile<1>, kTile<4>, kTile<7>);
    add(kTile<2>, kTile<5>, kTile<6>);
    add(kTile<3>, kTile<5>, kTile<7>);
  }
}

#endif

struct ArithmeticLoop {
  const char* name;
  const char* format;
  double operations_per_round;
  ComputeLoop loop;
};

constexpr double kPerByte = 2.0 * kVectorBytes * kChains;  // a multiply-add for each byte

#if defined(__AMX_TILE__)
constexpr double kPerTile = 2.0 * rl::kAmxRows * rl::kAmxRows * rl::kAmxBytes;  // of bytes
#endif

constexpr ArithmeticLoop kArithmeticLoops[] = {
#if defined(__AMX_TILE__)
    {"tdpbf16ps", "bfloat16", 4 * kPerTile / 2, multiply_tiles<false>},
    {"tdpbssd", "int8", 4 * kPerTile, multiply_tiles<true>},
#endif
#if defined(RL_VECTORS)
    {"multiply-add", "float32", kPerByte / 4, fma_fp32},
#else
    {"multiply, add", "float32", kPerByte / 4, fma_fp32},
    {"multiply, add in 32 bits", "int8", kPerByte / 4, multiply_int32},
#endif
#if defined(__AVX512BF16__)
    {"vdpbf16ps", "bfloat16", kPerByte / 2, dpbf16},
#elif defined(RL_VECTORS)
    {"widen, multiply-add", "bfloat16", kPerByte / 4, widened_bf16},
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    {"vpdpbusd", "int8", kPerByte, dot_int8},
#elif defined(__AVX2__)
    {"vpmaddubsw, vpmaddwd", "int8", kPerByte, dot_int8},
    {"vpmaddubsw, sums of 8", "int4", 2.0 * kVectorBytes * 8 * kShortSums, dot_int4},
#elif defined(__ARM_FEATURE_DOTPROD)
    {"sdot", "int8", kPerByte, dot_int8},
#endif
};

// Threads and clocks

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Turns per second, summed over threads, in the best of kIntervals intervals: one in which no other
// process took a core. `prepare(thread)` runs before the first, and yields what is called again and
// again until time is up, or nothing usable: then the rate is 0.
template <class Prepare>
double turns_per_second(int32_t threads, double seconds, Prepare prepare) {
  std::vector<double> rates(static_cast<size_t>(threads * kIntervals), 0.0);
  std::atomic<int32_t> arrived{0};
  auto work = [&](int32_t thread) {
    auto turn = prepare(thread);
    if (turn) turn();  // warm-up: pages, caches, clock frequency
    for (int32_t interval = 0; interval < kIntervals; ++interval) {
      arrived.fetch_add(1);
      while (arrived.load() < threads * (interval + 1)) std::this_thread::yield();
      if (!turn) continue;
      const Clock::time_point start = Clock::now();
      int64_t turns = 0;
      double elapsed = 0.0;
      do {
        turn();
        ++turns;
        elapsed = seconds_since(start);
      } while (elapsed < seconds / kIntervals);
      rates[static_cast<size_t>(interval * threads + thread)] =
          static_cast<double>(turns) / elapsed;
    }
  };
  std::vector<std::thread> others;
  for (int32_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  double best = 0.0;
  for (int32_t interval = 0; interval < kIntervals; ++interval) {
    const double* first = rates.data() + interval * threads;
    if (std::find(first, first + threads, 0.0) != first + threads) return 0.0;
    best = std::max(best, std::accumulate(first, first + threads, 0.0));
  }
  return best;
}

// Memory in huge pages where the system gives them, filled by the thread that will read it.
class Buffer {
 public:
  Buffer(size_t bytes, size_t skew) : mapped_(bytes + skew + kHugePage), skew_(skew) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<uint8_t*>(memory);
#if defined(MADV_HUGEPAGE)
    madvise(memory_, mapped_, MADV_HUGEPAGE);
#endif
    std::memset(memory_, 0x5a, mapped_);
  }
  Buffer(Buffer&& other) noexcept
      : mapped_(other.mapped_), skew_(other.skew_), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  ~Buffer() {
    if (memory_) munmap(memory_, mapped_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const uint8_t* data() const {
    if (!memory_) return nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_);
    return memory_ + (kHugePage - address % kHugePage) % kHugePage + skew_;
  }

 private:
  size_t mapped_, skew_;
  uint8_t* memory_ = nullptr;
};

struct ReadTurn {
  Buffer buffer;
  ReadLoop loop;
  size_t bytes;
  int64_t passes;
  explicit operator bool() const { return buffer.data() != nullptr; }
  void operator()() const {
    for (int64_t pass = 0; pass < passes; ++pass) loop(buffer.data(), bytes);
  }
};

struct ArithmeticTurn {
  ComputeLoop loop;
  int64_t rounds;
  explicit operator bool() const { return true; }
  void operator()() const { loop(rounds); }
};

bool in_range(int32_t index, size_t count, int32_t threads, double seconds) {
  return index >= 0 && static_cast<size_t>(index) < count && threads >= 1 &&
         threads <= kMaxThreads && seconds > 0.0;
}

}  // namespace

const char* ridgeline_read_pattern(int32_t pattern) {
  if (!in_range(pattern, std::size(kReadPatterns), 1, 1.0)) return nullptr;
  return kReadPatterns[pattern].name;
}

double ridgeline_read_rate(int32_t pattern, size_t bytes_per_thread, int32_t threads,
                           double seconds) {
  if (!in_range(pattern, std::size(kReadPatterns), threads, seconds)) return 0.0;
  const size_t quarter_blocks = bytes_per_thread / (4 * kBlock);
  if (quarter_blocks == 0) return 0.0;
  const size_t bytes = (quarter_blocks - (quarter_blocks % 2 == 0)) * 4 * kBlock;
  const ReadLoop loop = kReadPatterns[pattern].loop;
  // Turns of at least a megabyte, so that reading the clock costs nothing.
  const int64_t passes = static_cast<int64_t>((size_t{1} << 20) / bytes) + 1;
  const double turns = turns_per_second(threads, seconds, [&](int32_t thread) {
    return ReadTurn{Buffer(bytes, static_cast<size_t>(thread) * kThreadSkew), loop, bytes, passes};
  });
  return turns * static_cast<double>(passes) * static_cast<double>(bytes);
}

const char* ridgeline_arithmetic_loop(int32_t loop) {
  if (!in_range(loop, std::size(kArithmeticLoops), 1, 1.0)) return nullptr;
  return kArithmeticLoops[loop].name;
}

const char* ridgeline_arithmetic_format(int32_t loop) {
  if (!in_range(loop, std::size(kArithmeticLoops), 1, 1.0)) return nullptr;
  return kArithmeticLoops[loop].format;
}

double ridgeline_arithmetic_rate(int32_t loop, int32_t threads, double seconds) {
  if (!in_range(loop, std::size(kArithmeticLoops), threads, seconds)) return 0.0;
  const ArithmeticLoop& chosen = kArithmeticLoops[loop];
  constexpr int64_t kRounds = 2048;
  const double turns = turns_per_second(threads, seconds, [&](int32_t) {
    return ArithmeticTurn{chosen.loop, kRounds};
  });
  return turns * static_cast<double>(kRounds) * chosen.operations_per_round;
}
