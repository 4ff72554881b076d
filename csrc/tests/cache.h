// A KV cache of one group whose blocks lie in shuffled order, and batches over it. Memory that
// nothing was written to is NaN, so that reading it shows.
#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "data.h"
#include "library.h"

namespace rl_test {

struct CacheShape {
  int format;
  int num_kv_heads;
  int k_width;
  int v_width;
  int block_tokens = 16;
};

// KV slots [start, start + num_tokens) of a sequence; `ancestors` if the drafts are in a tree.
struct Part {
  int sequence;
  int start;
  int num_tokens;
  int num_drafts = 0;
  std::vector<uint64_t> ancestors = {};
  int lag = 0;
};

class Cache {
 public:
  Cache(const Level& level, const CacheShape& shape, const std::vector<int>& lengths,
        uint64_t seed = 1)
      : group_(sized(level, shape)), memory_(blocks_of(shape, lengths) * group_.block_bytes) {
    group_.data = memory_.data();
    std::vector<int32_t> order(static_cast<size_t>(blocks_of(shape, lengths)));
    std::iota(order.begin(), order.end(), 0);
    Random random(seed);
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(random.below(static_cast<int>(i)))]);
    auto next = order.begin();
    for (int length : lengths) {
      int blocks = (length + shape.block_tokens - 1) / shape.block_tokens;
      tables_.emplace_back(next, next + blocks);
      next += blocks;
    }
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  const rl_kv_group& group() const { return group_; }
  const std::vector<int32_t>& table(int sequence) const {
    return tables_[static_cast<size_t>(sequence)];
  }
  Bytes& memory() { return memory_; }

  static constexpr int kLayer = 1, kLayers = 2;

 private:
  static rl_kv_group sized(const Level& level, const CacheShape& shape) {
    rl_kv_group group{shape.format,  shape.block_tokens, kLayers, shape.num_kv_heads,
                      shape.k_width, shape.v_width,      0,       0,
                      nullptr};
    level.rl_kv_group_sizes(&group);
    return group;
  }
  static int64_t blocks_of(const CacheShape& shape, const std::vector<int>& lengths) {
    int64_t blocks = 0;
    for (int length : lengths) blocks += (length + shape.block_tokens - 1) / shape.block_tokens;
    return blocks;
  }

  rl_kv_group group_;
  Bytes memory_;
  std::vector<std::vector<int32_t>> tables_;
};

// The native batch of some parts, in their order, over the caches of all groups.
class Batch {
 public:
  Batch(const std::vector<const Cache*>& caches, const std::vector<Part>& parts) : parts_(parts) {
    for (const Part& part : parts_)
      for (const Cache* cache : caches) tables_.push_back(cache->table(part.sequence).data());
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      sequences_.push_back({num_tokens_, part.num_tokens, part.start, part.num_drafts,
                            part.ancestors.empty() ? nullptr : part.ancestors.data(),
                            &tables_[i * caches.size()], nullptr, nullptr, 0, part.lag});
      for (int t = 0; t < part.num_tokens; ++t) {
        token_ids_.push_back((part.start + t * 7 + part.sequence * 3) % 40);
        positions_.push_back(part.start + t);
        token_types_.push_back(t % 2);
      }
      num_tokens_ += part.num_tokens;
    }
    num_rows_ = num_tokens_;
    for (rl_sequence& sequence : sequences_) {
      sequence.lag_row = num_rows_;
      num_rows_ += sequence.lag;
    }
    batch_ = {num_tokens_, static_cast<int32_t>(sequences_.size()), token_ids_.data(),
              positions_.data(), sequences_.data(), token_types_.data()};
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const rl_batch* get() const { return &batch_; }
  int num_tokens() const { return num_tokens_; }
  int num_rows() const { return num_rows_; }  // with those of tokens that lag
  const std::vector<Part>& parts() const { return parts_; }

 private:
  std::vector<Part> parts_;
  std::vector<const int32_t*> tables_;
  std::vector<rl_sequence> sequences_;
  std::vector<int32_t> token_ids_, positions_, token_types_;
  int32_t num_tokens_ = 0, num_rows_ = 0;
  rl_batch batch_;
};

}  // namespace rl_test
