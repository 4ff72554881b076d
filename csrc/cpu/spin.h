// Waiting for another thread or process: by spinning first.
#pragma once

#include <chrono>

namespace rl {

// Long enough to bridge the gap between two jobs of a step, short enough to give the core back
// when others need it.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// Spins while `waiting()`; false when the time for spinning is over.
template <class Waiting>
bool spin(const Waiting& waiting) {
  auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (!waiting()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return !waiting();
}

}  // namespace rl
