// The KV cache and attention over it, in every format.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "checks.h"

namespace rl_test {
namespace {

constexpr double kRounding = 4e-6;  // of the largest output
// Softmax weights beside int8 V have 15 bits: one that lies half way goes either way.
constexpr double kRoundingOfWords = 6e-5;

// Drafts 0 and 1 follow the last known token, 2 and 3 follow 0, 4 follows 3, 5 follows 1.
const std::vector<uint64_t> kTree = {0, 0, 0b1, 0b10, 0b101, 0b1001, 0b11001, 0b100010};

struct Settings {
  int num_heads;
  int out_width = 0;  // of latents
  float softcap = 0;
  int window = 0;
  const float* sinks = nullptr;
  float query_size = 1;
  double bound = kRounding;
};

std::string format_name(int format) {
  const char* const names[] = {"fp8", "int4", "float32", "float16", "bfloat16", "int8"};
  return names[format - RL_FP8];
}

// Heads of int4 are rotated, and so as wide as a power of two.
int width_of(int format, int width) { return format == RL_INT4 ? 64 : width; }

int tokens_of(const std::vector<Part>& parts) {
  int tokens = 0;
  for (const Part& part : parts) tokens += part.num_tokens;
  return tokens;
}

// Two caches of the same content, each written by its own level.
class Caches {
 public:
  Caches(const Pair& pair, const CacheShape& shape, const std::vector<int>& lengths, Report& report)
      : pair_(pair),
        report_(report),
        shape_(shape),
        reference_(pair.reference, shape, lengths),
        tested_(pair.tested, shape, lengths) {
    what_ = std::to_string(shape.num_kv_heads) + " KV heads of " + std::to_string(shape.k_width) +
            " and " + std::to_string(shape.v_width);
    std::vector<Part> parts;
    for (size_t i = 0; i < lengths.size(); ++i)
      parts.push_back({static_cast<int>(i), 0, lengths[i]});
    Batch batch({&reference_}, parts);
    auto heads = static_cast<size_t>(batch.num_tokens() * shape.num_kv_heads);
    Floats k = normals(heads * static_cast<size_t>(shape.k_width), 1);
    Floats v = normals(heads * static_cast<size_t>(shape.v_width), 2);
    write(pair.reference, pair.reference.alone, reference_, batch, k, v);
    write(pair.tested, pair.tested.threads, tested_, batch, k, v);
    same_memory("KV writes");
    check_reads();
  }

  // Attention of some parts, on both levels and then in other batches and on more threads.
  void check(const Settings& settings, const std::vector<Part>& parts) {
    auto tokens = static_cast<size_t>(tokens_of(parts));
    size_t q_row = static_cast<size_t>(settings.num_heads * shape_.k_width);
    Floats q = normals(tokens * q_row, 3, settings.query_size);
    std::string what = what_ + ", " + std::to_string(settings.num_heads) + " heads, " +
                       std::to_string(tokens) + " tokens from " + std::to_string(parts[0].start);
    Floats want = attend(pair_.reference, pair_.reference.alone, 1, reference_, settings, parts, q);
    Floats got = attend(pair_.tested, pair_.tested.alone, 1, tested_, settings, parts, q);
    bool words =
        (shape_.format == RL_INT8 || shape_.format == RL_INT4) && shape_.v_width > 0;
    report_.close("attention, " + format_name(shape_.format), what, got.data(), want.data(),
                  want.size(), words ? std::max(settings.bound, kRoundingOfWords) : settings.bound,
                  pair_.same_sums());

    Floats shared = attend(pair_.tested, pair_.tested.threads, 3, tested_, settings, parts, q);
    report_.same_bytes("batches of attention", what + ", threads", shared.data(), got.data(),
                       got.size() * sizeof(float));
    size_t out_row = got.size() / tokens, row = 0;
    for (const Part& part : parts) {
      for (int t = 0; t < part.num_tokens && part.ancestors.empty(); t += 9) {
        size_t at = row + static_cast<size_t>(t);
        Floats own(q_row);
        std::memcpy(own.data(), q.data() + at * q_row, q_row * sizeof(float));
        Floats single = attend(pair_.tested, pair_.tested.alone, 1, tested_, settings,
                               {{part.sequence, part.start + t, 1}}, own);
        report_.same_bytes("batches of attention", what + ", one token", single.data(),
                           got.data() + at * out_row, out_row * sizeof(float));
      }
      row += static_cast<size_t>(part.num_tokens);
    }
  }

  void check_moves() {
    const int32_t from[] = {20, 3, 4, 17}, to[] = {3, 4, 16, 18};
    move(pair_.reference, reference_, from, to, 4);
    move(pair_.tested, tested_, from, to, 4);
    same_memory("KV moves");
  }

 private:
  static void write(const Level& level, rl_pool* pool, Cache& cache, const Batch& batch,
                    const Floats& k, const Floats& v) {
    level.rl_kv_write(pool, &cache.group(), 0, Cache::kLayer, batch.get(), k.data(), v.data());
  }

  static void move(const Level& level, Cache& cache, const int32_t* from, const int32_t* to,
                   int count) {
    level.rl_kv_move(&cache.group(), cache.table(0).data(), from, to, count);
  }

  static Floats attend(const Level& level, rl_pool* pool, int num_threads, const Cache& cache,
                       const Settings& settings, const std::vector<Part>& parts, const Floats& q) {
    Batch batch({&cache}, parts);
    const rl_kv_group& group = cache.group();
    int width = group.v_width ? group.v_width : settings.out_width;
    float scale = 1 / std::sqrt(static_cast<float>(group.k_width));
    rl_attention attention{settings.num_heads, width,           scale,
                           settings.softcap,   settings.window, settings.sinks};
    Bytes scratch(level.rl_attend_scratch_bytes(&group, &attention, batch.get(), num_threads));
    Floats out(static_cast<size_t>(batch.num_tokens() * settings.num_heads * width), NAN);
    level.rl_attend(pool, &group, 0, Cache::kLayer, &attention, batch.get(), q.data(), out.data(),
                    scratch.data());
    return out;
  }

  void same_memory(const char* family) {
    report_.same_bytes(family, format_name(shape_.format) + ", " + what_, tested_.memory().data(),
                       reference_.memory().data(), reference_.memory().size());
  }

  void check_reads() {
    int count = 2, heads = shape_.num_kv_heads;
    auto read = [&](const Level& level, const Cache& cache) {
      auto slots = static_cast<size_t>(count * heads);
      size_t k = slots * static_cast<size_t>(shape_.k_width);
      Floats out(k + slots * static_cast<size_t>(shape_.v_width));
      level.rl_kv_read(&cache.group(), Cache::kLayer, cache.table(0).data(), 0, count, out.data(),
                       out.data() + k);
      return out;
    };
    Floats want = read(pair_.reference, reference_), got = read(pair_.tested, tested_);
    report_.close("KV reads", what_, got.data(), want.data(), want.size(), 0.0);
  }

  const Pair& pair_;
  Report& report_;
  CacheShape shape_;
  Cache reference_, tested_;
  std::string what_;
};

// As many rows in a tile as there can be, and then more than one tile and one block of them.
void check_row_counts(const Pair& pair, int format, Report& report) {
  int width = width_of(format, 20);
  Caches caches(pair, {format, 1, width, width}, {70}, report);
  for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 50})
    caches.check({1}, {{0, 70 - rows, rows}});
  caches.check_moves();
}

void check_lengths(const Pair& pair, int format, Report& report) {
  for (int length : {2, 15, 16, 17, 65, 513, 1040}) {
    Caches caches(pair, {format, 2, 64, 64}, {length}, report);
    caches.check({14}, {{0, length - 1, 1}});
    caches.check({2}, {{0, length - 2, 2}});
  }
}

void check_widths(const Pair& pair, int format, Report& report) {
  const int widths[][2] = {{1, 1}, {7, 19}, {33, 5}, {80, 80}, {96, 96}, {128, 128}, {256, 256}};
  for (const auto& [k_width, v_width] : widths) {
    if (format == RL_INT4 && k_width < 128) continue;
    Caches caches(pair, {format, 2, k_width, v_width}, {70}, report);
    caches.check({6}, {{0, 64, 6}});
  }
}

void check_settings(const Pair& pair, int format, Report& report) {
  Caches caches(pair, {format, 2, 32, 32}, {620}, report);
  const std::vector<Part> last = {{0, 613, 7}};
  for (int window : {1, 3, 16, 100, 600}) caches.check({4, 0, 0, window}, last);
  const float sinks[] = {-3, 0, 2, 9, 60, -60};
  caches.check({6, 0, 1.5f}, last);
  caches.check({6, 0, 0, 0, sinks}, last);
  caches.check({6, 0, 20, 40, sinks}, last);
  // Scores that no float exponential holds; they are exact to about 1e-3.
  caches.check({6, 0, 0, 0, nullptr, 1000, 2e-2}, last);
}

void check_companies(const Pair& pair, int format, Report& report) {
  for (int block_tokens : {16, 32, 128}) {
    int width = width_of(format, 40);
    Caches caches(pair, {format, 2, width, width, block_tokens}, {600, 2, 16, 90}, report);
    caches.check({6}, {{3, 60, 30}, {0, 599, 1}, {1, 0, 1}, {0, 590, 5}, {2, 0, 16}});
  }
}

void check_latents(const Pair& pair, int format, Report& report) {
  Caches caches(pair, {format, 1, 88, 0}, {540}, report);
  for (int heads : {1, 16, 52}) caches.check({heads, heads == 1 ? 70 : 72}, {{0, 537, 3}});
}

void check_trees(const Pair& pair, int format, Report& report) {
  int rows = static_cast<int>(kTree.size()), width = width_of(format, 36);
  for (int start : {0, 11, 60, 505}) {
    Caches caches(pair, {format, 2, width, width}, {start + rows, 40}, report);
    for (int window : {0, 3})
      caches.check({6, 0, 0, window}, {{0, start, rows, rows - 2, kTree}, {1, 0, 40}});
  }
}

}  // namespace

void check_attention(const Pair& pair, Report& report) {
  for (int format : {RL_F32, RL_F16, RL_BF16, RL_INT8, RL_INT4, RL_FP8}) {
    check_row_counts(pair, format, report);
    check_lengths(pair, format, report);
    check_widths(pair, format, report);
    check_settings(pair, format, report);
    check_companies(pair, format, report);
    if (format != RL_INT4) check_latents(pair, format, report);
    check_trees(pair, format, report);
  }
}

}  // namespace rl_test
