// Every op of a model: one after another from the same inputs, then all of them, then decoding.
#include <cmath>
#include <memory>

#include "checks.h"
#include "model.h"

namespace rl_test {
namespace {

constexpr int kSequences = 3;
constexpr int kRoom = 40;  // slots of each sequence
constexpr int kSteps = 12;
constexpr int kMostDrafts = 3;

// Errors of an op as a share of its largest output. Codes of activations inside an op flip where
// they lie between two; the BF16 level rounds activations to 8 bits before each product.
double bound_of(const Pair& pair, const Format& format, int products) {
  if (format.format == RL_BF16 && pair.tested.rounds_to_bfloat() && products)
    return 8e-3 * products;
  if (format.quantized() && products > 1) return 3e-2;
  return 4e-6;
}

// A model on one level, with its caches.
class Side {
 public:
  Side(const Level& level, rl_pool* pool, Model& model, int kv_format, bool lengthwise)
      : level_(level),
        pool_(pool),
        program_(model.program(level, lengthwise)),
        heads_(level, {kv_format, Model::kKVHeads, Model::kHeadDim, Model::kHeadDim}, lengths()),
        latents_(level, {kv_format, 1, Model::kLatent + Model::kRope, 0}, lengths()),
        groups_{heads_.group(), latents_.group()},
        parts_(model.adapter()),
        adapter_{static_cast<int32_t>(parts_.size()), parts_.data()},
        adapters_{nullptr, &adapter_, nullptr},
        states_(2 * kSequences * Model::kState, std::nanf("")),
        drafted_(kSequences * kMostDrafts * level.rl_state_inputs(program_), std::nanf("")) {}
  ~Side() { level_.rl_program_free(program_); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  std::vector<const Cache*> caches() const { return {&heads_, &latents_}; }
  Cache& heads() { return heads_; }
  Cache& latents() { return latents_; }
  // Of each sequence, that which runs and one that was saved.
  Floats& states() { return states_; }
  float* buffer(int index) const { return level_.rl_buffer(program_, index); }
  bool reserve(int tokens) { return level_.rl_reserve(program_, tokens) == 0; }

  // The batch's first sequence is number `first_sequence` of those that may have an adapter.
  bool run(int first, int last, const Batch& batch, const float* const* cos_sin,
           int first_sequence = 0) {
    States own(*this, batch);
    return level_.rl_run(program_, pool_, first, last, &own.batch, groups_, cos_sin,
                         adapters_ + first_sequence) == 0;
  }
  Floats head(const std::vector<int32_t>& rows) {
    Floats logits(rows.size() * Model::kVocab);
    level_.rl_head(program_, pool_, rows.data(), static_cast<int32_t>(rows.size()), logits.data());
    return logits;
  }
  std::vector<int32_t> decode(const Batch& batch, const rl_sampling* rows) {
    std::vector<int32_t> tokens(kSteps * kSequences, -9);
    const volatile int32_t abort = 0;
    States own(*this, batch);
    int32_t done = level_.rl_decode(program_, pool_, &own.batch, groups_, adapters_, rows, kSteps,
                                    &abort, tokens.data());
    tokens.push_back(done);
    return tokens;
  }

 private:
  // A batch with this side's states; each is saved in the middle of the sequence's tokens, or of
  // the steps that decode them.
  struct States {
    States(Side& side, const Batch& parts) : batch(*parts.get()) {
      sequences.assign(batch.sequences, batch.sequences + batch.num_sequences);
      saves.resize(sequences.size());
      for (size_t i = 0; i < sequences.size(); ++i) {
        float* state = side.states_.data() + 2 * Model::kState * parts.parts()[i].sequence;
        int32_t steps = sequences[i].num_tokens > 1 ? sequences[i].num_tokens : kSteps;
        saves[i] = {sequences[i].start + steps / 2, state + Model::kState};
        sequences[i].state = state;
        sequences[i].saves = &saves[i];
        sequences[i].num_saves = 1;
        float* drafted = side.drafted_.data() + parts.parts()[i].sequence * kMostDrafts *
                                                    side.level_.rl_state_inputs(side.program_);
        sequences[i].lagging = drafted;
        sequences[i].drafted = sequences[i].num_drafts ? drafted : nullptr;
      }
      batch.sequences = sequences.data();
    }
    rl_batch batch;
    std::vector<rl_sequence> sequences;
    std::vector<rl_state_save> saves;
  };

  static std::vector<int> lengths() { return std::vector<int>(kSequences, kRoom); }

  const Level& level_;
  rl_pool* pool_;
  rl_program* program_;
  Cache heads_, latents_;
  rl_kv_group groups_[2];
  std::vector<rl_adapter_part> parts_;
  rl_adapter adapter_;
  const rl_adapter* adapters_[kSequences];
  Floats states_, drafted_;
};

const std::vector<Part> kPrompts = {{0, 0, 9}, {1, 0, 13}, {2, 0, 1}};
const std::vector<Part> kNext = {{2, 1, 6}, {0, 9, 1}, {1, 13, 3}};
// Of two sequences' drafts two and one stay, which their states take in with the next token.
const std::vector<Part> kDrafts = {{0, 10, 4, 3}, {1, 16, 3, 2}, {2, 7, 2}};
const std::vector<Part> kLast = {{0, 13, 1, 0, {}, 2}, {1, 18, 1, 0, {}, 1}, {2, 9, 1}};

class Comparison {
 public:
  Comparison(const Pair& pair, const Format& format, int kv_format, bool lengthwise, Report& report)
      : pair_(pair),
        format_(format),
        report_(report),
        lengthwise_(lengthwise),
        model_(pair.reference, format),
        reference_(pair.reference, pair.reference.alone, model_, kv_format, lengthwise),
        tested_(pair.tested, pair.tested.threads, model_, kv_format, lengthwise) {}

  // Each op begins with what the reference's buffers hold.
  void step_by_step(const std::vector<Part>& parts) {
    Batch batch(reference_.caches(), parts);
    Floats angles = normals(static_cast<size_t>(batch.num_tokens() * Model::kRope), 8);
    const float* cos_sin[] = {nullptr, angles.data()};
    const float* const* given = lengthwise_ ? cos_sin : nullptr;
    reserve(batch);
    for (size_t op = 0; op < model_.ops().size(); ++op) {
      const auto& [name, products] = model_.ops()[op];
      copy_buffers(batch);
      int index = static_cast<int>(op);
      report_.holds("ops", name + " runs",
                    reference_.run(index, index + 1, batch, given) &&
                        tested_.run(index, index + 1, batch, given));
      for (int b = 0; b < RL_NUM_BUFFERS; ++b)
        report_.close("ops, " + name_of(format_), name + ", buffer " + std::to_string(b),
                      tested_.buffer(b), reference_.buffer(b), buffer_size(batch, b),
                      bound_of(pair_, format_, products), pair_.same_sums());
      same_cache(name, reference_.heads(), tested_.heads());
      same_cache(name, reference_.latents(), tested_.latents());
      compare_states(name);
    }
    compare_heads(batch, bound_of(pair_, format_, 1));
  }

  // Each sequence has the same bits alone and beside the others.
  void batches() {
    int last = static_cast<int>(model_.ops().size());
    Batch batch(tested_.caches(), kPrompts);
    reserve(batch);
    report_.holds("batches of programs", "run", tested_.run(0, last, batch, nullptr));
    std::vector<int32_t> rows;
    for (const Part& part : kPrompts)
      rows.push_back((rows.empty() ? -1 : rows.back()) + part.num_tokens);
    Floats together = tested_.head(rows);
    for (size_t i = 0; i < kPrompts.size(); ++i) {
      const Part& part = kPrompts[i];
      Batch alone(tested_.caches(), {part});
      tested_.run(0, last, alone, nullptr, part.sequence);
      Floats logits = tested_.head({part.num_tokens - 1});
      report_.same_bytes("batches of programs", name_of(format_), logits.data(),
                         together.data() + i * Model::kVocab, Model::kVocab * sizeof(float));
    }
    report_.holds("batches of programs", "ops that there are not",
                  !tested_.run(0, last + 1, batch, nullptr) &&
                      !tested_.run(-1, last, batch, nullptr));
  }

  // Recording changes no bit, and its spans are those of the ops in order, each within another.
  void recorded() {
    const Level& level = pair_.tested;
    int last = static_cast<int>(model_.ops().size());
    Batch batch(tested_.caches(), kPrompts);
    auto logits = [&] {
      reserve(batch);
      tested_.run(0, last, batch, nullptr);
      return tested_.head({batch.num_tokens() - 1});
    };
    Floats plain = logits();
    report_.holds("recording", "memory", level.rl_record(level.threads, 1) == 0);
    Floats timed = logits();
    std::vector<rl_span> spans(static_cast<size_t>(level.rl_num_spans(level.threads)));
    level.rl_take_spans(level.threads, spans.data());
    report_.same_bytes("recording", name_of(format_), timed.data(), plain.data(),
                       plain.size() * sizeof(float));
    report_.holds("recording", "spans are taken once", level.rl_num_spans(level.threads) == 0);
    level.rl_record(level.threads, 0);
    logits();
    report_.holds("recording", "nothing after it", level.rl_num_spans(level.threads) == 0);

    std::vector<int32_t> ops, wanted = {RL_PART_ROPE_TABLES};
    for (int op = 0; op < last; ++op) wanted.push_back(op);
    wanted.push_back(RL_PART_HEAD);
    bool nested = true, whole = true;
    int64_t end = 0;
    int32_t tiles = 0;
    rl_span job{};
    std::vector<rl_span> jobs;
    auto is_within = [](const rl_span& inner, const rl_span& outer) {
      return outer.begin_ns <= inner.begin_ns && inner.end_ns <= outer.end_ns;
    };
    for (const rl_span& span : spans) {
      if (span.kind == RL_SPAN_SHARE) {
        nested &= is_within(span, job) && span.busy_ns <= span.end_ns - span.begin_ns + 1;
        tiles += span.num_tiles;
        continue;
      }
      whole &= tiles == job.num_tiles;
      tiles = 0, job = {};
      if (span.kind == RL_SPAN_JOB) {
        job = span;
        jobs.push_back(span);
        continue;
      }
      for (const rl_span& each : jobs) nested &= is_within(each, span);
      nested &= end <= span.begin_ns;
      end = span.end_ns;
      ops.push_back(span.op);
      jobs.clear();
    }
    report_.holds("recording", "ops in order", ops == wanted);
    report_.holds("recording", "spans within spans", nested);
    report_.holds("recording", "all tiles are somebody's", whole);
  }

  // All ops at once, and then decoding with nothing copied; rounding differences add up.
  void whole() {
    for (const std::vector<Part>& parts : {kPrompts, kNext, kDrafts}) {
      Batch batch(reference_.caches(), parts);
      reserve(batch);
      int last = static_cast<int>(model_.ops().size());
      reference_.run(0, last, batch, nullptr);
      tested_.run(0, last, batch, nullptr);
      compare_heads(batch, 2e-5);
    }
    std::vector<rl_sampling> draws(kSequences);
    for (size_t i = 0; i < draws.size(); ++i)
      draws[i] = {nullptr, nullptr, nullptr, 0, 0, i ? 0.8f : 0.0f, 1, 0, 0, 17 + i, 0, 3};
    Batch batch(reference_.caches(), kLast);
    reserve(batch);
    report_.holds("decoded tokens", name_of(format_),
                  reference_.decode(batch, draws.data()) == tested_.decode(batch, draws.data()));
  }

 private:
  static size_t buffer_size(const Batch& batch, int buffer) {
    return static_cast<size_t>(batch.num_tokens() * Model::widths()[buffer]);
  }

  void reserve(const Batch& batch) {
    report_.holds("ops", "memory",
                  reference_.reserve(batch.num_rows()) && tested_.reserve(batch.num_rows()));
    for (int b = 0; b < RL_NUM_BUFFERS; ++b)
      std::fill_n(reference_.buffer(b), buffer_size(batch, b), 0.5f);
    copy_buffers(batch);
  }

  void copy_buffers(const Batch& batch) {
    for (int b = 0; b < RL_NUM_BUFFERS; ++b)
      std::copy_n(reference_.buffer(b), buffer_size(batch, b), tested_.buffer(b));  // of none, too
  }

  void same_cache(const std::string& name, Cache& want, Cache& got) {
    report_.same_bytes("ops, KV cache", name, got.memory().data(), want.memory().data(),
                       want.memory().size());
  }

  void compare_states(const std::string& name) {
    std::vector<float> want, got;  // without what was not written yet
    for (size_t i = 0; i < reference_.states().size(); ++i) {
      float w = reference_.states()[i], g = tested_.states()[i];
      report_.holds("ops, states", name + " writes the same elements", (w == w) == (g == g));
      if (w == w) want.push_back(w), got.push_back(g);
    }
    report_.close("ops, states", name, got.data(), want.data(), want.size(), 4e-6,
                  pair_.same_sums());
    tested_.states() = reference_.states();
  }

  void compare_heads(const Batch& batch, double bound) {
    std::vector<int32_t> rows = {batch.num_tokens() - 1, 0};
    Floats want = reference_.head(rows), got = tested_.head(rows);
    report_.close("logits, " + name_of(format_), "head", got.data(), want.data(), want.size(),
                  bound, pair_.same_sums());
  }

  const Pair& pair_;
  Format format_;
  Report& report_;
  bool lengthwise_;
  Model model_;
  Side reference_, tested_;
};

}  // namespace

void check_programs(const Pair& pair, Report& report) {
  const Format formats[] = {{RL_F32, 0, false}, {RL_F16, 0, false}, {RL_BF16, 0, false},
                            {RL_Q4, 32, false}, {RL_Q5, 64, false}, {RL_Q6, 16, false},
                            {RL_Q8, 0, false},  {RL_Q4, 128, false, true},
                            {RL_Q2, 0, false},  {RL_Q3, 128, false, true},
                            {RL_Q4, 32, true}};
  const int kv_formats[] = {RL_F32, RL_F16, RL_BF16, RL_INT8, RL_FP8};
  int index = 0;
  for (const Format& format : formats) {
    Comparison comparison(pair, format, kv_formats[index++ % 5], true, report);
    for (const std::vector<Part>& parts : {kPrompts, kNext, kDrafts, kLast})
      comparison.step_by_step(parts);
    Comparison(pair, format, kv_formats[index % 5], false, report).batches();
  }
  Comparison(pair, formats[0], RL_F32, false, report).whole();
  Comparison(pair, formats[3], RL_INT8, false, report).recorded();
}

}  // namespace rl_test
