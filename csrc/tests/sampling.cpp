// Draws: the same token from the same logits, whatever the level.
#include <cmath>

#include "checks.h"
#include "data.h"

namespace rl_test {
namespace {

constexpr int kVocab = 1003;
constexpr int kDraws = 24;

struct Settings {
  float temperature, top_p, min_p;
  int32_t top_k;
};
constexpr Settings kSettings[] = {
    {0, 1, 0, 0},      {1, 1, 0, 0},     {0.01f, 1, 0, 0},   {50, 1, 0, 0},
    {0.8f, 1, 0, 5},   {1.5f, 1, 0, 1},  {1, 1, 0, 5000},    {0.9f, 0.9f, 0, 0},
    {3, 0.999f, 0, 0}, {1, 1e-6f, 0, 0}, {0.9f, 1, 0.1f, 0}, {1.2f, 0.8f, 0.01f, 50},
};

}  // namespace

void check_sampling(const Pair& pair, Report& report) {
  for (float spread : {0.5f, 3.0f, 12.0f}) {
    for (const Settings& settings : kSettings) {
      std::vector<Floats> logits;
      std::vector<rl_sampling> rows;
      std::vector<uint32_t> mask((kVocab + 31) / 32);
      Random random(9);
      for (uint32_t& word : mask) word = static_cast<uint32_t>(random.word());
      const int32_t barred[] = {3, 500, 1002};
      for (int i = 0; i < kDraws; ++i)
        logits.push_back(normals(kVocab, static_cast<uint64_t>(i), spread));
      for (int i = 0; i < kDraws; ++i) {
        auto number = static_cast<uint32_t>(i);
        rows.push_back({logits[number].data(), i % 3 ? nullptr : mask.data(), barred, i % 2 ? 3 : 0,
                        number, settings.temperature, settings.top_p, settings.min_p,
                        settings.top_k, 1000003u * number, number % 2, number});
      }
      logits[1][17] = NAN;
      std::fill_n(logits[2].data(), kVocab, -INFINITY);
      logits[4][900] = INFINITY;
      std::vector<int32_t> want(kDraws), got(kDraws);
      pair.reference.rl_sample(pair.reference.alone, rows.data(), kDraws, kVocab, want.data());
      pair.tested.rl_sample(pair.tested.threads, rows.data(), kDraws, kVocab, got.data());
      for (size_t i = 0; i < kDraws; ++i)
        report.holds("draws", std::to_string(got[i]) + ", not " + std::to_string(want[i]),
                     got[i] == want[i]);
    }
  }
}

}  // namespace rl_test
