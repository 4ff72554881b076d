// A model's ops in order, and the buffers that they work on.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "group.h"
#include "matmul.h"
#include "pool.h"
#include "ridgeline_cpu.h"

namespace rl {

// Uninitialised memory that grows; what it held is lost when it does.
class Buffer {
 public:
  template <class T>
  T* get(int64_t count) {
    int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    if (bytes > size_) {
      data_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
      size_ = data_ ? bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

struct RopeTable {
  std::vector<float> frequencies;  // empty if the caller gives cos and sin
  int half;
  float factor;
  Buffer values;  // cos [T, half], sin [T, half]
  const float* cos = nullptr;
  const float* sin = nullptr;
};

// One call of rl_run, and the space that its ops share.
struct Context {
  Pool& pool;
  const rl_batch& batch;
  const rl_kv_group* groups;
  const rl_adapter* const* adapters;  // by sequence, or null
  float* const* buffers;
  const int32_t* widths;
  std::vector<RopeTable>& ropes;
  // Scratch: panels of activations, the inside of a feed-forward network, and what else is needed.
  Buffer &panels, &inner, &up, &spare, &gathered, &outputs;
  Buffer &staged, &partials;  // of contexts that ranks share: blocks, and what splits have come to
  int64_t& experts_read;
  Group* group;          // null where this is the only rank
  int64_t state_inputs;  // `rl_state_inputs`

  int32_t num_tokens() const { return batch.num_tokens; }
  float* row(int buffer, int32_t token) const {
    return buffers[buffer] + static_cast<int64_t>(token) * widths[buffer];
  }
  Rows rows(int buffer, int32_t columns) const {
    return {buffers[buffer], widths[buffer], num_tokens(), columns};
  }
};

// K and V of the batch's tokens into the cache of a layer, and attention over it, by this rank alone or by
// all that share contexts. Attention leaves rows [T, H, out_width].
void write_kv(Context& context, int32_t group, int32_t layer);
void attend(Context& context, int32_t group, int32_t layer, const rl_attention& attention,
            const float* q, int64_t q_stride, float* out);

class Op {
 public:
  virtual ~Op() = default;
  virtual void run(Context& context) const = 0;
  virtual void expert_tokens(int64_t*) const {}  // of a mixture of experts
};

// Calls body(token) for every token, shared out in runs of a few.
template <class Body>
void for_tokens(Pool& pool, int32_t num_tokens, const Body& body) {
  constexpr int32_t kRun = 4;
  pool.run(ceil_div(num_tokens, kRun), [&](int64_t tile, int) {
    int32_t first = static_cast<int32_t>(tile) * kRun;
    for (int32_t t = first; t < first + kRun && t < num_tokens; ++t) body(t);
  });
}

// out = linear . rows + bias, adapters included, for at most kMaxTargets matrices and the same rows. The rows
// are those of the batch in order, or not the batch's at all (then `adapted` is false).
struct Target {
  const rl_linear* linear;
  float* out;
  int64_t stride;
  const LogitsOutput* logits = nullptr;
};
constexpr int kMaxTargets = 6;
void apply(Context& context, const Rows& rows, const Target* targets, int count, bool adapted);

// The same for many matrices of one shape and format, each with rows of its own, and no adapters.
void apply_each(Context& context, const Rows* rows, const Target* targets, int count);

// out[T, D] = down . (act(gate . rows) * (up . rows)), or without a gate down . act(up . rows).
struct FeedForward {
  rl_linear gate, up, down;  // gate.matrix.data is null if there is none
  rl_activation activation;
};
void feed_forward(Context& context, const FeedForward& network, const Rows& rows, float* out,
                  int64_t stride, bool adapted);
// What is inside of it: inner[T, F] = act(gate . rows) * (up . rows).
void gate_up(Context& context, const FeedForward& network, const Rows& rows, float* inner,
             int64_t stride, bool adapted);

std::unique_ptr<Op> make_moe(int source, int router_source, const rl_routing& routing,
                             const rl_linear& router, const float* correction,
                             const float* expert_scale, const rl_linear* gate, const rl_linear* up,
                             const rl_linear* down, const rl_activation& activation,
                             const std::vector<int32_t>& borders, int rank);
// Ops on states find theirs from `offset` on, and what is kept of drafts from `inputs` on, of which the
// last is moved behind theirs.
std::unique_ptr<Op> make_gated_delta(int64_t offset, int64_t& inputs, const rl_gated_delta& shape,
                                     const float* conv,
                                     const float* decay_log, const float* decay_bias,
                                     const float* gain, const rl_norm& norm);
std::unique_ptr<Op> make_selective_scan(int64_t offset, int64_t& inputs,
                                        const rl_selective_scan& shape,
                                        const float* conv, const float* conv_bias,
                                        const float* decay_log, const float* step_bias,
                                        const float* skip, const float* gain, const rl_norm& norm);
std::unique_ptr<Op> make_short_conv(int64_t offset, int64_t& inputs, int32_t channels, int32_t length,
                                    const float* weight, const float* bias);
std::unique_ptr<Op> make_latent_project(int source, const rl_linear* query_latent,
                                        const float* query_norm, const rl_linear& query,
                                        const rl_linear& latent, const float* latent_norm,
                                        int latent_dim, const rl_norm& norm);
std::unique_ptr<Op> make_latent_attend(int group, int layer, const rl_attention& attention,
                                       const rl_linear* key_up, const rl_linear* value_up,
                                       int nope_dim, int rope_dim);
std::unique_ptr<Op> make_bidirectional_attend(int num_kv_heads, const rl_attention& attention);

}  // namespace rl
