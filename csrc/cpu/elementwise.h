// What happens to one token's row between the products of matrices.
#pragma once

#include <cstdint>

#include "ridgeline_cpu.h"
#include "simd.h"

namespace rl {

// Calls body(vector, lanes valid) over [0, width); the last vector may be partial.
template <class Body>
inline void over(int32_t width, const Body& body) {
  int32_t i = 0;
  for (; i + W <= width; i += W) body(i, W);
  if (i < width) body(i, width - i);
}

inline void store_some(float* p, vf x, int count) {
  if (count == W) return store(p, x);
  for (int i = 0; i < count && i < W; ++i) p[i] = x[i];
}

// out[0, width) = norm(x) * weight + bias, either of which may be null. `out` may be x.
void normalise(const rl_norm& norm, const float* x, const float* weight, const float* bias,
               int32_t width, float* out);

// Rotates the first 2 * half elements of x; cos and sin are [half].
void rotate(float* x, const float* cos, const float* sin, int half, bool interleaved);

// out[i] = act(gate[i]) * up[i], or act(up[i]) where gate is null.
void activate(const rl_activation& activation, const float* gate, const float* up, int32_t width,
              float* out);

// In place.
void xielu(const rl_xielu& function, float* x, int32_t width);

void add_scaled(float* x, const float* h, float scale, int32_t width);
void soft_cap(float* x, float cap, int64_t count);

}  // namespace rl
