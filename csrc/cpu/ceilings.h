// What the machine can do at the most: read bandwidth and arithmetic rates, by our own instructions.
//
// Each shared library holds these loops compiled for its instruction set, so that the ceiling of a
// kernel is that of the instructions which it may use. Nothing here allocates between the first and
// the last clock reading. All functions may be called from any thread; measurements that overlap
// disturb each other.

#ifndef RIDGELINE_CPU_CEILINGS_H_
#define RIDGELINE_CPU_CEILINGS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

// Names of the ways to read memory, in the order of their indices; NULL past the last.
const char* ridgeline_read_pattern(int32_t pattern);

// Bytes per second that `threads` threads read together by one pattern, each over and over through
// `bytes_per_thread` bytes of its own, in the best of eight intervals that take about `seconds` in
// all. Returns 0 if memory is refused or an argument is out of range.
double ridgeline_read_rate(int32_t pattern, size_t bytes_per_thread, int32_t threads,
                           double seconds);

// The arithmetic loops: name, and number format of the weights that it is the bound of ("float32",
// "bfloat16", "int8", "int4"); NULL past the last.
const char* ridgeline_arithmetic_loop(int32_t loop);
const char* ridgeline_arithmetic_format(int32_t loop);

// Operations per second (a multiply-add is two) of `threads` threads that run one loop on registers
// in the best of eight intervals. Returns 0 if an argument is out of range.
double ridgeline_arithmetic_rate(int32_t loop, int32_t threads, double seconds);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif  // RIDGELINE_CPU_CEILINGS_H_
