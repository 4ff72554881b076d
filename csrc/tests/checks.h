// What is checked of a level. Each compares it with another level, and with itself in other batches
// and on other numbers of threads, where every bit must be the same.
#pragma once

#include "library.h"
#include "report.h"

namespace rl_test {

void check_packing(const Pair& pair, Report& report);
void check_products(const Pair& pair, Report& report);
void check_attention(const Pair& pair, Report& report);
void check_programs(const Pair& pair, Report& report);
void check_sampling(const Pair& pair, Report& report);
void check_ceilings(const Pair& pair, Report& report);

}  // namespace rl_test
