// Rates that a processor reaches with nothing else to do: reading memory, and multiply-adds from registers.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int CHAINS = 10;  // independent sums: more than latency times issue rate asks for, fewer than registers
typedef float Vec __attribute__((vector_size(W * 4)));
typedef uint64_t Word __attribute__((vector_size(64), aligned(64)));

template <typename Sum, typename Step>
float repeat(int64_t rounds, Sum start, Step step) {
  Sum total[CHAINS];
  for (int i = 0; i < CHAINS; ++i) total[i] = start;
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < CHAINS; ++i) total[i] = step(total[i]);
  float result = 0.0f;
  for (int i = 0; i < CHAINS; ++i) result += total[i][0];
  return result;
}

}  // namespace

// Reads `bytes`, a multiple of 64 from an aligned address on; the result keeps the loads alive.
extern "C" uint64_t read_memory(const void* data, int64_t bytes, int threads) {
  const Word* words = (const Word*)data;
  const int64_t count = bytes / 64;
  uint64_t result = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : result)
  for (int64_t part = 0; part < threads; ++part) {
    Word total = {};
    for (int64_t i = count * part / threads; i < count * (part + 1) / threads; ++i) total ^= words[i];
    result ^= total[0];
  }
  return result;
}

// Does `rounds` rounds of multiply-adds on each thread; returns the floating-point operations done.
extern "C" double multiply_add_float32(int64_t rounds, int threads) {
  volatile float sink = 0.0f, factor = 0.5f;
#pragma omp parallel num_threads(threads)
  {
    const Vec by = Vec{} + factor, plus = Vec{} + 1.0f;
    sink = repeat(rounds, Vec{}, [&](Vec total) { return total * by + plus; });
  }
  return 2.0 * W * CHAINS * double(rounds) * threads;
}

// The same for pairs of bfloat16 products added to float32; 0 where the compiler's target has no such instruction.
extern "C" double multiply_add_bfloat16(int64_t rounds, int threads) {
#if defined(__AVX512BF16__)
  volatile float sink = 0.0f;
  volatile int32_t ones = 0x3f803f80;
#pragma omp parallel num_threads(threads)
  {
    const __m512bh pairs = (__m512bh)_mm512_set1_epi32(ones);
    sink = repeat(rounds, _mm512_setzero_ps(), [&](__m512 total) { return _mm512_dpbf16_ps(total, pairs, pairs); });
  }
  return 4.0 * 16 * CHAINS * double(rounds) * threads;
#else
  (void)rounds, (void)threads;
  return 0.0;
#endif
}
