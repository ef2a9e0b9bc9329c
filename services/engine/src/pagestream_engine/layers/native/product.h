// What the kernels of linears share: numbers, the packing of words, the arguments of a product, and what becomes of its
// sums.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../attention/native/activations.h"

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

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Words load(const uint32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const bf16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  return (Floats)(__builtin_convertvector(half, Words) << 16);
}

// The upper halves are those of `store` for one number.
inline Words rounded_words(Floats x) {
  Words bits = (Words)x;
  bits += 0x7fff + ((bits >> 16) & 1);
  return x == x ? bits : Words{} + 0x7fc00000;
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Floats x) {
  const Halves half = __builtin_convertvector(rounded_words(x) >> 16, Halves);
  std::memcpy(to, &half, sizeof half);
}
template <class T>
inline Floats rounded(Floats x);
template <>
inline Floats rounded<float>(Floats x) {
  return x;
}
template <>
inline Floats rounded<bf16>(Floats x) {
  return (Floats)(rounded_words(x) & 0xffff0000u);
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

// What becomes of the sums of a product: a number of the C interface.
enum Epilogue { PLAIN = -1, GATED_SILU = SILU, GATED_GELU = GELU, GATED_GELU_TANH = GELU_TANH };

// The arguments of y = x W^T + b. Pointers are to contiguous memory. With a gated epilogue the first half of the outputs
// are gates, a multiple of a panel's width, the weight is packed, and the result is activation(gates) * the other half.
template <class T>
struct Product {
  T* out;                  // (rows, outputs), or half as many columns where gated
  const T* x;              // (rows, inputs)
  const T* weight;         // (outputs, inputs), or null where it is packed
  const uint32_t* packed;  // panels of it
  const T* bias;           // (outputs,), or null
  uint32_t* scratch;       // words, as many as the kernel says
  int64_t rows, inputs, outputs;
  Epilogue epilogue;
  int threads;

  bool is_gated() const { return epilogue != PLAIN; }
  int64_t columns() const { return is_gated() ? outputs / 2 : outputs; }  // of the result

  // Adds the bias to sums (count, PANEL) of the rows from `first_row` and a panel from `output` on, and stores.
  template <int64_t PANEL>
  void finish(const float* sums, int64_t first_row, int64_t count, int64_t output) const {
    const int64_t width = std::min(PANEL, outputs - output), whole = width / LANES * LANES;
    for (int64_t row = 0; row < count; ++row) {
      T* to = out + (first_row + row) * outputs + output;
      const float* from = sums + row * PANEL;
      for (int64_t i = 0; i < whole; i += LANES) store(to + i, with_bias(from + i, output + i));
      for (int64_t i = whole; i < width; ++i) store(to + i, bias ? from[i] + widen(bias[output + i]) : from[i]);
    }
  }

  // The same for the sums of a panel of gates and of the panel that they gate. Rounded where an activation that is an
  // operator of its own reads and writes the dtype.
  template <int64_t PANEL>
  void finish_gated(const float* gates, const float* ups, int64_t first_row, int64_t count, int64_t output) const {
    switch (epilogue) {
      case GATED_SILU: return gate<SILU, PANEL>(gates, ups, first_row, count, output);
      case GATED_GELU: return gate<GELU, PANEL>(gates, ups, first_row, count, output);
      case GATED_GELU_TANH: return gate<GELU_TANH, PANEL>(gates, ups, first_row, count, output);
      case PLAIN: return;
    }
  }

 private:
  Floats with_bias(const float* sums, int64_t output) const {
    return bias ? load(sums) + load(bias + output) : load(sums);
  }

  template <Activation A, int64_t PANEL>
  void gate(const float* gates, const float* ups, int64_t first_row, int64_t count, int64_t output) const {
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const Floats gate = rounded<T>(with_bias(gates + row * PANEL + i, output + i));
        const Floats up = rounded<T>(with_bias(ups + row * PANEL + i, columns() + output + i));
        store(out + (first_row + row) * columns() + output + i, rounded<T>(activated<A>(gate)) * up);
      }
  }
};

}  // namespace
