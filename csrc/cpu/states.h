// What ops on the states of sequences share.
#pragma once

#include <algorithm>

#include "program.h"

namespace rl {

// Calls step(row) for each token that a sequence's state takes in, in order: those that lag, and the
// batch's. In between it calls store(state) where the state is to be saved, and where it stays: before
// the drafts, of which some may be taken back.
template <class Store, class Step>
inline void take_in(const rl_sequence& sequence, const Store& store, const Step& step) {
  const int32_t known = sequence.num_tokens - sequence.num_drafts;
  for (int32_t t = -sequence.lag; t < sequence.num_tokens; ++t) {
    if (t == known) store(sequence.state);
    for (int32_t i = 0; i < sequence.num_saves; ++i)
      if (sequence.saves[i].position == sequence.start + t) store(sequence.saves[i].state);
    step(t < 0 ? sequence.lag_row + sequence.lag + t : sequence.first_row + t);
  }
  if (!sequence.num_drafts) store(sequence.state);
}

// What an op reads of a token before it changes it: `queries` floats of RL_QUERY and `values` of RL_VALUE,
// from `offset` on in what is kept of drafts.
struct StateInputs {
  int64_t offset;
  int32_t queries, values;

  int64_t end() const { return offset + queries + values; }

  // Brings rows of tokens that lag, and keeps those of drafts. Returns the number of rows that there are.
  int32_t exchange(Context& c) const {
    int32_t rows = c.num_tokens();
    bool has_any = false;
    for (int32_t i = 0; i < c.batch.num_sequences; ++i) {
      rows += c.batch.sequences[i].lag;
      has_any |= c.batch.sequences[i].lag || c.batch.sequences[i].drafted;
    }
    if (has_any)
      c.pool.run(c.batch.num_sequences,
                 [&](int64_t i, int) { exchange(c, c.batch.sequences[i]); });
    return rows;
  }

 private:
  void exchange(const Context& c, const rl_sequence& sequence) const {
    for (int32_t t = 0; t < sequence.lag; ++t) {
      const float* from = sequence.lagging + t * c.state_inputs + offset;
      std::copy_n(from, queries, c.row(RL_QUERY, sequence.lag_row + t));
      std::copy_n(from + queries, values, c.row(RL_VALUE, sequence.lag_row + t));
    }
    if (!sequence.drafted) return;
    const int32_t first = sequence.first_row + sequence.num_tokens - sequence.num_drafts;
    for (int32_t t = 0; t < sequence.num_drafts; ++t) {
      float* to = sequence.drafted + t * c.state_inputs + offset;
      std::copy_n(c.row(RL_QUERY, first + t), queries, to);
      std::copy_n(c.row(RL_VALUE, first + t), values, to + queries);
    }
  }
};

}  // namespace rl
