// How fast steps of few tokens read their weights from main memory, beside a bare loop over the same bytes,
// in turns within one process: libraries of kernels, such as one of before and one of after a change.
//
//   g++ -O3 -march=native -Icsrc/cpu -o build/product_streams benchmarks/product_streams.cpp -ldl -pthread
//   build/product_streams TURNS LIBRARY...
//
// A step is layers of Llama-3.2-1B's shape without their attention. Needs AVX2, two processors and 1 GB.
#include <dlfcn.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ridgeline_cpu.h"

namespace {

constexpr int kThreads = 2;
constexpr int64_t kBytes = int64_t{512} << 20;

double seconds_of(const std::function<void()>& body) {
  auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One token of int4: lines of 16 rows, and after each 8 of them their scales. Each thread reads half.
void read_bare(const uint8_t* line, const uint8_t* end, float* out) {
  alignas(64) int8_t x[64];
  for (int i = 0; i < 64; ++i) x[i] = static_cast<int8_t>(37 * i);
  auto quad = [&](int i) { return reinterpret_cast<const int32_t*>(x)[i]; };
#if defined(__AVX512VNNI__)
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sum = _mm512_setzero_ps();
  for (; line + 544 <= end; line += 544) {
    __m512i dots = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      __m512i codes = _mm512_loadu_si512(line + 64 * i);
      dots = _mm512_dpbusd_epi32(dots, _mm512_and_si512(codes, low), _mm512_set1_epi32(quad(i)));
      dots = _mm512_dpbusd_epi32(dots, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low),
                                 _mm512_set1_epi32(quad(i + 8)));
    }
    __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 512)));
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scales, sum);
  }
  _mm512_storeu_ps(out, sum);
#else
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256 sums[2] = {};
  for (; line + 544 <= end; line += 544) {
    __m256i dots[2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32 * i));
      dots[i % 2] = _mm256_add_epi16(
          dots[i % 2], _mm256_maddubs_epi16(_mm256_and_si256(codes, low), _mm256_set1_epi32(quad(i / 2))));
      dots[i % 2] = _mm256_add_epi16(
          dots[i % 2], _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low),
                                            _mm256_set1_epi32(quad(i / 2 + 8))));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m256 scales =
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 512 + 16 * i)));
      sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(dots[i], ones)), scales, sums[i]);
    }
  }
  for (int i = 0; i < 2; ++i) _mm256_storeu_ps(out + 8 * i, sums[i]);
#endif
}

// The other thread, which spins while there is nothing to do for at most a turn of another.
class Bare {
 public:
  explicit Bare(const uint8_t* data) : data_(data), other_([this] { work(); }) {}
  ~Bare() {
    turn_ = -1;
    other_.join();
  }
  void operator()() {
    int turn = ++turn_;
    half(0);
    while (done_ != turn) _mm_pause();
  }

 private:
  void half(int i) { read_bare(data_ + kBytes / 2 * i, data_ + kBytes / 2 * (i + 1), sums_[i]); }
  void work() {
    for (int seen = 0;;) {
      int turn = turn_;
      if (turn < 0) return;
      if (turn == seen) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        continue;
      }
      half(1);
      done_ = seen = turn;
    }
  }
  const uint8_t* data_;
  alignas(64) float sums_[2][16];
  std::atomic<int> turn_{0}, done_{0};
  std::thread other_;
};

#define FUNCTIONS(X)                                                                          \
  X(rl_pool_new) X(rl_matrix_bytes) X(rl_program_new) X(rl_add_norm) X(rl_add_qkv)            \
      X(rl_add_out_project) X(rl_add_residual) X(rl_add_mlp) X(rl_reserve) X(rl_buffer) X(rl_run)

struct Library {
  std::string name;
#define DECLARE(function) decltype(&::function) function;
  FUNCTIONS(DECLARE)
  rl_pool* pool;

  explicit Library(const std::string& path) : name(path.substr(path.rfind('/') + 1)) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
#define FIND(function) \
  if (!(function = reinterpret_cast<decltype(function)>(dlsym(handle, #function)))) throw std::runtime_error(dlerror());
    FUNCTIONS(FIND)
    pool = rl_pool_new(kThreads);
  }
};

struct Format {
  const char* name;
  int32_t format, group, has_factors;
};
constexpr Format kFormats[] = {
    {"int4", RL_Q4, 128, 1}, {"6 bits", RL_Q6, 32, 0}, {"int8", RL_Q8, 0, 0}, {"bfloat16", RL_BF16, 0, 0}};

constexpr int32_t kWidth = 2048, kKeys = 512, kInner = 8192, kMostTokens = 8;

// As many layers as there are bytes for.
struct Layers {
  const Library* library;
  rl_program* program;
  int32_t num_ops = 0;
  int64_t bytes = 0;

  Layers(const Library& from, const Format& format, const uint8_t* data, const float* ones) : library(&from) {
    const int32_t widths[RL_NUM_BUFFERS] = {kWidth, kWidth, kWidth, kWidth, kWidth, kKeys, kKeys};
    program = library->rl_program_new(widths);
    const rl_norm norm{RL_RMS_NORM, 0, 1e-5f};
    const rl_activation silu{RL_SILU, 0, 0};
    int64_t at = 0;
    auto linear = [&](int32_t rows, int32_t columns) {
      int32_t group = format.format == RL_Q8 ? columns : format.group;
      rl_matrix m{format.format, rows, columns, group, 0, format.has_factors, 0x1p-12f, data + at};
      at += library->rl_matrix_bytes(&m);
      return rl_linear{m, nullptr, 0};
    };
    for (;; bytes = at) {
      rl_linear query = linear(kWidth, kWidth), key = linear(kKeys, kWidth), value = linear(kKeys, kWidth);
      rl_linear out = linear(kWidth, kWidth), gate = linear(kInner, kWidth), up = linear(kInner, kWidth);
      rl_linear down = linear(kWidth, kInner);
      if (at > kBytes) return;
      library->rl_add_norm(program, RL_X, RL_H, &norm, ones, nullptr, kWidth);
      library->rl_add_qkv(program, RL_H, &query, &key, &value, 0);
      library->rl_add_out_project(program, &out);
      library->rl_add_residual(program, 1);
      library->rl_add_norm(program, RL_X, RL_H, &norm, ones, nullptr, kWidth);
      library->rl_add_mlp(program, RL_H, RL_H, &gate, &up, &down, &silu, nullptr);
      num_ops = library->rl_add_residual(program, 1) + 1;
    }
  }
  int64_t run(int32_t tokens) const {
    rl_batch batch{tokens, 0, nullptr, nullptr, nullptr};
    library->rl_run(program, library->pool, 0, num_ops, &batch, nullptr, nullptr, nullptr);
    return bytes;
  }
};

struct Cell {
  std::string name;
  std::function<int64_t()> run;  // returns the bytes it read
  std::vector<double> rates;
};

int run(int turns, const std::vector<std::string>& paths) {
  auto* data = static_cast<uint8_t*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (data == MAP_FAILED) throw std::runtime_error("no memory");
  madvise(data, kBytes, MADV_HUGEPAGE);
  // Random bits that are numbers between 0 and 1 where they are read as halves.
  uint64_t random = 1;
  for (int64_t i = 0; i < kBytes / 8; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    reinterpret_cast<uint64_t*>(data)[i] = random >> 3 & 0x3bff3bff3bff3bffu;
  }
  std::vector<Library> libraries;
  for (const std::string& path : paths) libraries.emplace_back(path);
  const std::vector<float> ones(kWidth, 1.0f);
  Bare bare(data);
  std::vector<Cell> cells = {{"bare int4", [&] { return bare(), kBytes; }, {}}};
  for (const Format& format : kFormats) {
    std::vector<Layers> programs;
    for (const Library& library : libraries) {
      programs.emplace_back(library, format, data, ones.data());
      library.rl_reserve(programs.back().program, kMostTokens);
      std::fill_n(library.rl_buffer(programs.back().program, RL_X), kMostTokens * kWidth, 1.0f);
    }
    for (int tokens : {1, 2, 4, 8})
      for (const Layers& layers : programs)
        cells.push_back({std::string(format.name) + ", " + std::to_string(tokens) + " tokens, " +
                             layers.library->name,
                         [=] { return layers.run(tokens); }, {}});
  }
  for (int turn = -1; turn < turns; ++turn)
    for (Cell& cell : cells) {
      int64_t bytes = 0;
      double seconds = seconds_of([&] { bytes = cell.run(); });
      if (turn >= 0) cell.rates.push_back(static_cast<double>(bytes) / seconds / 1e9);
    }
  std::printf("GB/s: median of %d turns, and best\n", turns);
  for (Cell& cell : cells) {
    std::sort(cell.rates.begin(), cell.rates.end());
    std::printf("%6.1f %6.1f  %s\n", cell.rates[cell.rates.size() / 2], cell.rates.back(), cell.name.c_str());
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: product_streams TURNS LIBRARY...\n");
    return 2;
  }
  try {
    return run(std::atoi(arguments[1]), {arguments + 2, arguments + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "product_streams: %s\n", error.what());
    return 1;
  }
}
