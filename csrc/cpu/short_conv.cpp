// Short convolutions between two gates (LFM2).
#include "short_conv.h"

namespace rl {
namespace {

struct ShortConv : Op {
  Convolution convolution;
  StateInputs inputs;

  ShortConv(Convolution convolution, int64_t kept)
      : convolution(std::move(convolution)),
        inputs{kept, this->convolution.channels, this->convolution.channels} {}

  void run(Context& c) const override {
    inputs.exchange(c);
    convolution.run(
        c,
        [&](int32_t row, int32_t i, int n) {
          return load_some(c.row(RL_QUERY, row) + i, n) * load_some(c.row(RL_VALUE, row) + i, n);
        },
        [&](int32_t row, int32_t i, int n, vf sum) {
          // OutProject reads dense rows, whatever the buffer's width.
          float* out = c.buffers[RL_H] + static_cast<int64_t>(row) * convolution.channels;
          store_some(out + i, load_some(c.row(RL_KEY, row) + i, n) * sum, n);
        });
  }
};

}  // namespace

std::unique_ptr<Op> make_short_conv(int64_t offset, int64_t& inputs, int32_t channels, int32_t length,
                                    const float* weight, const float* bias) {
  auto op = std::make_unique<ShortConv>(Convolution(offset, channels, length, weight, bias), inputs);
  inputs = op->inputs.end();
  return op;
}

}  // namespace rl
