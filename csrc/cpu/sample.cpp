// From a row of logits to a token, in the order of ridgeline.decoding.sampling: mask, minimum
// length, temperature, top-k, top-p, min-p, and the draw by Gumbel-max with counter-based noise
// (Philox4x32-10, Salmon et al., SC'11; see ridgeline.core.philox for the counter).
#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "ridgeline_cpu.h"

namespace rl {
namespace {

struct Candidate {
  int32_t token;
  double logit;  // (logit - largest) / temperature, so at most 0
};

constexpr double kMostNoise = 16.64;  // -log(-log u) for the largest u, 1 - 2^-24

uint32_t philox_word(uint32_t token, const rl_sampling& row) {
  uint32_t c[4] = {token / 4, row.position, row.sample_index, 0};
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
  return c[token % 4];
}

double gumbel(uint32_t word) {
  double uniform = (static_cast<double>(word >> 9) + 0.5) * 0x1p-23;
  return -std::log(-std::log(uniform));
}

class Allowed {
 public:
  explicit Allowed(const rl_sampling& row)
      : row_(row), bars_(row.num_barred > 0 && row.position < row.barred_until) {}

  bool everything() const { return !row_.mask && !bars_; }
  bool bars() const { return bars_; }

  bool operator()(int32_t token) const {
    if (row_.mask && !(row_.mask[token / 32] >> token % 32 & 1)) return false;
    return !bars_ || std::find(row_.barred, row_.barred + row_.num_barred, token) ==
                         row_.barred + row_.num_barred;
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

bool before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Keeps the k best and what is equal to the k-th.
void keep_top_k(std::vector<Candidate>& candidates, int32_t k) {
  if (k <= 0 || static_cast<size_t>(k) >= candidates.size()) return;
  auto kth = candidates.begin() + k - 1;
  std::nth_element(candidates.begin(), kth, candidates.end(), before);
  double least = kth->logit;
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                  [&](const Candidate& c) { return c.logit < least; }),
                   candidates.end());
}

// Keeps the smallest set of best tokens whose probabilities reach p. Sorts no more than it keeps,
// to a factor of four.
void keep_top_p(std::vector<Candidate>& candidates, double p) {
  if (p >= 1) return;
  double total = 0, reached = 0;
  for (const auto& c : candidates) total += std::exp(c.logit);
  size_t kept = 0, sorted = 0, step = 64;
  while (kept < candidates.size() && reached < p * total) {
    if (kept == sorted) {
      sorted = std::min(candidates.size(), kept + step);
      std::partial_sort(candidates.begin() + static_cast<int64_t>(kept),
                        candidates.begin() + static_cast<int64_t>(sorted), candidates.end(),
                        before);
      step *= 4;
    }
    reached += std::exp(candidates[kept++].logit);
  }
  candidates.resize(std::max<size_t>(kept, 1));
}

int32_t draw(const rl_sampling& row, int32_t vocab) {
  Allowed allowed(row);
  int32_t best = best_token(row, vocab, allowed);
  if (best < 0 && allowed.bars()) {
    allowed.stop_barring();
    best = best_token(row, vocab, allowed);
  }
  if (best < 0 || row.temperature == 0) return best;

  const double largest = row.logits[best], temperature = row.temperature;
  const double least_share = row.min_p > 0 ? std::log(static_cast<double>(row.min_p)) : -INFINITY;
  // Top-p looks at all probabilities. Otherwise what the noise cannot lift above the best token's
  // score need not be looked at.
  double least = -INFINITY;
  if (row.top_p >= 1) {
    least = gumbel(philox_word(static_cast<uint32_t>(best), row)) - kMostNoise;
    least = std::max(least, least_share);
  }
  std::vector<Candidate> candidates;
  for (int32_t v = 0; v < vocab; ++v) {
    double logit = (row.logits[v] - largest) / temperature;
    if (logit >= least && logit > -INFINITY && allowed(v)) candidates.push_back({v, logit});
  }
  keep_top_k(candidates, row.top_k);
  keep_top_p(candidates, row.top_p);
  int32_t token = -1;
  double most = -INFINITY;
  for (const auto& c : candidates) {
    if (c.logit < least_share || c.logit + kMostNoise < most) continue;
    double score = c.logit + gumbel(philox_word(static_cast<uint32_t>(c.token), row));
    if (score > most || (score == most && c.token < token)) {
      most = score;
      token = c.token;
    }
  }
  return token;
}

}  // namespace
}  // namespace rl

extern "C" void rl_sample(rl_pool* pool, const rl_sampling* rows, int32_t num_rows,
                          int32_t vocab_size, int32_t* tokens) {
  reinterpret_cast<rl::Pool*>(pool)->run(
      num_rows, [&](int64_t i, int) { tokens[i] = rl::draw(rows[i], vocab_size); });
}
