// What happens to one token's row between the products of matrices.
#pragma once

#include <cstdint>

#include "ridgeline_cpu.h"
#include "simd.h"

namespace rl {

// out[0, width) = norm(x) * weight + bias, either of which may be null. `out` may be x.
void normalise(const rl_norm& norm, const float* x, const float* weight, const float* bias,
               int32_t width, float* out);

// Rotates the first 2 * half elements of x; cos and sin are [half].
void rotate(float* x, const float* cos, const float* sin, int half, bool interleaved);

// out[i] = act(gate[i]) * up[i], or act(up[i]) where gate is null.
void activate(const rl_activation& activation, const float* gate, const float* up, int32_t width,
              float* out);

void add_scaled(float* x, const float* h, float scale, int32_t width);
void soft_cap(float* x, float cap, int64_t count);

}  // namespace rl
