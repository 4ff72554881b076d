// From a row of logits to a token, in the order of ridgeline.decoding.sampling: mask, minimum
// length, temperature, top-k, top-p, min-p, and the draw by Gumbel-max with counter-based noise
// (Philox4x32-10, Salmon et al., SC'11; see ridgeline.core.philox for the counter).
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "pool.h"
#include "ridgeline_cpu.h"
#include "simd.h"

namespace rl {
namespace {

constexpr double kMostNoise = 16.64;  // -log(-log u) for the largest u, 1 - 2^-24

struct Candidate {
  int32_t token;
  float logit;  // (logit - largest) / temperature, so at most 0
};

// The noise of tokens 4 c to 4 c + 3.
struct Words {
  uint32_t of[4];
};

Words philox(uint32_t c0, const rl_sampling& row) {
  uint32_t c[4] = {c0, row.position, row.sample_index, 0};
  uint32_t k0 = static_cast<uint32_t>(row.seed), k1 = static_cast<uint32_t>(row.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = static_cast<uint64_t>(c[0]) * 0xD2511F53u;
    uint64_t p1 = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
    uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                        static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    std::copy_n(next, 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

double uniform(uint32_t word) { return (static_cast<double>(word >> 9) + 0.5) * 0x1p-23; }
double gumbel(double u) { return -std::log(-std::log(u)); }

float exp_of(float x) { return exp(splat(x))[0]; }

class Allowed {
 public:
  explicit Allowed(const rl_sampling& row)
      : row_(row), bars_(row.num_barred > 0 && row.position < row.barred_until) {}

  bool everything() const { return !row_.mask && !bars_; }
  bool bars() const { return bars_; }

  bool operator()(int32_t token) const {
    if (row_.mask && !(row_.mask[token / 32] >> token % 32 & 1)) return false;
    return !bars_ || !std::binary_search(row_.barred, row_.barred + row_.num_barred, token);
  }
  void stop_barring() { bars_ = false; }

 private:
  const rl_sampling& row_;
  bool bars_;
};

// The best allowed token, the first of equals; -1 if there is none, or what is not a number.
int32_t best_token(const rl_sampling& row, int32_t vocab, const Allowed& allowed) {
  bool free = allowed.everything();
  int32_t best = -1;
  float most = -INFINITY;
  for (int32_t v = 0; v < vocab; ++v) {
    float logit = row.logits[v];
    if (logit != logit && (free || allowed(v))) return -1;
    if (logit > most && (free || allowed(v))) {
      most = logit;
      best = v;
    }
  }
  return best;
}

// What a row may still draw: its logits relative to the best, those that cannot come left out.
std::vector<Candidate> candidates_of(const rl_sampling& row, int32_t vocab, int32_t best,
                                     float least, const Allowed& allowed) {
  const float largest = row.logits[best], inverse = 1.0f / row.temperature;
  const bool free = allowed.everything();
  std::vector<Candidate> candidates;
  for (int32_t v = 0; v < vocab; ++v) {
    // The best is 0 even where a temperature next to zero has an infinite inverse.
    float logit = row.logits[v] == largest ? 0.0f : (row.logits[v] - largest) * inverse;
    if (logit >= least && logit > -INFINITY && (free || allowed(v))) candidates.push_back({v, logit});
  }
  return candidates;
}

bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

template <class Drop>
void drop_if(std::vector<Candidate>& candidates, const Drop& drop) {
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), drop), candidates.end());
}

// Keeps the k best and what is equal to the k-th.
void keep_top_k(std::vector<Candidate>& candidates, int32_t k) {
  if (k <= 0 || static_cast<size_t>(k) >= candidates.size()) return;
  auto kth = candidates.begin() + k - 1;
  std::nth_element(candidates.begin(), kth, candidates.end(), before);
  float least = kth->logit;
  drop_if(candidates, [&](const Candidate& c) { return c.logit < least; });
}

// Keeps the smallest set of best tokens whose probabilities reach p, the best of all even where p
// is so small that it is 0 as a float. A histogram finds the logit near which they do; only those
// near it are sorted.
void keep_top_p(std::vector<Candidate>& candidates, double p) {
  if (p >= 1 || candidates.empty()) return;
  constexpr int kBins = 1024;
  constexpr float kBinWidth = 1.0f / 32;  // the last bin holds everything below -32
  auto bin_of = [](float logit) {
    float bin = -logit / kBinWidth;
    return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;
  };
  std::vector<double> mass(kBins);
  double total = 0;
  for (size_t i = 0; i < candidates.size(); i += W) {
    int count = static_cast<int>(std::min<size_t>(W, candidates.size() - i));
    vf logits = splat(-INFINITY);
    for (int lane = 0; lane < count; ++lane) logits[lane] = candidates[i + lane].logit;
    vf weights = exp(logits);
    for (int lane = 0; lane < count; ++lane) mass[bin_of(logits[lane])] += weights[lane];
  }
  for (double m : mass) total += m;
  double reached = 0;
  int last = 0;
  while (last < kBins - 1 && reached + mass[last] < p * total) reached += mass[last++];
  std::vector<Candidate> edge;
  for (const auto& c : candidates)
    if (bin_of(c.logit) == last) edge.push_back(c);
  std::sort(edge.begin(), edge.end(), before);
  size_t kept = 0;
  while (kept < edge.size() && (kept == 0 || reached < p * total))
    reached += exp_of(edge[kept++].logit);
  drop_if(candidates, [&](const Candidate& c) {
    int bin = bin_of(c.logit);
    return bin > last || (bin == last && before(edge[kept - 1], c));
  });
}

// The candidate with the largest logit plus noise. Noise is -log(-log u), so a candidate beats a
// score only if -log u < e^(logit - score), and so 1 - u less than that: most are told without a
// logarithm. Candidates are in order of their tokens, four of which share one call of Philox.
int32_t best_with_noise(const rl_sampling& row, int32_t best, const std::vector<Candidate>& from) {
  uint32_t block = static_cast<uint32_t>(best) / 4;
  Words words = philox(block, row);
  double most = -INFINITY;
  int32_t token = -1;
  auto consider = [&](const Candidate& c) {
    uint32_t id = static_cast<uint32_t>(c.token);
    if (id / 4 != block) words = philox(block = id / 4, row);
    double u = uniform(words.of[id % 4]);
    if (token >= 0 && 1 - u > 1.001 * exp_of(c.logit - static_cast<float>(most))) return;
    double score = c.logit + gumbel(u);
    if (score > most || (score == most && c.token < token)) {
      most = score;
      token = c.token;
    }
  };
  for (const auto& c : from)  // the likeliest first: what follows has to beat it
    if (c.token == best) consider(c);
  for (const auto& c : from) consider(c);
  return token;
}

int32_t draw(const rl_sampling& row, int32_t vocab) {
  Allowed allowed(row);
  int32_t best = best_token(row, vocab, allowed);
  if (best < 0 && allowed.bars()) {
    allowed.stop_barring();
    best = best_token(row, vocab, allowed);
  }
  if (best < 0 || row.temperature == 0) return best;
  if (row.logits[best] == INFINITY) return best;

  const float least_share = row.min_p > 0 ? std::log(row.min_p) : -INFINITY;
  // Top-p looks at all probabilities. Otherwise what the noise cannot lift above the best token's
  // score need not be looked at.
  float least = -INFINITY;
  if (row.top_p >= 1) {
    uint32_t id = static_cast<uint32_t>(best);
    double score = gumbel(uniform(philox(id / 4, row).of[id % 4]));
    least = std::max(static_cast<float>(score - kMostNoise), least_share);
  }
  auto candidates = candidates_of(row, vocab, best, least, allowed);
  bool reorders = row.top_k > 0 && static_cast<size_t>(row.top_k) < candidates.size();
  keep_top_k(candidates, row.top_k);
  keep_top_p(candidates, row.top_p);
  drop_if(candidates, [&](const Candidate& c) { return c.logit < least_share; });
  if (reorders)
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  return best_with_noise(row, best, candidates);
}

}  // namespace
}  // namespace rl

extern "C" int32_t rl_sample(rl_pool* pool, const rl_sampling* rows, int32_t num_rows,
                             int32_t vocab_size, int32_t* tokens) try {
  auto& threads = *reinterpret_cast<rl::Pool*>(pool);
  rl::run_part(threads, RL_PART_SAMPLE, [&] {
    threads.run(num_rows, [&](int64_t i, int) { tokens[i] = rl::draw(rows[i], vocab_size); });
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
