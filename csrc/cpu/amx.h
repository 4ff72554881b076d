// AMX: eight registers, each a tile of up to 16 rows of up to 64 bytes. A product multiplies a tile of
// activations (a token a row) with a tile of weights (four bytes or two bfloats of 16 rows of a matrix
// a row, which are the lines of matrix.h) and adds to a tile of sums (a token a row, a lane for each
// row of the matrix).
#pragma once

#include <cstdint>

namespace rl {

constexpr int kAmxRows = 16;
constexpr int kAmxBytes = 64;

}  // namespace rl

#if defined(RL_EMULATED_AMX)
#include "../tests/emulated_amx.h"
#elif defined(__AMX_TILE__)

namespace rl {

// The shapes of a thread's registers, while an object of this class lives. All of them are zero when
// it is made.
class TileShapes {
 public:
  struct Shape {
    int rows, bytes;
  };

  explicit TileShapes(const Shape (&shapes)[8]) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.bytes[i] = static_cast<uint16_t>(shapes[i].bytes);
      config.rows[i] = static_cast<uint8_t>(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileShapes() { asm volatile("tilerelease"); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
};

// The compiler knows nothing of these registers: the order of the statements is the program's, and
// each that reads or writes memory says so.
template <int R>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(R));
}
template <int R>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}

// Sums += activations, signed bytes, times weights, bytes with or without a sign.
template <int Sums, int X, int Weights, bool kSigned>
inline void tile_dot_bytes() {
  if constexpr (kSigned)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weights));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weights));
}

// Sums, float32, += bfloats times bfloats.
template <int Sums, int X, int Weights>
inline void tile_dot_bfloats() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weights));
}

}  // namespace rl

#endif
