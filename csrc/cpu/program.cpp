#include "program.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "elementwise.h"
#include "matmul.h"
#include "ops.h"
#include "sample.h"
#include "streams.h"

using namespace rl;

struct rl_program {
  int32_t widths[RL_NUM_BUFFERS];
  std::vector<std::unique_ptr<Op>> ops;
  std::vector<RopeTable> ropes;
  rl_linear head{};
  float head_scale = 1, head_softcap = 0;
  Buffer storage[RL_NUM_BUFFERS];
  float* buffers[RL_NUM_BUFFERS] = {};
  Buffer panels, inner, up, spare, gathered, outputs, staged, partials, logits;
  int64_t experts_read = 0, state_inputs = 0;
  Group* group = nullptr;
  std::vector<int64_t> logit_parts;  // bytes before each rank's, if there are several

  int32_t vocab_size() const {
    return logit_parts.empty() ? head.matrix.rows
                               : static_cast<int32_t>(logit_parts.back() / sizeof(float));
  }

  // Appends the op that `make` returns: its index, or -1 if there is no memory.
  template <class Make>
  int32_t add(const Make& make) {
    try {
      ops.push_back(make());
      return static_cast<int32_t>(ops.size()) - 1;
    } catch (const std::bad_alloc&) {
      return -1;
    }
  }

  Context context(rl_pool* pool, const rl_batch* batch, const rl_kv_group* groups,
                  const rl_adapter* const* adapters) {
    return {*reinterpret_cast<Pool*>(pool), *batch, groups, adapters, buffers, widths, ropes,
            panels, inner, up, spare, gathered, outputs, staged, partials, experts_read, group,
            state_inputs};
  }

  void fill_rope_tables(const rl_batch& batch, const float* const* cos_sin) {
    for (size_t i = 0; i < ropes.size(); ++i) {
      RopeTable& rope = ropes[i];
      int64_t count = static_cast<int64_t>(batch.num_tokens) * rope.half;
      if (rope.frequencies.empty()) {
        rope.cos = cos_sin[i];
        rope.sin = cos_sin[i] + count;
        continue;
      }
      float* cos = rope.values.get<float>(2 * count);
      float* sin = cos + count;
      for (int64_t t = 0; t < batch.num_tokens; ++t) {
        for (int k = 0; k < rope.half; ++k) {
          float angle = static_cast<float>(batch.positions[t]) * rope.frequencies[k];
          cos[t * rope.half + k] = std::cos(angle) * rope.factor;
          sin[t * rope.half + k] = std::sin(angle) * rope.factor;
        }
      }
      rope.cos = cos;
      rope.sin = sin;
    }
  }

  // logits[num_rows, V] of rows of buffer h, and the largest of each run of them unless that is null.
  void run_head(Context& c, const int32_t* rows, int32_t num_rows, float* logits,
                float* maxima) const {
    int32_t width = head.matrix.columns, vocab = vocab_size();
    if (width > 0) {  // a rank may have none of it, and gathers the others' logits
      float* dense = c.gathered.get<float>(static_cast<int64_t>(num_rows) * width);
      for (int32_t i = 0; i < num_rows; ++i)
        std::copy_n(c.row(RL_H, rows[i]), width, dense + static_cast<int64_t>(i) * width);
      const LogitsOutput output{head_scale, head_softcap, maxima};
      Target target{&head, logits, vocab, &output};
      apply(c, {dense, width, num_rows, width}, &target, 1, false);
    }
    if (logit_parts.empty()) return;
    auto* bytes = reinterpret_cast<uint8_t*>(logits);
    Parts parts{bytes, logit_parts.back(), bytes, logit_parts.back(), logit_parts.data(), num_rows};
    if (!group->gather(c.pool, parts)) throw std::bad_alloc();
  }
};

namespace {

template <class T>
std::unique_ptr<Op> boxed(T op) {
  return std::make_unique<T>(std::move(op));
}

// Elements before each rank's part, as bytes.
std::vector<int64_t> bytes_before(const int32_t* first, int num_ranks) {
  std::vector<int64_t> bytes(first, first + num_ranks + 1);
  for (int64_t& each : bytes) each *= sizeof(float);
  return bytes;
}

rl_linear linear_or_none(const rl_linear* linear) { return linear ? *linear : rl_linear{}; }

}  // namespace

extern "C" {

int32_t rl_abi_version(void) { return RL_ABI_VERSION; }

const char* rl_isa_name(void) {
#if defined(__AMX_TILE__)
  return "avx512amx";
#elif defined(__AVX512BF16__)
  return "avx512bf16";
#elif defined(__AVX512VNNI__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avxvnni";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "neondot";
#else
  return "generic";
#endif
}

rl_pool* rl_pool_new(int32_t num_threads) try {
  return reinterpret_cast<rl_pool*>(new Pool(num_threads));
} catch (const std::exception&) {
  return nullptr;
}

void rl_pool_free(rl_pool* pool) { delete reinterpret_cast<Pool*>(pool); }

rl_program* rl_program_new(const int32_t* widths) try {
  auto* program = new rl_program;
  std::copy_n(widths, RL_NUM_BUFFERS, program->widths);
  return program;
} catch (const std::bad_alloc&) {
  return nullptr;
}

void rl_program_free(rl_program* program) { delete program; }

int32_t rl_add_embed(rl_program* p, const rl_matrix* table, int32_t first_token, float scale,
                     const float* position_table, const float* type_table) {
  Embed op;
  op.table = *table, op.first_token = first_token, op.scale = scale;
  op.positions = position_table, op.types = type_table;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_norm(rl_program* p, int32_t source, int32_t target, const rl_norm* norm,
                    const float* weight, const float* bias, int32_t width) {
  Norm op;
  op.source = source, op.target = target, op.norm = *norm;
  op.weight = weight, op.bias = bias, op.width = width;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_qkv(rl_program* p, int32_t source, const rl_linear* query, const rl_linear* key,
                   const rl_linear* value, float clip) {
  return p->add([&] {
    Project op;
    op.source = source, op.clip = clip;
    op.linears = {*query, *key, *value};
    op.targets = {RL_QUERY, RL_KEY, RL_VALUE};
    return boxed(std::move(op));
  });
}

int32_t rl_add_head_norm(rl_program* p, const rl_norm* norm, int32_t scope,
                         const float* query_weight, const float* key_weight,
                         const float* query_bias, const float* key_bias, int32_t num_heads,
                         int32_t num_kv_heads, int32_t head_dim, int32_t values) {
  HeadNorm op;
  op.norm = *norm, op.scope = scope, op.query_weight = query_weight, op.key_weight = key_weight;
  op.query_bias = query_bias, op.key_bias = key_bias, op.values = values != 0;
  op.num_heads = num_heads, op.num_kv_heads = num_kv_heads, op.head_dim = head_dim;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_rope(rl_program* p, int32_t table, int32_t interleaved, int32_t num_heads,
                    int32_t num_kv_heads, int32_t query_dim, int32_t key_dim, int32_t query_start,
                    int32_t key_start) {
  Rope op;
  op.table = table, op.interleaved = interleaved != 0;
  op.num_heads = num_heads, op.num_kv_heads = num_kv_heads;
  op.query_dim = query_dim, op.key_dim = key_dim;
  op.query_start = query_start, op.key_start = key_start;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_kv_write(rl_program* p, int32_t group, int32_t layer) {
  KVWrite op;
  op.group = group, op.layer = layer;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_grow_queries(rl_program* p, float rate, int32_t length, int32_t offset,
                            int32_t width) {
  GrowQueries op;
  op.rate = rate, op.length = length, op.offset = offset, op.width = width;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_attend(rl_program* p, int32_t group, int32_t layer, const rl_attention* attention) {
  Attend op;
  op.group = group, op.layer = layer, op.attention = *attention;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_bidirectional_attend(rl_program* p, int32_t num_kv_heads,
                                    const rl_attention* attention) {
  return p->add([&] { return make_bidirectional_attend(num_kv_heads, *attention); });
}

int32_t rl_add_short_conv(rl_program* p, int64_t offset, int32_t channels, int32_t length,
                          const float* weight, const float* bias) {
  return p->add([&] { return make_short_conv(offset, p->state_inputs, channels, length, weight, bias); });
}

int32_t rl_add_delta_project(rl_program* p, int32_t source, const rl_linear* query,
                             const rl_linear* key, const rl_linear* value, const rl_linear* gate,
                             const rl_linear* beta, const rl_linear* decay) {
  return p->add([&] {
    Project op;
    int32_t keys = query->matrix.rows;
    op.source = source, op.clip = 0;
    op.linears = {*query, *key, *value, *gate, *beta, *decay};
    op.targets = {RL_QUERY, RL_QUERY, RL_QUERY, RL_KEY, RL_VALUE, RL_VALUE};
    op.offsets = {0, keys, 2 * keys, 0, 0, beta->matrix.rows};
    return boxed(std::move(op));
  });
}

int32_t rl_add_gated_delta(rl_program* p, int64_t offset, const rl_gated_delta* shape,
                           const float* conv, const float* decay_log, const float* decay_bias,
                           const float* gain, const rl_norm* norm) {
  return p->add([&] {
    return make_gated_delta(offset, p->state_inputs, *shape, conv, decay_log, decay_bias, gain,
                            *norm);
  });
}

int32_t rl_add_selective_scan(rl_program* p, int64_t offset, const rl_selective_scan* shape,
                              const float* conv, const float* conv_bias, const float* decay_log,
                              const float* step_bias, const float* skip, const float* gain,
                              const rl_norm* norm) {
  return p->add([&] {
    return make_selective_scan(offset, p->state_inputs, *shape, conv, conv_bias, decay_log,
                               step_bias, skip, gain, *norm);
  });
}

int32_t rl_add_gate_heads(rl_program* p, int32_t source, const rl_linear* linear) {
  GateHeads op;
  op.source = source, op.linear = *linear;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_out_project(rl_program* p, const rl_linear* linear) {
  OutProject op;
  op.linear = *linear;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_mlp(rl_program* p, int32_t source, int32_t target, const rl_linear* gate,
                   const rl_linear* up, const rl_linear* down, const rl_activation* activation,
                   const float* output_gate) {
  MLP op;
  op.source = source, op.target = target, op.output_gate = {output_gate};
  op.network = {linear_or_none(gate), *up, *down, *activation};
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_gate_up(rl_program* p, int32_t source, const rl_linear* gate, const rl_linear* up,
                       const rl_activation* activation) {
  GateUp op;
  op.source = source, op.network = {linear_or_none(gate), *up, {}, *activation};
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_xielu(rl_program* p, const rl_xielu* function, int32_t width) {
  Xielu op;
  op.function = *function, op.width = width;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_down(rl_program* p, int32_t target, const rl_linear* down, int32_t source,
                    const float* output_gate) {
  Down op;
  op.target = target, op.linear = *down, op.source = source, op.output_gate = {output_gate};
  return p->add([&] { return boxed(op); });
}

void rl_set_group(rl_program* p, rl_group* group) { p->group = reinterpret_cast<Group*>(group); }

int32_t rl_add_gather(rl_program* p, int32_t buffer, const int32_t* first, int32_t dense) {
  return p->add([&] {
    Gather op;
    op.buffer = buffer, op.dense = dense != 0;
    op.first = bytes_before(first, p->group->num_ranks());
    return boxed(std::move(op));
  });
}

int32_t rl_add_gather_tokens(rl_program* p, const int32_t* first, int32_t width) {
  return p->add([&] {
    GatherTokens op;
    op.first.assign(first, first + p->group->num_ranks()), op.width = width;
    return boxed(std::move(op));
  });
}

int32_t rl_add_gather_ranges(rl_program* p, int32_t buffer, int32_t width) {
  return p->add([&] {
    GatherRanges op;
    op.buffer = buffer, op.width = width;
    return boxed(op);
  });
}

void rl_set_gather_logits(rl_program* p, const int32_t* first) {
  p->logit_parts = bytes_before(first, p->group->num_ranks());
}

int32_t rl_add_moe(rl_program* p, int32_t source, int32_t router_source, const rl_routing* routing,
                   const rl_linear* router, const float* correction, const float* expert_scale,
                   const rl_linear* gate, const rl_linear* up, const rl_linear* down,
                   const rl_activation* activation, const int32_t* first) {
  return p->add([&] {
    std::vector<int32_t> borders{0, routing->num_experts};
    if (first) borders.assign(first, first + p->group->num_ranks() + 1);
    return make_moe(source, router_source, *routing, *router, correction, expert_scale, gate, up,
                    down, *activation, borders, first ? p->group->rank() : 0);
  });
}

int32_t rl_add_add_shared(rl_program* p) {
  Add op;
  op.source = RL_SHARED, op.target = RL_H, op.scale = 1, op.width = p->widths[RL_SHARED];
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_residual(rl_program* p, float scale) {
  Add op;
  op.source = RL_H, op.target = RL_X, op.scale = scale, op.width = p->widths[RL_X];
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_layer_embed(rl_program* p, const rl_matrix* table, const rl_linear* projection,
                           const float* gain, const rl_norm* norm, int32_t width) {
  LayerEmbed op;
  op.table = *table, op.projection = *projection, op.gain = gain, op.norm = *norm, op.width = width;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_layer_input(rl_program* p, const rl_linear* gate, const rl_linear* up,
                           const rl_activation* activation, int32_t first) {
  LayerInput op;
  op.gate = *gate, op.up = *up, op.activation = *activation, op.first = first;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_split_streams(rl_program* p, const rl_linear* const* linears, int32_t count) {
  return p->add([&] {
    SplitStreams op;
    for (int32_t k = 0; k < count; ++k) op.linears.push_back(*linears[k]);
    return boxed(std::move(op));
  });
}

int32_t rl_add_join_streams(rl_program* p, const rl_linear* const* linears, int32_t count) {
  return p->add([&] {
    JoinStreams op;
    for (int32_t k = 0; k < count; ++k) op.linears.push_back(*linears[k]);
    return boxed(std::move(op));
  });
}

int32_t rl_add_add_to_streams(rl_program* p, int32_t num_streams) {
  AddToStreams op;
  op.num_streams = num_streams;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_predict_streams(rl_program* p, const rl_linear* router, const float* gain,
                               const rl_norm* norm, const float* coefs) {
  PredictStreams op;
  int32_t count = router->matrix.rows;
  op.router = {*router, gain, coefs, *norm, count * count};
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_correct_streams(rl_program* p, const rl_linear* router, const float* gain,
                               const rl_norm* norm, const float* coefs, const float* scale) {
  CorrectStreams op;
  op.router = {*router, gain, coefs, *norm, router->matrix.rows}, op.scale = scale;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_add_laurel(rl_program* p) {
  return p->add([&] { return boxed(AddLaurel()); });
}

int32_t rl_add_sparse_gate_up(rl_program* p, int32_t source, const rl_linear* gate,
                              const rl_linear* up, const rl_activation* activation, float cutoff) {
  SparseGateUp op;
  op.source = source, op.gate = *gate, op.up = *up;
  op.activation = *activation, op.cutoff = cutoff;
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_scale_hidden(rl_program* p, const float* factor) {
  ScaleHidden op;
  op.factor = factor, op.width = p->widths[RL_X];
  return p->add([&] { return boxed(op); });
}

int32_t rl_add_latent_project(rl_program* p, int32_t source, const rl_linear* query_latent,
                              const float* query_norm, const rl_linear* query,
                              const rl_linear* latent, const float* latent_norm,
                              int32_t latent_dim, const rl_norm* norm) {
  return p->add([&] {
    return make_latent_project(source, query_latent, query_norm, *query, *latent, latent_norm,
                               latent_dim, *norm);
  });
}

int32_t rl_add_latent_attend(rl_program* p, int32_t group, int32_t layer,
                             const rl_attention* attention, const rl_linear* key_up,
                             const rl_linear* value_up, int32_t nope_dim, int32_t rope_dim) {
  return p->add([&] {
    return make_latent_attend(group, layer, *attention, key_up, value_up, nope_dim, rope_dim);
  });
}

void rl_set_head(rl_program* p, const rl_linear* head, float scale, float softcap) {
  p->head = *head, p->head_scale = scale, p->head_softcap = softcap;
}

int32_t rl_add_rope_table(rl_program* p, const float* frequencies, int32_t half,
                          float attention_factor) try {
  RopeTable table;
  if (frequencies) table.frequencies.assign(frequencies, frequencies + half);
  table.half = half, table.factor = attention_factor;
  p->ropes.push_back(std::move(table));
  return static_cast<int32_t>(p->ropes.size()) - 1;
} catch (const std::bad_alloc&) {
  return -1;
}

int32_t rl_reserve(rl_program* p, int32_t num_tokens) try {
  for (int i = 0; i < RL_NUM_BUFFERS; ++i)
    p->buffers[i] = p->storage[i].get<float>(static_cast<int64_t>(num_tokens) * p->widths[i]);
  return 0;
} catch (const std::bad_alloc&) {
  for (int i = 0; i < RL_NUM_BUFFERS; ++i) {
    p->storage[i] = {};
    p->buffers[i] = nullptr;
  }
  return -1;
}

float* rl_buffer(rl_program* p, int32_t buffer) { return p->buffers[buffer]; }

int64_t rl_state_inputs(const rl_program* p) { return p->state_inputs; }

int64_t rl_take_experts_read(rl_program* p) { return std::exchange(p->experts_read, 0); }

void rl_expert_tokens(const rl_program* p, int32_t op, int64_t* counts) {
  p->ops[static_cast<size_t>(op)]->expert_tokens(counts);
}

int32_t rl_run(rl_program* p, rl_pool* pool, int32_t first, int32_t last, const rl_batch* batch,
               const rl_kv_group* groups, const float* const* cos_sin,
               const rl_adapter* const* adapters) try {
  if (first < 0 || last > static_cast<int64_t>(p->ops.size())) return -2;
  Context context = p->context(pool, batch, groups, adapters);
  run_part(context.pool, RL_PART_ROPE_TABLES, [&] { p->fill_rope_tables(*batch, cos_sin); });
  if (Recorder* recorder = context.pool.recorder())
    for (int32_t i = first; i < last; ++i) recorder->time(i, [&] { p->ops[i]->run(context); });
  else
    for (int32_t i = first; i < last; ++i) p->ops[i]->run(context);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

int32_t rl_head(rl_program* p, rl_pool* pool, const int32_t* rows, int32_t num_rows,
                float* logits) try {
  rl_batch none{};
  Context c = p->context(pool, &none, nullptr, nullptr);
  run_part(c.pool, RL_PART_HEAD, [&] { p->run_head(c, rows, num_rows, logits, nullptr); });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

int32_t rl_decode(rl_program* p, rl_pool* pool, const rl_batch* batch, const rl_kv_group* groups,
                  const rl_adapter* const* adapters, const rl_sampling* rows, int32_t num_steps,
                  const volatile int32_t* abort, int32_t* tokens) try {
  int32_t count = batch->num_sequences, vocab = p->vocab_size();
  // The largest logit of each run, unless some are another rank's.
  const int64_t runs = num_runs_of(vocab);
  float* logits = p->logits.get<float>(count * (vocab + runs));
  float* maxima = p->logit_parts.empty() ? logits + static_cast<int64_t>(count) * vocab : nullptr;
  std::vector<int32_t> token_ids(batch->token_ids, batch->token_ids + count);
  std::vector<int32_t> positions(batch->positions, batch->positions + count);
  std::vector<int32_t> hidden_rows(static_cast<size_t>(count));
  std::vector<rl_sequence> sequences(batch->sequences, batch->sequences + count);
  std::vector<rl_sampling> draws(rows, rows + count);
  for (int32_t s = 0; s < count; ++s) {
    hidden_rows[s] = s;
    draws[s].logits = logits + static_cast<int64_t>(s) * vocab;
  }
  rl_batch step{count, count, token_ids.data(), positions.data(), sequences.data(), nullptr};
  for (int32_t done = 0; done < num_steps;) {
    int32_t failed = rl_run(p, pool, 0, static_cast<int32_t>(p->ops.size()), &step, groups, nullptr,
                            adapters);
    if (failed) return -1;
    Context c = p->context(pool, &step, groups, adapters);
    run_part(c.pool, RL_PART_HEAD,
             [&] { p->run_head(c, hidden_rows.data(), count, logits, maxima); });
    int32_t* drawn = tokens + static_cast<int64_t>(done) * count;
    draw_tokens(c.pool, draws.data(), count, vocab, maxima, drawn);
    ++done;
    if (*abort || *std::min_element(drawn, drawn + count) < 0) return done;
    for (int32_t s = 0; s < count; ++s) {
      token_ids[s] = drawn[s];
      ++positions[s];
      ++sequences[s].start;
      sequences[s].lag = 0;
      ++draws[s].position;
    }
  }
  return num_steps;
} catch (const std::bad_alloc&) {
  return -1;
}

}  // extern "C"
