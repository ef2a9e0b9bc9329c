// Linears whose bits depend on nothing but the row, the weight and the bias: y = x W^T + b in bfloat16 or float32.
//
// Every element of y is summed in one float32 accumulator, over the inputs from first to last, whatever the number of
// rows, the row's place among them and the number of threads: these only choose which accumulators share a register
// tile. One library has one set of instructions, the compiler's target, since they add differently:
//
//   AVX512_BF16      bfloat16 in pairs by vdpbf16ps, float32 by fused multiply-add
//   AVX-512, AVX2    bfloat16 widened, both by fused multiply-add
//   any other        bfloat16 widened, both by a multiplication and an addition
//
// A product of two bfloat16 is exact in float32, so that all levels but the first give the same bits in bfloat16, and
// all but the last in float32.
//
// A step of a sum takes one input in float32 and two in bfloat16, so that what it takes of a row has 32 bits, a word.
// Weights are packed in panels of PANEL outputs, (steps, PANEL) words each. A weight that has to stay as it is (a tied
// embedding) is packed panel by panel whenever it is used, into a thread's own memory: the sums are the same.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

// -- vectors of float32 --

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int VECTORS = 2;                           // of a register tile's width
constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;       // of a register tile: of 32 or 16 registers, 28 or 12 accumulate
constexpr int64_t PANEL = VECTORS * LANES;           // outputs
constexpr int64_t GROUP_BYTES = 384 << 10;           // of rows that meet a panel before the next one: they stay in L2

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

inline Words load(const uint32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats multiply_add(Floats sum, Floats x, Floats y) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, y, sum);
#else
  return sum + x * y;  // compiled with -ffp-contract=off: fused nowhere, so that all tiles agree
#endif
}

// -- one step of a sum, by the dtype of what is multiplied --

template <class T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t INPUTS = 1;
  static Floats add(Floats sum, Words x, Words weight) { return multiply_add(sum, (Floats)x, (Floats)weight); }
};

template <>
struct Step<bf16> {
  static constexpr int64_t INPUTS = 2;
  static Floats add(Floats sum, Words x, Words weight) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
#else
    sum = multiply_add(sum, (Floats)(x << 16), (Floats)(weight << 16));
    return multiply_add(sum, (Floats)(x & 0xffff0000u), (Floats)(weight & 0xffff0000u));
#endif
  }
};

template <class T>
constexpr int64_t steps_of(int64_t inputs) {
  return (inputs + Step<T>::INPUTS - 1) / Step<T>::INPUTS;
}

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

// -- packing --

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

// (count, inputs), contiguous -> (steps, width) words. Zeros fill the columns from `count` on, and the last step where
// it lacks an input.
template <class T>
void pack(const T* from, int64_t inputs, int64_t count, int64_t width, uint32_t* to) {
  const int64_t whole = inputs / Step<T>::INPUTS, steps = steps_of<T>(inputs);
  constexpr int64_t LINE = 16;  // words of a cache line: a line of each row is read at once
  if (count < width || whole < steps) std::memset(to, 0, steps * width * sizeof(uint32_t));
  const auto copy = [&](int64_t column, int64_t step) {
    std::memcpy(to + step * width + column, from + column * inputs + step * Step<T>::INPUTS, sizeof(uint32_t));
  };
  for (int64_t begin = 0; begin < whole; begin += LINE) {
    const int64_t end = std::min(begin + LINE, whole);
    int64_t column = 0;
    for (; inputs % Step<T>::INPUTS == 0 && column + 4 <= count; column += 4) {
      const uint32_t* rows = reinterpret_cast<const uint32_t*>(from) + column * steps;
      for (int row = 0; row < 4; ++row) __builtin_prefetch(rows + row * steps + begin + 4 * LINE);
      int64_t step = begin;
      for (; step + 4 <= end; step += 4) transpose(rows + step, steps, to + step * width + column, width);
      for (; step < end; ++step)
        for (int64_t i = 0; i < 4; ++i) copy(column + i, step);
    }
    for (; column < count; ++column)
      for (int64_t step = begin; step < end; ++step) copy(column, step);
  }
  for (int64_t column = 0; whole < steps && column < count; ++column)
    std::memcpy(to + whole * width + column, from + column * inputs + whole * Step<T>::INPUTS, sizeof(T));
}

template <class T>
void pack_weight(uint32_t* to, const T* weight, int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t begin = 0; begin < outputs; begin += PANEL)
    pack(weight + begin * inputs, inputs, std::min(PANEL, outputs - begin), PANEL, to + begin * steps_of<T>(inputs));
}

// -- the product --

// A register tile: x (steps, ROWS), a panel of the weight (steps, PANEL) -> sums (ROWS, PANEL).
template <class T, int ROWS>
void multiply(const uint32_t* x, const uint32_t* panel, int64_t steps, float* sums) {
  Floats total[ROWS][VECTORS] = {};
  for (int64_t step = 0; step < steps; ++step, x += ROWS, panel += PANEL) {
    const Words weights[VECTORS] = {load(panel), load(panel + LANES)};
#pragma GCC unroll 14
    for (int row = 0; row < ROWS; ++row) {
      const Words input = x[row] - Words{};
      total[row][0] = Step<T>::add(total[row][0], input, weights[0]);
      total[row][1] = Step<T>::add(total[row][1], input, weights[1]);
    }
  }
  std::memcpy(sums, total, sizeof total);
}

template <class T, int ROWS = MAX_ROWS>
void multiply_rows(int64_t rows, const uint32_t* x, const uint32_t* panel, int64_t steps, float* sums) {
  if (rows == ROWS) return multiply<T, ROWS>(x, panel, steps, sums);
  if constexpr (ROWS > 1) multiply_rows<T, ROWS - 1>(rows, x, panel, steps, sums);
}

template <class T>
struct Linear {
  T* out;                  // (rows, outputs)
  const T* x;              // (rows, inputs)
  const T* weight;         // (outputs, inputs), or null where it is packed
  const uint32_t* packed;  // by pack_weight
  const T* bias;           // (outputs,), or null
  uint32_t* tiled;         // rows * steps words, to pack x in; null if x is one row of whole words, its own tile
  uint32_t* panels;        // threads * PANEL * steps words, to pack `weight` in
  int64_t rows, inputs, outputs;

  int64_t steps() const { return steps_of<T>(inputs); }
  int64_t num_tiles() const { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
  int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
  int64_t first_row(int64_t tile) const { return rows * tile / num_tiles(); }  // shared out evenly: no tile has few
  int64_t num_groups() const {
    const int64_t tiles = std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * steps() * 4));  // of a group
    return (num_tiles() + tiles - 1) / tiles;
  }

  void run(int threads) const {
    const int64_t num_items = num_groups() * num_panels();
#pragma omp parallel num_threads(threads)
    {
      if (tiled) {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < num_tiles(); ++tile) {
          const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
          pack(x + row * inputs, inputs, count, count, tiled + row * steps());
        }
      }
      uint32_t* own = panels + omp_get_thread_num() * PANEL * steps();
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < num_items; ++item) {
        const int64_t group = item / num_panels(), output = item % num_panels() * PANEL;
        if (weight) pack(weight + output * inputs, inputs, std::min(PANEL, outputs - output), PANEL, own);
        multiply_group(group, output, weight ? own : packed + output * steps());
      }
    }
  }

  void multiply_group(int64_t group, int64_t output, const uint32_t* panel) const {
    const uint32_t* inputs_of_tiles = tiled ? tiled : reinterpret_cast<const uint32_t*>(x);
    const int64_t end = num_tiles() * (group + 1) / num_groups();
    for (int64_t tile = num_tiles() * group / num_groups(); tile < end; ++tile) {
      const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
      alignas(64) float sums[MAX_ROWS * PANEL];
      multiply_rows<T>(count, inputs_of_tiles + row * steps(), panel, steps(), sums);
      finish(sums, row, count, output);
    }
  }

  // Adds the bias and stores.
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

// Pointers are to contiguous memory; see the fields of `Linear`. A packed weight has steps * outputs words, the outputs
// rounded up to whole panels.
#define PAGESTREAM_EXPORT(T, NAME)                                                                                  \
  void pack_##NAME(uint32_t* packed, const T* weight, int64_t inputs, int64_t outputs, int threads) {               \
    pack_weight(packed, weight, inputs, outputs, threads);                                                          \
  }                                                                                                                 \
  void linear_##NAME(T* out, const T* x, const T* weight, const uint32_t* packed, const T* bias, uint32_t* tiled,   \
                     uint32_t* panels, int64_t rows, int64_t inputs, int64_t outputs, int threads) {                \
    Linear<T>{out, x, weight, packed, bias, tiled, panels, rows, inputs, outputs}.run(threads);                     \
  }

extern "C" {
int64_t panel_outputs() { return PANEL; }
PAGESTREAM_EXPORT(float, float32)
PAGESTREAM_EXPORT(bf16, bfloat16)
}
