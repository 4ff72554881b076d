// The kernels, by format and number of tokens.
#pragma once

#include "activations.h"

namespace rl {

// Multiplies `count` consecutive tiles with a panel of M tokens: out[count][M][16].
using TileKernel = void (*)(const rl_matrix& matrix, const uint8_t* tiles, int count,
                            const Panels& panels, int64_t panel, float* out);

TileKernel quantized_kernel(int format, int num_tokens);
TileKernel float_kernel(int format, int num_tokens);

}  // namespace rl
