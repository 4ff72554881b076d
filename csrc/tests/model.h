// A small model with every op, of widths that no vector divides.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "cache.h"
#include "matrices.h"

namespace rl_test {

class Model {
 public:
  static constexpr int kHidden = 70, kHeads = 6, kKVHeads = 2, kHeadDim = 20, kFeedForward = 90;
  static constexpr int kVocab = 45, kExperts = 4, kExpertWidth = 33, kRank = 5, kLayerInput = 11;
  static constexpr int kStreams = 3;
  static constexpr int kLatent = 24, kNope = 12, kRope = 8;
  static constexpr int kQuerySlot = 1, kDownSlot = 2;
  static constexpr int kChannels = 40, kConvLength = 4, kStateOffset = 3;
  static constexpr rl_gated_delta kDelta{2, 4, 6, 10, 3};
  static constexpr int kMixed = 2 * 2 * 6 + 4 * 10;  // channels of its convolution
  static constexpr int kDeltaOffset = kStateOffset + kChannels * (kConvLength - 1);
  static constexpr rl_selective_scan kScan{4, 10, 2, 9, 3};
  static constexpr int kScanned = 4 * 10 + 2 * 2 * 9;  // channels of its convolution
  static constexpr int kScanOffset = kDeltaOffset + 2 * kMixed + 4 * 6 * 10;
  static constexpr int kState = kScanOffset + 2 * kScanned + 4 * 9 * 10;  // elements

  // Weights of one format, packed by `level`; any level reads them. Minimums has every other matrix.
  Model(const Level& level, const Format& format) : level_(level), format_(format) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // The ops, for a level that may be another. `lengthwise` if cos and sin of the second rotary
  // table come from the caller.
  rl_program* program(const Level& level, bool lengthwise);

  // What each op is called, and how many products lie between its input and its output.
  struct Op {
    std::string name;
    int products;
  };
  const std::vector<Op>& ops() const { return ops_; }
  const std::vector<rl_adapter_part>& adapter() const { return adapter_; }

  static const int32_t* widths();

 private:
  void add(const std::string& name, int products) { ops_.push_back({name, products}); }
  void add_attention(const Level& level, rl_program* program);
  void add_gated_delta(const Level& level, rl_program* program);
  void add_selective_scan(const Level& level, rl_program* program);
  void add_short_conv(const Level& level, rl_program* program);
  void add_latent_attention(const Level& level, rl_program* program);
  void add_feed_forward(const Level& level, rl_program* program);
  void add_layer_inputs(const Level& level, rl_program* program);
  void add_xielu(const Level& level, rl_program* program);
  void add_streams(const Level& level, rl_program* program);
  void add_experts(const Level& level, rl_program* program);

  // Each call makes the next weight; they come in the same order for each program.
  rl_linear linear(int rows, int columns, bool bias = false, int slot = 0);
  const float* vector(int count, float mean = 0);

  const Level& level_;
  Format format_;
  std::vector<Op> ops_;
  std::vector<rl_adapter_part> adapter_;
  std::deque<Matrix> matrices_;
  std::deque<Floats> vectors_;
  size_t next_matrix_ = 0, next_vector_ = 0;
};

}  // namespace rl_test
