// The loops that measure the machine: each runs, and counts something.
#include "checks.h"

namespace rl_test {

void check_ceilings(const Pair& pair, Report& report) {
  const Level& level = pair.tested;
  for (int32_t i = 0; level.ridgeline_read_pattern(i); ++i)
    report.holds("reading loops", level.ridgeline_read_pattern(i),
                 level.ridgeline_read_rate(i, 1 << 16, 1, 1e-6) > 0);
  for (int32_t i = 0; level.ridgeline_arithmetic_loop(i); ++i)
    report.holds("arithmetic loops", level.ridgeline_arithmetic_loop(i),
                 level.ridgeline_arithmetic_rate(i, 2, 1e-6) > 0);
}

}  // namespace rl_test
