// Packed matrices of every format.
#pragma once

#include <string>
#include <vector>

#include "data.h"
#include "library.h"

namespace rl_test {

struct Format {
  int format;
  int group;  // 0: for codes, one scale for a row
  bool has_min;
  bool has_factors = false;

  bool quantized() const { return format >= RL_Q4; }
  int bits() const { return format >= RL_Q2 ? format - RL_Q2 + 2 : format; }  // of a code
};

std::string name_of(const Format& format);
std::vector<Format> all_formats();

// A packed matrix and what owns its memory.
struct Matrix {
  rl_matrix description;
  Bytes data;

  // Empty, with the memory that `level` asks for.
  Matrix(const Level& level, const Format& format, int rows, int columns, float multiplier = 1);
  Matrix(Matrix&& other) = default;

  Floats unpacked(const Level& level) const;
};

// Of about normal values: floats, packed by `level`, or with minimums, codes around a middle of 0.
Matrix random_matrix(const Level& level, const Format& format, int rows, int columns, uint64_t seed,
                     float size = 1);

// Codes that use every bit, with scales, minimums and factors of both signs.
struct Codes {
  std::vector<uint8_t> codes;
  std::vector<float> scales, mins;
  std::vector<int8_t> factors;
};
Codes random_codes(const Format& format, int rows, int columns, uint64_t seed);
Matrix packed_codes(const Level& level, const Format& format, int rows, int columns,
                    const Codes& codes);

}  // namespace rl_test
