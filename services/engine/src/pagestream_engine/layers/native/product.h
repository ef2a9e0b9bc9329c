// What the kernels of linears share: numbers, the packing of words, and the arguments of a product.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t WORD_BYTES = 4;
constexpr int64_t LINE_BYTES = 64;  // of a cache

struct bf16 {
  uint16_t bits;
};

template <class T>
constexpr int64_t INPUTS_OF_WORD = WORD_BYTES / sizeof(T);

constexpr int64_t ceil_div(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) {  // rounded to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x7fff + ((bits >> 16) & 1);
  to->bits = x != x ? 0x7fc0 : uint16_t(bits >> 16);
}

// Four words of four rows each, to four words of four steps each.
inline void transpose(const uint32_t* from, int64_t row_stride, uint32_t* to, int64_t step_stride) {
#if defined(__x86_64__)
  __m128 r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_ps((const float*)(from + i * row_stride));
  _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
  for (int i = 0; i < 4; ++i) _mm_storeu_ps((float*)(to + i * step_stride), r[i]);
#else
  for (int step = 0; step < 4; ++step)
    for (int row = 0; row < 4; ++row) to[step * step_stride + row] = from[row * row_stride + step];
#endif
}

// (count, inputs), contiguous -> (steps, width) words. Zeros fill the columns from `count` on, and the steps that lack
// inputs.
template <class T>
void pack(const T* from, int64_t inputs, int64_t count, int64_t steps, int64_t width, uint32_t* to) {
  constexpr int64_t INPUTS = INPUTS_OF_WORD<T>;
  const int64_t whole = inputs / INPUTS;
  constexpr int64_t LINE = LINE_BYTES / WORD_BYTES;  // of each row is read at once
  if (count < width || whole < steps) std::memset(to, 0, steps * width * WORD_BYTES);
  const auto copy = [&](int64_t column, int64_t step) {
    std::memcpy(to + step * width + column, from + column * inputs + step * INPUTS, WORD_BYTES);
  };
  for (int64_t begin = 0; begin < whole; begin += LINE) {
    const int64_t end = std::min(begin + LINE, whole);
    int64_t column = 0;
    for (; inputs % INPUTS == 0 && column + 4 <= count; column += 4) {
      const uint32_t* rows = reinterpret_cast<const uint32_t*>(from) + column * whole;
      for (int row = 0; row < 4; ++row) __builtin_prefetch(rows + row * whole + begin + 4 * LINE);
      int64_t step = begin;
      for (; step + 4 <= end; step += 4) transpose(rows + step, whole, to + step * width + column, width);
      for (; step < end; ++step)
        for (int64_t i = 0; i < 4; ++i) copy(column + i, step);
    }
    for (; column < count; ++column)
      for (int64_t step = begin; step < end; ++step) copy(column, step);
  }
  for (int64_t column = 0; whole * INPUTS < inputs && column < count; ++column)
    std::memcpy(to + whole * width + column, from + column * inputs + whole * INPUTS, sizeof(T));
}

// The arguments of y = x W^T + b. Pointers are to contiguous memory.
template <class T>
struct Product {
  T* out;                  // (rows, outputs)
  const T* x;              // (rows, inputs)
  const T* weight;         // (outputs, inputs), or null where it is packed
  const uint32_t* packed;  // panels of it
  const T* bias;           // (outputs,), or null
  uint32_t* scratch;       // words, as many as the kernel says
  int64_t rows, inputs, outputs;
  int threads;

  // Adds the bias to sums (count, PANEL) of the rows from `first_row` and a panel from `output` on, and stores.
  template <int64_t PANEL>
  void finish(const float* sums, int64_t first_row, int64_t count, int64_t output) const {
    const int64_t width = std::min(PANEL, outputs - output);
    for (int64_t row = 0; row < count; ++row) {
      T* to = out + (first_row + row) * outputs + output;
      const float* from = sums + row * PANEL;
      if (bias)
        for (int64_t i = 0; i < width; ++i) store(to + i, from[i] + widen(bias[output + i]));
      else
        for (int64_t i = 0; i < width; ++i) store(to + i, from[i]);
    }
  }
};

}  // namespace
