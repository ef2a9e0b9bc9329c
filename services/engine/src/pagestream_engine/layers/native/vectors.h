// Products by vector registers: a tile of rows by a panel of outputs, one accumulator for each element.

#pragma once

#include <omp.h>

#include "product.h"

namespace {

// -- register tiles --

constexpr int VECTORS = 2;                           // of a register tile's width
constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;       // of a register tile: of 32 or 16 registers, 28 or 12 accumulate
constexpr int64_t PANEL = VECTORS * LANES;           // outputs
constexpr int64_t GROUP_BYTES = 384 << 10;           // of rows that meet a panel before the next one: they stay in L2
constexpr int FEW_ROWS = 5;                          // up to so many, memory alone sets the pace

inline Floats multiply_add(Floats sum, Floats x, Floats y) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, y, sum);
#else
  return sum + x * y;  // compiled with -ffp-contract=off: fused nowhere, so that all tiles agree
#endif
}

// One step of a sum, by the dtype of what is multiplied.
template <class T>
Floats add_step(Floats sum, Words x, Words weight);

template <>
inline Floats add_step<float>(Floats sum, Words x, Words weight) {
  return multiply_add(sum, (Floats)x, (Floats)weight);
}

template <>
inline Floats add_step<bf16>(Floats sum, Words x, Words weight) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
#else
  sum = multiply_add(sum, (Floats)(x << 16), (Floats)(weight << 16));
  return multiply_add(sum, (Floats)(x & 0xffff0000u), (Floats)(weight & 0xffff0000u));
#endif
}

// Memory that will be read soon: a step fetches a panel's width of it into L2, and moves on by `stride` bytes.
struct Ahead {
  const char* from;
  int64_t stride;

  void fetch_step() {
    for (int64_t byte = 0; byte < PANEL * WORD_BYTES; byte += LINE_BYTES) __builtin_prefetch(from + byte, 0, 2);
    from += stride;
  }
};

// A register tile: x (steps, ROWS), a panel of the weight (steps, PANEL) -> sums (ROWS, PANEL).
// Not inlined: in a larger function GCC 12 has no registers left for three of the sums.
template <class T, int ROWS>
__attribute__((noinline)) void multiply(const uint32_t* x, const uint32_t* panel, int64_t steps, Ahead ahead,
                                        float* sums) {
  Floats total[ROWS][VECTORS] = {};
  for (int64_t step = 0; step < steps; ++step, x += ROWS, panel += PANEL) {
    if constexpr (ROWS > FEW_ROWS) ahead.fetch_step();
    const Words weights[VECTORS] = {load(panel), load(panel + LANES)};
#pragma GCC unroll 14
    for (int row = 0; row < ROWS; ++row) {
      const Words input = x[row] - Words{};
      total[row][0] = add_step<T>(total[row][0], input, weights[0]);
      total[row][1] = add_step<T>(total[row][1], input, weights[1]);
    }
  }
  std::memcpy(sums, total, sizeof total);
}

template <class T, int ROWS = MAX_ROWS>
void multiply_rows(int64_t rows, const uint32_t* x, const uint32_t* panel, int64_t steps, Ahead ahead, float* sums) {
  if (rows == ROWS) return multiply<T, ROWS>(x, panel, steps, ahead, sums);
  if constexpr (ROWS > 1) multiply_rows<T, ROWS - 1>(rows, x, panel, steps, ahead, sums);
}

template <class T>
struct VectorProduct : Product<T> {
  using Base = Product<T>;
  using Base::inputs, Base::outputs, Base::packed, Base::rows, Base::scratch, Base::threads, Base::weight, Base::x;
  using Base::columns, Base::is_gated;

  static constexpr int64_t PANEL_WIDTH = PANEL;

  static int64_t steps_of(int64_t inputs) { return ceil_div(inputs, INPUTS_OF_WORD<T>); }

  static int64_t packed_words(int64_t inputs, int64_t outputs) {
    return ceil_div(outputs, PANEL) * PANEL * steps_of(inputs);
  }

  static void pack_panel(const T* weight, int64_t inputs, int64_t outputs, int64_t output, uint32_t* to) {
    pack(weight + output * inputs, inputs, std::min(PANEL, outputs - output), steps_of(inputs), PANEL, to);
  }

  static void pack_weight(uint32_t* to, const T* weight, int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t output = 0; output < outputs; output += PANEL)
      pack_panel(weight, inputs, outputs, output, to + output * steps_of(inputs));
  }

  // One row of whole words is its own tile: (steps, 1).
  bool packs_rows() const { return rows > 1 || inputs % INPUTS_OF_WORD<T>; }
  int64_t tiled_words() const { return packs_rows() ? rows * steps() : 0; }
  int64_t scratch_words() const { return tiled_words() + (weight ? threads * PANEL * steps() : 0); }

  int64_t steps() const { return steps_of(inputs); }
  int64_t num_tiles() const { return ceil_div(rows, MAX_ROWS); }
  int64_t num_panels() const { return ceil_div(columns(), PANEL); }  // where gated, of gates
  int64_t first_row(int64_t tile) const { return rows * tile / num_tiles(); }  // shared out evenly: no tile has few
  int64_t num_groups() const {
    const int64_t tiles = std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * steps() * WORD_BYTES));  // of a group
    return ceil_div(num_tiles(), tiles);
  }

  void run() const {
    const int64_t num_items = num_groups() * num_panels();
#pragma omp parallel num_threads(threads)
    {
      if (packs_rows()) {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < num_tiles(); ++tile) {
          const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
          pack(x + row * inputs, inputs, count, steps(), count, scratch + row * steps());
        }
      }
      uint32_t* own = scratch + tiled_words() + omp_get_thread_num() * PANEL * steps();
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < num_items; ++item) {
        const int64_t group = item / num_panels(), output = item % num_panels() * PANEL;
        if (weight) pack_panel(weight, inputs, outputs, output, own);
        multiply_group(group, output, weight ? own : packed + output * steps());
      }
    }
  }

  void multiply_group(int64_t group, int64_t output, const uint32_t* panel) const {
    const uint32_t* tiled = packs_rows() ? scratch : reinterpret_cast<const uint32_t*>(x);
    const uint32_t* up_panel = panel + columns() * steps();  // where gated
    const int64_t begin = num_tiles() * group / num_groups(), end = num_tiles() * (group + 1) / num_groups();
    // The group's tiles fetch the next panels together, each its share.
    const int64_t stride = PANEL * WORD_BYTES / (end - begin);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
      const auto sum_up = [&](const uint32_t* from, float* sums) {
        const char* next = reinterpret_cast<const char*>(from + PANEL * steps()) + (tile - begin) * stride * steps();
        multiply_rows<T>(count, tiled + row * steps(), from, steps(), {next, stride}, sums);
      };
      alignas(64) float sums[MAX_ROWS * PANEL], ups[MAX_ROWS * PANEL];
      sum_up(panel, sums);
      if (is_gated()) {
        sum_up(up_panel, ups);
        this->template finish_gated<PANEL>(sums, ups, row, count, output);
      } else {
        this->template finish<PANEL>(sums, row, count, output);
      }
    }
  }
};

}  // namespace
