// What ops on the states of sequences share.
#pragma once

#include "program.h"

namespace rl {

// Calls save(state) for each state that is to be saved before the token at `position`.
template <class Save>
inline void save_states(const rl_sequence& sequence, int32_t position, const Save& save) {
  for (int32_t i = 0; i < sequence.num_saves; ++i)
    if (sequence.saves[i].position == position) save(sequence.saves[i].state);
}

}  // namespace rl
