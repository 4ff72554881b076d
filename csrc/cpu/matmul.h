// Products of packed matrices and panels of activations.
#pragma once

#include "activations.h"

namespace rl {

// What becomes of logits as they leave the kernel: they are scaled and capped, and the largest of each
// tile is noted (sample.h).
struct LogitsOutput {
  float scale, softcap;  // 1, 0: none
  float* maxima;         // [tokens, tiles], or null
};

// How a product leaves the kernel.
struct Product {
  const rl_matrix* matrix;
  const float* bias;  // [rows] or null
  float* out;         // row t begins at out + t * stride
  int64_t stride;
  const LogitsOutput* logits = nullptr;
};

// Several matrices times the same panels.
void multiply(Pool& pool, const Product* products, int num_products, const Panels& panels);

// Matrices of one shape and format, each times panels of its own, in one job.
void multiply_each(Pool& pool, const Product* products, const Panels* panels, int count);

// out[token][row] = act(gate . x) * (up . x), biases included, without storing the two products.
void multiply_gated(Pool& pool, const rl_linear& gate, const rl_linear& up,
                    const rl_activation& activation, float* out, int64_t stride,
                    const Panels& panels);

}  // namespace rl
