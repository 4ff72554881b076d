// Causal convolutions along the sequence, of each channel by itself, token by token: so it makes no
// difference where a prompt is cut.
#pragma once

#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "states.h"

namespace rl {

constexpr int32_t kConvChannels = 256;  // of a tile

// The last inputs of some channels of one sequence, the oldest first.
class ConvWindow {
 public:
  ConvWindow(int32_t length, int32_t count) : length_(length), count_(count) {
    for (int32_t j = 0; j < length; ++j) rows_[j] = storage_ + j * kConvChannels;
  }

  const float* row(int32_t j) const { return rows_[j]; }
  float* newest() { return rows_[length_ - 1]; }

  // All but the newest, from or to a state whose rows are `stride` apart.
  void load(const float* state, int64_t stride) {
    for (int32_t j = 0; j + 1 < length_; ++j) std::copy_n(state + j * stride, count_, rows_[j]);
  }
  void clear() {
    for (int32_t j = 0; j + 1 < length_; ++j) std::fill_n(rows_[j], count_, 0.0f);
  }
  void store(float* state, int64_t stride) const {
    for (int32_t j = 0; j + 1 < length_; ++j) std::copy_n(rows_[j], count_, state + j * stride);
  }

  // The newest becomes the one before, and the oldest is forgotten.
  void advance() { std::rotate(rows_, rows_ + 1, rows_ + length_); }

 private:
  int32_t length_, count_;
  float* rows_[RL_MAX_CONV_LENGTH];
  float storage_[RL_MAX_CONV_LENGTH * kConvChannels];
};

// Sums of the last inputs of each channel; those before a token lie in the state from `offset` on.
struct Convolution {
  int64_t offset;
  int32_t channels, length;
  std::vector<float> weight;  // [L, channels]
  const float* bias;          // or null

  // `weights` are [channels, L].
  Convolution(int64_t offset, int32_t channels, int32_t length, const float* weights,
              const float* bias)
      : offset(offset), channels(channels), length(length), bias(bias) {
    weight.resize(static_cast<size_t>(channels) * length);
    for (int32_t i = 0; i < channels; ++i)
      for (int32_t j = 0; j < length; ++j)
        weight[static_cast<size_t>(j) * channels + i] =
            weights[static_cast<size_t>(i) * length + j];
  }

  // The element of the state behind its own.
  int64_t end() const { return offset + static_cast<int64_t>(length - 1) * channels; }

  // For vectors of n channels from i on of each row of the batch: input(row, i, n) is what enters,
  // and output(row, i, n, sum) takes what comes out.
  template <class Input, class Output>
  void run(Context& c, const Input& input, const Output& output) const {
    int32_t parts = static_cast<int32_t>(ceil_div(channels, kConvChannels));
    c.pool.run(static_cast<int64_t>(c.batch.num_sequences) * parts, [&](int64_t tile, int) {
      int32_t first = static_cast<int32_t>(tile % parts) * kConvChannels;
      run_part(c.batch.sequences[tile / parts], first, std::min(kConvChannels, channels - first),
               input, output);
    });
  }

 private:
  template <class Input, class Output>
  void run_part(const rl_sequence& sequence, int32_t first, int32_t count, const Input& input,
                const Output& output) const {
    int64_t place = offset + first;
    ConvWindow window(length, count);
    if (sequence.start)
      window.load(sequence.state + place, channels);
    else
      window.clear();
    auto store = [&](float* state) { window.store(state + place, channels); };
    take_in(sequence, store, [&](int32_t row) {
      over(count, [&](int i, int n) {
        vf newest = input(row, first + i, n);
        store_some(window.newest() + i, newest, n);
        vf sum = bias ? load_some(bias + first + i, n) : vf{};
        const float* weights = weight.data() + first + i;
        for (int32_t j = 0; j + 1 < length; ++j, weights += channels)
          sum = fma(load_some(weights, n), load_some(window.row(j) + i, n), sum);
        output(row, first + i, n, fma(load_some(weights, n), newest, sum));
      });
      window.advance();
    });
  }
};

}  // namespace rl
