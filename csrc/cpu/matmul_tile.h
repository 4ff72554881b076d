// The kernels of one tile, by format and number of tokens.
#pragma once

#include "activations.h"

namespace rl {

using TileKernel = void (*)(const rl_matrix& matrix, const uint8_t* tile, const Panels& panels,
                            int64_t panel, float* out);

TileKernel quantized_kernel(int format, int num_tokens);
TileKernel float_kernel(int format, int num_tokens);

}  // namespace rl
