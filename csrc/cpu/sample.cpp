// From a row of logits to a token, in the order of ridgeline.decoding.sampling: mask, minimum
// length, temperature, top-k, top-p, min-p, and the draw by Gumbel-max with counter-based noise
// (noise.h).
#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <numeric>
#include <vector>

#include "elementwise.h"
#include "noise.h"
#include "sample.h"

namespace rl {
namespace {

struct Candidate {
  int32_t token;
  float logit;  // (logit - largest) / temperature, so at most 0
};

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

// A row's logits, and the largest of each run of them, by which most runs are passed over.
struct Logits {
  const float* row;
  const float* maxima;
  int32_t vocab;

  int32_t num_runs() const { return num_runs_of(vocab); }
  int32_t end_of_run(int32_t run) const { return std::min(vocab, (run + 1) * kRunTokens); }
};

// Logits less the largest, by temperature.
struct Relative {
  float largest, inverse;

  // The largest is 0 even where a temperature next to zero has an infinite inverse.
  float operator()(float logit) const {
    return logit == largest ? 0.0f : (logit - largest) * inverse;
  }
  vf operator()(vf logits) const {
    return select((vi)(logits == largest), vf{}, (logits - largest) * inverse);
  }
};

// The best allowed token, the first of equals; -1 if there is none, or what is not a number.
int32_t best_token(const Logits& logits, const Allowed& allowed) {
  bool free = allowed.everything();
  int32_t best = -1;
  float most = -INFINITY;
  for (int32_t run = 0; run < logits.num_runs(); ++run) {
    if (logits.maxima[run] <= most) continue;
    for (int32_t v = run * kRunTokens; v < logits.end_of_run(run); ++v) {
      float logit = logits.row[v];
      if (logit != logit && (free || allowed(v))) return -1;
      if (logit > most && (free || allowed(v))) {
        most = logit;
        best = v;
      }
    }
  }
  return best;
}

// A number that at least k logits reach: the k-th largest maximum of 8 k parts or more.
float reached_by(const Logits& logits, int32_t k) {
  constexpr int32_t kPartsForEach = 8;
  const int32_t runs = logits.num_runs();
  if (k > runs / kPartsForEach) return -INFINITY;
  const int32_t runs_each = runs / (kPartsForEach * k);
  std::vector<float> largest;
  for (int32_t first = 0; first < runs; first += runs_each)
    largest.push_back(*std::max_element(logits.maxima + first,
                                        logits.maxima + std::min(first + runs_each, runs)));
  std::nth_element(largest.begin(), largest.begin() + k - 1, largest.end(), std::greater<float>());
  return largest[static_cast<size_t>(k - 1)];
}

// The sum of e^logit over a whole row, and a relative logit from which on they sum up to more than p of that.
struct Nucleus {
  double total;
  float least;
};
Nucleus nucleus_of(const Logits& logits, const Relative& relative, double p) {
  constexpr float kFrom[] = {-INFINITY, -12, -8, -4, -2};
  constexpr int kSteps = 5;
  constexpr int32_t kTokensAtOnce = 1024;  // whose sums are floats
  constexpr double kRounding = 1e-5;
  double mass[kSteps] = {};
  for (int32_t first = 0; first < logits.vocab; first += kTokensAtOnce) {
    vf sums[kSteps] = {};
    over(std::min(kTokensAtOnce, logits.vocab - first), [&](int v, int count) {
      vf logit = relative(load_some(logits.row + first + v, count));
      for (int lane = count; lane < W; ++lane) logit[lane] = -INFINITY;
      const vf weights = exp(logit);
      for (int i = 0; i < kSteps; ++i) sums[i] += select((vi)(logit >= kFrom[i]), weights, vf{});
    });
    for (int i = 0; i < kSteps; ++i) mass[i] += sum(sums[i]);
  }
  int step = kSteps - 1;
  while (step > 0 && mass[step] < (p + kRounding) * mass[0]) --step;
  return {mass[0], kFrom[step]};
}

// What a row may still draw: its relative logits from `least` on.
std::vector<Candidate> candidates_of(const Logits& logits, const Relative& relative, float least,
                                     const Allowed& allowed) {
  const bool free = allowed.everything();
  std::vector<Candidate> candidates;
  for (int32_t run = 0; run < logits.num_runs(); ++run) {
    if (relative(logits.maxima[run]) < least) continue;
    for (int32_t v = run * kRunTokens; v < logits.end_of_run(run); ++v) {
      float logit = relative(logits.row[v]);
      if (logit >= least && logit > -INFINITY && (free || allowed(v))) candidates.push_back({v, logit});
    }
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
// near it are sorted. `total` is the mass of all that there were, or 0 if that is the candidates'.
void keep_top_p(std::vector<Candidate>& candidates, double p, double total) {
  if (p >= 1 || candidates.empty()) return;
  constexpr int kBins = 1024;
  constexpr float kBinWidth = 1.0f / 32;  // the last bin holds everything below -32
  auto bin_of = [](float logit) {
    float bin = -logit / kBinWidth;
    return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;
  };
  std::vector<double> mass(kBins);
  for (size_t i = 0; i < candidates.size(); i += W) {
    int count = static_cast<int>(std::min<size_t>(W, candidates.size() - i));
    vf logits = splat(-INFINITY);
    for (int lane = 0; lane < count; ++lane) logits[lane] = candidates[i + lane].logit;
    vf weights = exp(logits);
    for (int lane = 0; lane < count; ++lane) mass[bin_of(logits[lane])] += weights[lane];
  }
  if (total == 0) total = std::accumulate(mass.begin(), mass.end(), 0.0);
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

// Finds the candidate with the largest logit plus noise, the best first: the others have to beat it. Noise is
// -log(-log u), so a candidate beats a score only if -log u < e^(logit - score), and so 1 - u less than
// that: most are told without a logarithm. Of candidates in order four share one call of Philox.
class Contest {
 public:
  Contest(const rl_sampling& row, int32_t best)
      : row_(row),
        block_(static_cast<uint32_t>(best) / 4),
        words_(philox(block_, row)),
        most_(gumbel(uniform(words_.of[best % 4]))),
        token_(best) {}

  bool may_win(float logit, double u) const {
    return !(1 - u > 1.001 * exp_of(logit - static_cast<float>(most_)));
  }
  void consider(const Candidate& c) {
    const uint32_t id = static_cast<uint32_t>(c.token);
    if (id / 4 != block_) words_ = philox(block_ = id / 4, row_);
    const double u = uniform(words_.of[id % 4]);
    if (!may_win(c.logit, u)) return;
    const double score = c.logit + gumbel(u);
    if (score > most_ || (score == most_ && c.token < token_)) {
      most_ = score;
      token_ = c.token;
    }
  }
  int32_t winner() const { return token_; }

 private:
  const rl_sampling& row_;
  uint32_t block_;
  Words<uint32_t> words_;
  double most_;
  int32_t token_;
};

// A draw among all allowed tokens with logits from `least` on. Of those whose noise one call makes, none is
// looked at if the largest logit with the largest noise of them does not win.
int32_t draw_of_all(const rl_sampling& row, const Logits& logits, const Relative& relative, int32_t best,
                    float least, const Allowed& allowed) {
  const bool free = allowed.everything();
  Contest contest(row, best);
  constexpr int32_t kRuns = kNoiseTokens / kRunTokens;
  for (int32_t run = 0; run < logits.num_runs(); run += kRuns) {
    const int32_t last = std::min(run + kRuns, logits.num_runs()), first = run * kRunTokens;
    const float largest = relative(largest_of_run(logits.maxima + run, last - run));
    if (largest < least || !contest.may_win(largest, kMostUniform) ||
        !contest.may_win(largest, most_uniform(first, row)))
      continue;
    for (int32_t v = first; v < logits.end_of_run(last - 1); ++v) {
      const float logit = relative(logits.row[v]);
      if (logit >= least && logit > -INFINITY && (free || allowed(v))) contest.consider({v, logit});
    }
  }
  return contest.winner();
}

int32_t draw(const rl_sampling& row, const Logits& logits) {
  Allowed allowed(row);
  int32_t best = best_token(logits, allowed);
  if (best < 0 && allowed.bars()) {
    allowed.stop_barring();
    best = best_token(logits, allowed);
  }
  if (best < 0 || row.temperature == 0) return best;
  if (logits.row[best] == INFINITY) return best;

  const float least_share = row.min_p > 0 ? std::log(row.min_p) : -INFINITY;
  const Relative relative{logits.row[best], 1.0f / row.temperature};
  const bool free = allowed.everything(), of_all = row.top_k <= 0 || row.top_k >= logits.vocab;
  if (of_all && row.top_p >= 1) return draw_of_all(row, logits, relative, best, least_share, allowed);

  Nucleus nucleus{0, -INFINITY};
  if (free && of_all) nucleus = nucleus_of(logits, relative, row.top_p);
  if (free && !of_all) nucleus.least = relative(reached_by(logits, row.top_k));
  auto candidates = candidates_of(logits, relative, nucleus.least, allowed);
  bool reorders = row.top_k > 0 && static_cast<size_t>(row.top_k) < candidates.size();
  keep_top_k(candidates, row.top_k);
  keep_top_p(candidates, row.top_p, nucleus.total);
  drop_if(candidates, [&](const Candidate& c) { return c.logit < least_share; });
  if (reorders)
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  Contest contest(row, best);
  for (const Candidate& c : candidates) contest.consider(c);
  return contest.winner();
}

}  // namespace

void draw_tokens(Pool& pool, const rl_sampling* rows, int32_t num_rows, int32_t vocab_size,
                 const float* maxima, int32_t* tokens) {
  const int32_t runs = num_runs_of(vocab_size);
  auto draw_row = [&](int64_t i, int) {
    const float* logits = rows[i].logits;
    if (maxima) {
      tokens[i] = draw(rows[i], {logits, maxima + i * runs, vocab_size});
      return;
    }
    std::vector<float> own(static_cast<size_t>(runs));
    for (int32_t run = 0; run < runs; ++run) {
      const int32_t first = run * kRunTokens;
      own[static_cast<size_t>(run)] =
          largest_of_run(logits + first, std::min(kRunTokens, vocab_size - first));
    }
    tokens[i] = draw(rows[i], {logits, own.data(), vocab_size});
  };
  run_part(pool, RL_PART_SAMPLE, [&] { pool.run(num_rows, draw_row); });
}

}  // namespace rl

extern "C" int32_t rl_sample(rl_pool* pool, const rl_sampling* rows, int32_t num_rows,
                             int32_t vocab_size, int32_t* tokens) try {
  rl::draw_tokens(*reinterpret_cast<rl::Pool*>(pool), rows, num_rows, vocab_size, nullptr, tokens);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
