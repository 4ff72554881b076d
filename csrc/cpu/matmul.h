// Products of packed matrices and panels of activations.
#pragma once

#include "activations.h"

namespace rl {

// How a product leaves the kernel.
struct Product {
  const rl_matrix* matrix;
  const float* bias;  // [rows] or null
  float* out;         // row t begins at out + t * stride
  int64_t stride;
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
