#include "model.h"

#include <cmath>

namespace rl_test {
namespace {

constexpr rl_norm kRmsNorm = {RL_RMS_NORM, 0, 1e-6f};
constexpr rl_norm kOffsetNorm = {RL_RMS_NORM, 1, 1e-6f};
constexpr rl_norm kLayerNorm = {RL_LAYER_NORM, 0, 1e-5f};

}  // namespace

const int32_t* Model::widths() {
  static constexpr int32_t widths[RL_NUM_BUFFERS] = {kHidden,
                                                     kHeads * kHeadDim,
                                                     kHidden,
                                                     kHidden,
                                                     kHeads * kHeadDim,
                                                     kKVHeads * kHeadDim,
                                                     kKVHeads * kHeadDim,
                                                     kFeedForward,
                                                     2 * kLayerInput,
                                                     kStreams * kHidden};
  return widths;
}

rl_linear Model::linear(int rows, int columns, bool bias, int slot) {
  size_t index = next_matrix_++;
  Format format = format_;
  format.has_min &= index % 2;
  if (index == matrices_.size())
    matrices_.push_back(random_matrix(level_, format, rows, columns, index + 100,
                                      1 / std::sqrt(static_cast<float>(columns))));
  return {matrices_[index].description, bias ? vector(rows) : nullptr, slot};
}

const float* Model::vector(int count, float mean) {
  size_t index = next_vector_++;
  if (index == vectors_.size()) {
    vectors_.push_back(normals(static_cast<size_t>(count), index + 500, 0.3f));
    for (size_t i = 0; i < vectors_.back().size(); ++i) vectors_.back()[i] += mean;
  }
  return vectors_[index].data();
}

rl_program* Model::program(const Level& level, bool lengthwise) {
  next_matrix_ = next_vector_ = 0;
  ops_.clear();
  rl_program* program = level.rl_program_new(widths());
  float frequencies[kHeadDim / 2];
  for (int i = 0; i < kHeadDim / 2; ++i) frequencies[i] = std::pow(0.3f, static_cast<float>(i));
  level.rl_add_rope_table(program, frequencies, kHeadDim / 2, 1.1f);
  level.rl_add_rope_table(program, lengthwise ? nullptr : frequencies, kRope / 2, 1.0f);

  rl_linear table = linear(kVocab, kHidden);
  level.rl_add_embed(program, &table.matrix, 0, 1.5f, vector(64 * kHidden), vector(2 * kHidden));
  add("embed", 0);
  add_attention(level, program);
  add_feed_forward(level, program);
  add_experts(level, program);
  add_latent_attention(level, program);
  add_short_conv(level, program);
  add_gated_delta(level, program);
  add_selective_scan(level, program);
  add_layer_inputs(level, program);
  add_xielu(level, program);
  add_streams(level, program);
  level.rl_add_norm(program, RL_X, RL_H, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("final norm", 0);
  rl_linear head = linear(kVocab, kHidden, true);
  level.rl_set_head(program, &head, 0.7f, 8.0f);

  rl_linear down = linear(kRank, kHidden), up = linear(kHeads * kHeadDim, kRank);
  rl_linear down2 = linear(kRank, kFeedForward), up2 = linear(kHidden, kRank);
  adapter_ = {{kQuerySlot, down.matrix, up.matrix}, {kDownSlot, down2.matrix, up2.matrix}};
  return program;
}

void Model::add_attention(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_N, &kOffsetNorm, vector(kHidden), nullptr, kHidden);
  add("norm with an offset", 0);
  rl_linear query = linear(kHeads * kHeadDim, kHidden, true, kQuerySlot);
  rl_linear key = linear(kKVHeads * kHeadDim, kHidden, true);
  rl_linear value = linear(kKVHeads * kHeadDim, kHidden, false);
  level.rl_add_qkv(program, RL_N, &query, &key, &value, 3.0f);
  add("q, k and v", 1);
  const float *query_gain = vector(kHeads * kHeadDim, 1),
              *key_gain = vector(kKVHeads * kHeadDim, 1);
  for (int scope : {RL_HEAD, RL_EACH_HEAD, RL_PROJECTION}) {
    level.rl_add_head_norm(program, &kRmsNorm, scope, query_gain, key_gain, nullptr, nullptr,
                           kHeads, kKVHeads, kHeadDim, 0);
    add("norm of heads", 0);
  }
  level.rl_add_rope(program, 0, 0, kHeads, kKVHeads, kHeadDim, kHeadDim, 0, 0);
  add("rotary embedding", 0);
  level.rl_add_rope(program, 1, 1, kHeads, kKVHeads, kHeadDim, kHeadDim, 4, 8);
  add("interleaved rotary embedding", 0);
  level.rl_add_kv_write(program, 0, Cache::kLayer);
  add("KV write", 0);
  level.rl_add_grow_queries(program, 0.1f, 3, 1, kHeads * kHeadDim);
  add("growth of queries", 0);
  rl_attention attention{kHeads, kHeadDim, 0.3f, 30.0f, 7, vector(kHeads), 0, 0};
  for (int chunked : {0, 1}) {
    attention.chunked = chunked;
    level.rl_add_attend(program, 0, Cache::kLayer, &attention);
    add("attention", 0);
  }
  for (int window : {0, 5}) {
    rl_attention both_ways{kHeads, kHeadDim, 0.3f, 0, window, nullptr, 1, 0};
    level.rl_add_bidirectional_attend(program, kKVHeads, &both_ways);
    add("attention both ways", 0);
  }
  rl_linear out = linear(kHidden, kHeads * kHeadDim, true);
  level.rl_add_out_project(program, &out);
  add("output projection", 1);
  level.rl_add_residual(program, 0.5f);
  add("residual", 0);
}

void Model::add_feed_forward(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_N, &kLayerNorm, vector(kHidden, 1), vector(kHidden), kHidden);
  add("layer norm", 0);
  for (int kind : {RL_SILU, RL_GELU, RL_GELU_TANH, RL_RELU, RL_RELU_SQUARED, RL_CLAMPED_SWIGLU}) {
    rl_activation activation{kind, 1.702f, 2.0f};
    rl_linear gate = linear(kFeedForward, kHidden, true), up = linear(kFeedForward, kHidden, true);
    rl_linear down = linear(kHidden, kFeedForward, true, kDownSlot);
    level.rl_add_mlp(program, RL_N, RL_H, &gate, &up, &down, &activation, nullptr);
    add("gated feed-forward, activation " + std::to_string(kind), 2);
    if (kind == RL_CLAMPED_SWIGLU) break;  // only gated
    level.rl_add_mlp(program, RL_N, RL_H, nullptr, &up, &down, &activation, nullptr);
    add("feed-forward, activation " + std::to_string(kind), 2);
  }
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_experts(const Level& level, rl_program* program) {
  rl_activation activation{RL_SILU, 0, 0};
  rl_linear gate = linear(kFeedForward, kHidden), up = linear(kFeedForward, kHidden);
  rl_linear down = linear(kHidden, kFeedForward);
  level.rl_add_mlp(program, RL_N, RL_SHARED, &gate, &up, &down, &activation, vector(kHidden));
  add("shared expert", 2);
  std::vector<rl_linear> gates, ups, downs;
  for (int e = 0; e < kExperts; ++e) {
    gates.push_back(linear(kExpertWidth, kHidden, true));
    ups.push_back(linear(kExpertWidth, kHidden));
    downs.push_back(linear(kHidden, kExpertWidth));
  }
  rl_linear router = linear(kExperts, kHidden, true);
  const float* correction = vector(kExperts);
  const rl_routing routings[] = {{kExperts, 2, RL_SOFTMAX, 1, 1.0f, 0, 0, 0, 0},
                                 {kExperts, 1, RL_SIGMOID, 0, 2.5f, 2, 1, 1, 1}};
  level.rl_add_moe(program, RL_N, RL_X, &routings[0], &router, nullptr, correction, gates.data(),
                   ups.data(), downs.data(), &activation, nullptr);
  add("mixture of scaled experts, routed by another buffer", 3);
  for (const rl_routing& routing : routings) {
    level.rl_add_moe(program, RL_N, RL_N, &routing, &router,
                     routing.scoring == RL_SIGMOID ? correction : nullptr, nullptr, gates.data(),
                     ups.data(), downs.data(), &activation, nullptr);
    add("mixture of experts", 3);
  }
  level.rl_add_add_shared(program);
  add("sum with the shared expert", 0);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_layer_inputs(const Level& level, rl_program* program) {
  rl_linear table = linear(kVocab, 2 * kLayerInput), projection = linear(2 * kLayerInput, kHidden);
  level.rl_add_layer_embed(program, &table.matrix, &projection, vector(kLayerInput, 1), &kRmsNorm,
                           kLayerInput);
  add("embeddings of layers", 1);
  rl_activation activation{RL_GELU_TANH, 0, 0};
  rl_linear gate = linear(kLayerInput, kHidden), up = linear(kHidden, kLayerInput);
  level.rl_add_layer_input(program, &gate, &up, &activation, kLayerInput);
  add("input of a layer", 2);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
  level.rl_add_scale_hidden(program, vector(1, 0.9f));
  add("scale of a layer", 0);
}

void Model::add_xielu(const Level& level, rl_program* program) {
  const float *query = vector(kHeads * kHeadDim, 1), *key = vector(kKVHeads * kHeadDim, 1);
  level.rl_add_head_norm(program, &kLayerNorm, RL_EACH_HEAD, query, key,
                         vector(kHeads * kHeadDim), vector(kKVHeads * kHeadDim), kHeads, kKVHeads,
                         kHeadDim, 1);
  add("norm of heads with biases, and of values", 0);
  level.rl_add_norm(program, RL_X, RL_N, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("norm", 0);
  rl_activation none{RL_IDENTITY, 0, 0};
  rl_xielu xielu{0.7f, 1.2f, 0.5f, -1e-6f};
  rl_linear up = linear(kFeedForward, kHidden, true), down = linear(kHidden, kFeedForward);
  level.rl_add_gate_up(program, RL_N, nullptr, &up, &none);
  add("inside of a feed-forward", 1);
  level.rl_add_xielu(program, &xielu, kFeedForward);
  add("xIELU", 0);
  level.rl_add_down(program, RL_H, &down, RL_N, nullptr);
  add("end of a feed-forward", 1);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_streams(const Level& level, rl_program* program) {
  rl_linear split[kStreams - 1], join[kStreams - 1];
  const rl_linear *splits[kStreams - 1], *joins[kStreams - 1];
  for (int k = 0; k < kStreams - 1; ++k) {
    split[k] = linear(kHidden, kHidden), join[k] = linear(kHidden, kHidden);
    splits[k] = &split[k], joins[k] = &join[k];
  }
  level.rl_add_split_streams(program, splits, kStreams - 1);
  add("several streams of one", 1);
  rl_linear router = linear(kStreams, kHidden);
  const float* gain = vector(kHidden, static_cast<float>(kHidden));
  level.rl_add_predict_streams(program, &router, gain, &kRmsNorm,
                               vector(kStreams * kStreams * kStreams));
  add("prediction of streams", 1);
  rl_activation activation{RL_GELU_TANH, 0, 0};
  rl_linear gate = linear(kFeedForward, kHidden), up = linear(kFeedForward, kHidden);
  rl_linear down = linear(kHidden, kFeedForward);
  level.rl_add_sparse_gate_up(program, RL_X, &gate, &up, &activation, 0.5f);
  add("inside of a sparse feed-forward", 1);
  level.rl_add_down(program, RL_H, &down, RL_X, nullptr);
  add("end of a feed-forward", 1);
  level.rl_add_add_laurel(program);
  add("sum with the low-rank branch", 0);
  level.rl_add_correct_streams(program, &router, gain, &kRmsNorm, vector(kStreams * kStreams),
                               vector(kHidden, 1));
  add("correction of streams", 1);
  level.rl_add_add_to_streams(program, kStreams);
  add("sum of streams with a branch", 0);
  level.rl_add_join_streams(program, joins, kStreams - 1);
  add("one stream of several", 1);
}

void Model::add_latent_attention(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_N, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("norm", 0);
  rl_linear low = linear(30, kHidden), query = linear(kHeads * (kNope + kRope), 30);
  rl_linear latent = linear(kLatent + kRope, kHidden);
  level.rl_add_latent_project(program, RL_N, &low, vector(30, 1), &query, &latent,
                              vector(kLatent, 1), kLatent, &kRmsNorm);
  add("latents", 2);
  level.rl_add_rope(program, 1, 1, kHeads, 1, kNope + kRope, kLatent + kRope, kNope, kLatent);
  add("rotary embedding of latents", 0);
  level.rl_add_kv_write(program, 1, Cache::kLayer);
  add("write of latents", 0);
  rl_attention attention{kHeads, kLatent, 0.25f, 0, 0, nullptr, 0, 0};
  std::vector<rl_linear> key_up, value_up;
  for (int h = 0; h < kHeads; ++h) {
    key_up.push_back(linear(kLatent, kNope));
    value_up.push_back(linear(kHeadDim, kLatent));
  }
  level.rl_add_latent_attend(program, 1, Cache::kLayer, &attention, key_up.data(), value_up.data(),
                             kNope, kRope);
  add("attention over latents", 2);
  rl_linear out = linear(kHidden, kHeads * kHeadDim);
  level.rl_add_out_project(program, &out);
  add("output projection", 1);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_gated_delta(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_N, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("norm", 0);
  int keys = kDelta.num_key_heads * kDelta.key_dim;
  int values = kDelta.num_value_heads * kDelta.value_dim;
  rl_linear query = linear(keys, kHidden), key = linear(keys, kHidden);
  rl_linear value = linear(values, kHidden), gate = linear(values, kHidden);
  rl_linear beta = linear(kDelta.num_value_heads, kHidden);
  rl_linear decay = linear(kDelta.num_value_heads, kHidden);
  level.rl_add_delta_project(program, RL_N, &query, &key, &value, &gate, &beta, &decay);
  add("what the delta rule reads", 1);
  const float *conv = vector(kMixed * kDelta.conv_length), *log = vector(kDelta.num_value_heads);
  const float *bias = vector(kDelta.num_value_heads), *gain = vector(kDelta.value_dim, 1);
  level.rl_add_gated_delta(program, kDeltaOffset, &kDelta, conv, log, bias, gain, &kRmsNorm);
  add("gated delta rule", 0);
  rl_linear heads = linear(values, kHidden, true);
  level.rl_add_gate_heads(program, RL_N, &heads);
  add("gate of heads", 1);
  rl_linear out = linear(kHidden, values);
  level.rl_add_out_project(program, &out);
  add("output projection", 1);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_selective_scan(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_H, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("norm", 0);
  int width = kScan.num_heads * kScan.head_dim;
  rl_linear mixed = linear(kScanned, kHidden), gate = linear(width, kHidden);
  rl_linear step = linear(kScan.num_heads, kHidden, true);
  level.rl_add_qkv(program, RL_H, &mixed, &gate, &step, 0);
  add("what the state space reads", 1);
  const float *conv = vector(kScanned * kScan.conv_length), *conv_bias = vector(kScanned);
  const float *log = vector(kScan.num_heads), *bias = vector(kScan.num_heads);
  const float *skip = vector(kScan.num_heads), *gain = vector(width, 1);
  level.rl_add_selective_scan(program, kScanOffset, &kScan, conv, conv_bias, log, bias, skip, gain,
                              &kRmsNorm);
  add("selective scan", 0);
  rl_linear out = linear(kHidden, width);
  level.rl_add_out_project(program, &out);
  add("output projection", 1);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

void Model::add_short_conv(const Level& level, rl_program* program) {
  level.rl_add_norm(program, RL_X, RL_H, &kRmsNorm, vector(kHidden, 1), nullptr, kHidden);
  add("norm", 0);
  rl_linear in_gate = linear(kChannels, kHidden), out_gate = linear(kChannels, kHidden);
  rl_linear value = linear(kChannels, kHidden, true);
  level.rl_add_qkv(program, RL_H, &in_gate, &out_gate, &value, 0);
  add("gates and values", 1);
  const float *weight = vector(kChannels * kConvLength), *bias = vector(kChannels);
  level.rl_add_short_conv(program, kStateOffset, kChannels, kConvLength, weight, bias);
  add("short convolution", 0);
  rl_linear out = linear(kHidden, kChannels);
  level.rl_add_out_project(program, &out);
  add("output projection", 1);
  level.rl_add_residual(program, 1.0f);
  add("residual", 0);
}

}  // namespace rl_test
