// Linears by weights of 8 or 4 bits: y = x W^T + b, where W is scale * (value - zero), by output and group of inputs.
//
// Values are small whole numbers, or float8, so that bfloat16 and float32 hold them exactly. A group's products are
// summed from first to last by the steps of `vectors.h`; the sum times the group's scale is added to the element, group
// by group. None of that hangs on the number of rows, which only decides where values are widened: in registers where
// one tile has all rows; else once for all tiles of a group of rows, into a thread's own memory.
//
// A panel has WIDE_PANEL outputs: scales (groups, WIDE_PANEL) in float32, with INT4 zeros of the same shape in bytes,
// then the values of one pair of inputs after the other. A pair is (2, WIDE_PANEL) bytes; with 4 bits (WIDE_PANEL,), the
// first input's value in the low half of a byte. With AVX-512 the two bytes of a pair of float8 lie together. AMX multiplies
// bfloat16 by the same panels, see quantised_tiles.h.
//
// With TABLE4, NVFP4 and MXFP4 the 4 bits are a place in a table of 16 numbers, with which the panel begins; bfloat16
// multiplies by these rounded. Scales of NVFP4 are e4m3fn, times a factor in float32 of each output, (WIDE_PANEL,) before
// them; those of MXFP4 are exponents plus 127.

#pragma once

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

// Numbers of the C interface; FLOAT8 is e4m3fn.
enum Storage { INT8 = 0, FLOAT8 = 1, INT4 = 2, TABLE4 = 3, NVFP4 = 4, MXFP4 = 5 };

template <Storage S>
constexpr bool HAS_TABLE = S >= TABLE4;
template <Storage S>
constexpr bool HAS_4_BITS = S >= INT4;
template <Storage S>
constexpr bool HAS_BYTE_SCALES = S >= NVFP4;
constexpr int64_t TABLE_SIZE = 16;

#if defined(PAGESTREAM_TILE_MODEL)
constexpr int64_t WIDE_PANEL = 64;                     // outputs, as with the vectors of a processor that has tiles
#else
constexpr int64_t WIDE_PANEL = 2 * VECTORS * LANES;    // outputs: one row alone has as many sums in flight
#endif
constexpr int WIDE_VECTORS = WIDE_PANEL / LANES;
constexpr int FEW_WIDE_ROWS = 3;                       // up to so many take a panel at once, more a half of it
constexpr int64_t AHEAD_BYTES = 2048;                  // from the prefetch of values to their use

template <int ROWS>
constexpr int FUSED_VECTORS = ROWS <= FEW_WIDE_ROWS ? WIDE_VECTORS : VECTORS;

// -- widening --

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline Ints load_signed(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  SignedBytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Ints load_unsigned(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// e4m3fn has the fields of wider numbers with fewer bits, and another bias: subnormal numbers become such, and then
// exact. By way of float16, whose conversion takes no longer for these; a product of subnormal float32 would be computed
// by microcode, and take 150 cycles.
inline Floats widened_float8(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80)))) * 0x1p8f;
#elif defined(__F16C__) && defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbf80)))) * 0x1p8f;
#else
  return (Floats)((Words)load_signed(from) << 20 & 0x87f00000u) * 0x1p120f;
#endif
}

#if defined(__AVX512BW__)
// LANES pairs of e4m3fn as pairs of bfloat16. Subnormal numbers, of which bfloat16 has none so large, by a table.
inline Words float8_pairs(const uint8_t* from) {
  const Words subnormal = {0x3b000000, 0x3bc03b80, 0x3c203c00, 0x3c603c40};
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i fields = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x7f0));
  __m512i number = _mm512_add_epi16(fields, _mm512_set1_epi16(120 << 7));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  number = _mm512_mask_permutexvar_epi16(number, is_subnormal, wide, (__m512i)subnormal);
  return (Words)_mm512_ternarylogic_epi32(number, wide, _mm512_set1_epi16(short(0x8000)), 0xf8);  // | wide & sign
}
constexpr bool INTERLEAVES_FLOAT8 = true;
#else
inline Words float8_pairs(const uint8_t*) { return Words{}; }  // not used
constexpr bool INTERLEAVES_FLOAT8 = false;
#endif

// Whole numbers below 2^23, less others: by the bits of 2^23 + x, whose last place is 1.
inline Floats less_zeros(Words x, Floats shifted_zeros) { return (Floats)(x | 0x4b000000u) - shifted_zeros; }

// 16 numbers by their places.
struct Table {
#if defined(__AVX512F__)
  Floats numbers;
#elif defined(__AVX2__)
  Floats low, high;
#else
  float numbers[TABLE_SIZE];
#endif

  template <class T>
  static Table of(const float* from) {
#if defined(__AVX512F__)
    return {rounded<T>(load(from))};
#elif defined(__AVX2__)
    return {rounded<T>(load(from)), rounded<T>(load(from + LANES))};
#else
    Table table;
    for (int64_t i = 0; i < TABLE_SIZE; i += LANES) store(table.numbers + i, rounded<T>(load(from + i)));
    return table;
#endif
  }

  Floats at(Words places) const {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)places, numbers);
#elif defined(__AVX2__)
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)places), _mm256_permutevar8x32_ps(high, (__m256i)places),
                            (__m256)(places << 28));
#else
    Floats found;
    for (int i = 0; i < LANES; ++i) found[i] = numbers[places[i]];
    return found;
#endif
  }
};

struct PairOfInputs {
  Floats first, second;  // weights of LANES outputs
};

template <Storage S>
constexpr int64_t PAIR_BYTES = HAS_4_BITS<S> ? WIDE_PANEL : 2 * WIDE_PANEL;
// Whether the two inputs of an output lie together.
template <Storage S>
constexpr bool INTERLEAVES = S == FLOAT8 && INTERLEAVES_FLOAT8;
template <Storage S>
constexpr int64_t OUTPUT_BYTES = INTERLEAVES<S> ? 2 : 1;  // from one output of a pair to the next one

template <Storage S>
inline PairOfInputs widened(const uint8_t* pair, Floats shifted_zeros, const Table& table) {
  if constexpr (S == INT8) return {as_floats(load_signed(pair)), as_floats(load_signed(pair + WIDE_PANEL))};
  if constexpr (INTERLEAVES<S>) {
    const Words words = float8_pairs(pair);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
  }
  if constexpr (S == FLOAT8) return {widened_float8(pair), widened_float8(pair + WIDE_PANEL)};
  const Words both = (Words)load_unsigned(pair);
  if constexpr (HAS_TABLE<S>) return {table.at(both & 15), table.at(both >> 4)};
  return {less_zeros(both & 15, shifted_zeros), less_zeros(both >> 4, shifted_zeros)};
}

// What a step of bfloat16 multiplies: no value has more than 8 significant bits, so that the lower halves are zeros.
inline Words bf16_words(PairOfInputs weights) {
  return (Words)weights.first >> 16 | (Words)weights.second;
}

template <Storage S>
inline Words exact_words(const uint8_t* pair, Floats shifted_zeros, const Table& table) {
  if constexpr (INTERLEAVES<S>) return float8_pairs(pair);
  return bf16_words(widened<S>(pair, shifted_zeros, table));
}

// -- the sums of few rows --

// What the products of a pair take of its weights.
#if defined(__AVX512BF16__)
template <class T>
using Weights = std::conditional_t<std::is_same_v<T, bf16>, Words, PairOfInputs>;
#else
template <class T>
using Weights = PairOfInputs;
#endif
template <class T, Storage S>
inline Weights<T> weights_of(const uint8_t* pair, Floats shifted_zeros, const Table& table) {
  if constexpr (std::is_same_v<Weights<T>, Words>)
    return exact_words<S>(pair, shifted_zeros, table);
  else
    return widened<S>(pair, shifted_zeros, table);
}

// Adds the products of two inputs in the order of `add_step`; `x` are the words of both, `stride` words apart.
template <class T>
inline Floats add_pair(Floats sum, const uint32_t* x, int64_t stride, Weights<T> weights);

template <>
inline Floats add_pair<float>(Floats sum, const uint32_t* x, int64_t stride, PairOfInputs weights) {
  sum = multiply_add(sum, (Floats)(x[0] - Words{}), weights.first);
  return multiply_add(sum, (Floats)(x[stride] - Words{}), weights.second);
}

template <>
inline Floats add_pair<bf16>(Floats sum, const uint32_t* x, int64_t, Weights<bf16> weights) {
#if defined(__AVX512BF16__)
  return add_step<bf16>(sum, x[0] - Words{}, weights);
#else
  sum = multiply_add(sum, (Floats)((x[0] << 16) - Words{}), weights.first);
  return multiply_add(sum, (Floats)((x[0] & 0xffff0000u) - Words{}), weights.second);
#endif
}

// One panel.
template <Storage S>
struct WidePanel {
  static constexpr int64_t SCALE_BYTES = HAS_BYTE_SCALES<S> ? 1 : sizeof(float);

  const float* table;     // (TABLE_SIZE,)
  const float* factors;   // (WIDE_PANEL,) with NVFP4
  const uint8_t* scales;  // (groups, WIDE_PANEL), in float32 or bytes
  const uint8_t* zeros;   // the same with INT4
  const uint8_t* pairs;   // (pairs, PAIR_BYTES)
  int64_t num_pairs, group_pairs;

  WidePanel(const uint32_t* from, int64_t num_pairs, int64_t group_pairs)
      : num_pairs(num_pairs), group_pairs(group_pairs) {
    table = reinterpret_cast<const float*>(from);
    factors = table + (HAS_TABLE<S> ? TABLE_SIZE : 0);
    scales = reinterpret_cast<const uint8_t*>(factors + (S == NVFP4 ? WIDE_PANEL : 0));
    zeros = scales + num_groups() * WIDE_PANEL * SCALE_BYTES;
    pairs = zeros + (S == INT4 ? num_groups() * WIDE_PANEL : 0);
  }

  int64_t num_groups() const { return ceil_div(num_pairs, group_pairs); }
  int64_t num_words() const {
    const uint8_t* begin = reinterpret_cast<const uint8_t*>(table);
    return (pairs - begin + num_pairs * PAIR_BYTES<S>) / WORD_BYTES;
  }
  int64_t begin(int64_t group) const { return group * group_pairs; }
  int64_t end(int64_t group) const { return std::min(num_pairs, (group + 1) * group_pairs); }
  Floats scale(int64_t group, int64_t output) const {
    const Floats scale = group_scale(group, output);
    return S == NVFP4 ? scale * load(factors + output) : scale;
  }
  Floats group_scale(int64_t group, int64_t output) const {  // without the factor
    const uint8_t* from = scales + (group * WIDE_PANEL + output) * SCALE_BYTES;
    if constexpr (S == NVFP4) return widened_float8(from);
    if constexpr (S == MXFP4) return (Floats)((Words)load_unsigned(from) << 23);
    return load(reinterpret_cast<const float*>(from));
  }
  template <class T>
  Table numbers() const {
    return Table::of<T>(table);  // of another storage: what is not used
  }
  Floats shifted_zeros(int64_t group, int64_t output) const {  // 2^23 + zeros
    return S == INT4 ? (Floats)((Words)load_unsigned(zeros + group * WIDE_PANEL + output) | 0x4b000000u) : Floats{};
  }
};

// x (steps, ROWS) by the outputs of a panel from `first` on -> sums (ROWS, FUSED_VECTORS * LANES).
template <class T, Storage S, int ROWS>
__attribute__((noinline)) void multiply_fused(const uint32_t* x, const WidePanel<S>& panel, int64_t first, float* sums) {
  constexpr int COUNT = FUSED_VECTORS<ROWS>;
  constexpr int64_t PAIR_WORDS = 2 / INPUTS_OF_WORD<T> * ROWS;  // of x
  std::fill_n(sums, ROWS * COUNT * LANES, 0.0f);
  const Table table = panel.template numbers<T>();
  for (int64_t group = 0; group < panel.num_groups(); ++group) {
    Floats total[ROWS][COUNT] = {}, zeros[COUNT];
    for (int v = 0; v < COUNT; ++v) zeros[v] = panel.shifted_zeros(group, first + v * LANES);
    const uint8_t* pair = panel.pairs + panel.begin(group) * PAIR_BYTES<S> + first * OUTPUT_BYTES<S>;
    const int64_t end = panel.end(group);
    for (int64_t i = panel.begin(group); i < end; ++i, pair += PAIR_BYTES<S>, x += PAIR_WORDS) {
      for (int64_t byte = 0; byte < PAIR_BYTES<S>; byte += LINE_BYTES) __builtin_prefetch(pair + AHEAD_BYTES + byte);
#pragma GCC unroll 4
      for (int v = 0; v < COUNT; ++v) {
        const Weights<T> weights = weights_of<T, S>(pair + v * LANES * OUTPUT_BYTES<S>, zeros[v], table);
#pragma GCC unroll 14
        for (int row = 0; row < ROWS; ++row) total[row][v] = add_pair<T>(total[row][v], x + row, ROWS, weights);
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < COUNT; ++v) {
        float* to = sums + (row * COUNT + v) * LANES;
        store(to, load(to) + total[row][v] * panel.scale(group, first + v * LANES));
      }
  }
}

template <class T, Storage S, int ROWS = MAX_ROWS>
void multiply_fused_rows(int64_t rows, const uint32_t* x, const WidePanel<S>& panel, int64_t first, float* sums) {
  if (rows == ROWS) return multiply_fused<T, S, ROWS>(x, panel, first, sums);
  if constexpr (ROWS > 1) multiply_fused_rows<T, S, ROWS - 1>(rows, x, panel, first, sums);
}

// -- the product --

template <class T, Storage S>
struct QuantisedProduct : Product<T> {
  using Base = Product<T>;
  using Base::inputs, Base::outputs, Base::packed, Base::rows, Base::scratch, Base::threads, Base::x;
  using Base::columns, Base::is_gated;

  static constexpr int64_t STEPS_OF_PAIR = 2 / INPUTS_OF_WORD<T>;

  int64_t group_inputs;  // even, unless there is one group

  int64_t num_pairs() const { return ceil_div(inputs, 2); }
  int64_t steps() const { return num_pairs() * STEPS_OF_PAIR; }
  int64_t panel_words() const { return panel_at(nullptr).num_words(); }
  WidePanel<S> panel_at(const uint32_t* from) const { return {from, num_pairs(), ceil_div(group_inputs, 2)}; }
  WidePanel<S> panel_of(int64_t output) const { return panel_at(packed + output / WIDE_PANEL * panel_words()); }

  bool is_fused() const { return rows <= MAX_ROWS; }
  bool takes_panels() const { return rows <= FEW_WIDE_ROWS; }  // in place of halves
  bool packs_rows() const { return rows > 1 || inputs % 2; }
  int64_t num_tiles() const { return ceil_div(rows, MAX_ROWS); }
  int64_t first_row(int64_t tile) const { return rows * tile / num_tiles(); }
  int64_t num_groups() const {  // of rows
    return ceil_div(num_tiles(), std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * steps() * WORD_BYTES)));
  }
  int64_t tiled_words() const { return packs_rows() ? rows * steps() : 0; }
  int64_t own_words() const { return is_fused() ? 0 : (is_gated() ? 2 : 1) * PANEL * steps(); }
  int64_t scratch_words() const { return tiled_words() + threads * own_words(); }

  void run() const {
    const int64_t width = takes_panels() ? WIDE_PANEL : PANEL, num_panels = ceil_div(columns(), width);
#pragma omp parallel num_threads(threads)
    {
      if (packs_rows()) {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < num_tiles(); ++tile) {
          const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
          pack(x + row * inputs, inputs, count, steps(), count, scratch + row * steps());
        }
      }
      uint32_t* own = scratch + tiled_words() + omp_get_thread_num() * own_words();
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < num_groups() * num_panels; ++item) {
        const int64_t output = item % num_panels * width;
        if (takes_panels())
          multiply_one_tile<WIDE_PANEL>(output);
        else if (is_fused())
          multiply_one_tile<PANEL>(output);
        else
          multiply_group(item / num_panels, output, own);
      }
    }
  }

  const uint32_t* tiled() const { return packs_rows() ? scratch : reinterpret_cast<const uint32_t*>(x); }

  template <int64_t WIDTH>
  void multiply_one_tile(int64_t output) const {
    constexpr int64_t SIZE = WIDTH * (WIDTH == PANEL ? MAX_ROWS : FEW_WIDE_ROWS);
    alignas(64) float sums[SIZE], ups[SIZE];
    multiply_fused_rows<T>(rows, tiled(), panel_of(output), output % WIDE_PANEL, sums);
    if (!is_gated()) return this->template finish<WIDTH>(sums, 0, rows, output);
    const int64_t up = columns() + output;
    multiply_fused_rows<T>(rows, tiled(), panel_of(up), up % WIDE_PANEL, ups);
    this->template finish_gated<WIDTH>(sums, ups, 0, rows, output);
  }

  // Half of a panel, from `output` on, by a group of rows.
  void multiply_group(int64_t group, int64_t output, uint32_t* own) const {
    uint32_t* own_ups = own + PANEL * steps();
    widen(output, own);
    if (is_gated()) widen(columns() + output, own_ups);
    const int64_t begin = num_tiles() * group / num_groups(), end = num_tiles() * (group + 1) / num_groups();
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = first_row(tile), count = first_row(tile + 1) - row;
      alignas(64) float sums[MAX_ROWS * PANEL], ups[MAX_ROWS * PANEL];
      multiply_tile(tile, output, own, begin, end, sums);
      if (is_gated()) {
        multiply_tile(tile, columns() + output, own_ups, begin, end, ups);
        this->template finish_gated<PANEL>(sums, ups, row, count, output);
      } else {
        this->template finish<PANEL>(sums, row, count, output);
      }
    }
  }

  void widen(int64_t output, uint32_t* to) const {
    const WidePanel<S> panel = panel_of(output);
    const int64_t half = output % WIDE_PANEL;
    const Table table = panel.template numbers<T>();
    for (int64_t group = 0; group < panel.num_groups(); ++group)
      for (int v = 0; v < VECTORS; ++v) {
        const Floats zeros = panel.shifted_zeros(group, half + v * LANES);
        const uint8_t* pair = panel.pairs + (half + v * LANES) * OUTPUT_BYTES<S>;
        for (int64_t i = panel.begin(group); i < panel.end(group); ++i) {
          uint32_t* step = to + i * STEPS_OF_PAIR * PANEL + v * LANES;
          if constexpr (STEPS_OF_PAIR == 1) {
            store_words(step, exact_words<S>(pair + i * PAIR_BYTES<S>, zeros, table));
          } else {
            const PairOfInputs weights = widened<S>(pair + i * PAIR_BYTES<S>, zeros, table);
            store_words(step, (Words)weights.first);
            store_words(step + PANEL, (Words)weights.second);
          }
        }
      }
  }

  static void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }

  // The tiles from `begin` to `end` fetch the next panel's values together, each its share.
  void multiply_tile(int64_t tile, int64_t output, const uint32_t* own, int64_t begin, int64_t end, float* sums) const {
    const WidePanel<S> panel = panel_of(output);
    const int64_t row = first_row(tile), count = first_row(tile + 1) - row, half = output % WIDE_PANEL;
    const int64_t bytes = panel.num_words() * WORD_BYTES, stride = bytes / (2 * (end - begin) * steps());
    const char* next = reinterpret_cast<const char*>(panel.table) + bytes + (half ? bytes / 2 : 0);
    Ahead ahead{next + (tile - begin) * stride * steps(), stride};
    std::fill_n(sums, count * PANEL, 0.0f);
    for (int64_t group = 0; group < panel.num_groups(); ++group) {
      alignas(64) float products[MAX_ROWS * PANEL];
      const int64_t step = panel.begin(group) * STEPS_OF_PAIR;
      const int64_t num_steps = (panel.end(group) - panel.begin(group)) * STEPS_OF_PAIR;
      multiply_rows<T>(count, tiled() + row * steps() + step * count, own + step * PANEL, num_steps, ahead, products);
      ahead.from += num_steps * stride;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < PANEL; j += LANES) {
          float* to = sums + i * PANEL + j;
          const Floats scale = panel.scale(group, half + j);
          store(to, load(to) + load(products + i * PANEL + j) * scale);
        }
    }
  }

  // Values (outputs, inputs) in bytes, scales (groups, outputs), zeros (groups, outputs) with INT4, a table, and factors
  // (outputs,) with NVFP4 -> panels. What outputs and inputs lack are zeros, with which x has no part.
  void pack_weight(uint32_t* to, const uint8_t* values, const uint8_t* scales, const uint8_t* zeros, const float* table,
                   const float* factors) const {
    std::memset(to, 0, ceil_div(outputs, WIDE_PANEL) * panel_words() * WORD_BYTES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += WIDE_PANEL) {
      const WidePanel<S> panel = panel_at(to + first / WIDE_PANEL * panel_words());
      const int64_t count = std::min(WIDE_PANEL, outputs - first);
      for (int64_t group = 0; group < panel.num_groups(); ++group) {
        const int64_t at = group * WIDE_PANEL, from = group * outputs + first;
        const int64_t size = panel.SCALE_BYTES;
        std::memcpy(const_cast<uint8_t*>(panel.scales) + at * size, scales + from * size, count * size);
        if (S == INT4) std::memcpy(const_cast<uint8_t*>(panel.zeros) + at, zeros + from, count);
      }
      if (HAS_TABLE<S>) std::memcpy(const_cast<float*>(panel.table), table, TABLE_SIZE * sizeof(float));
      if (S == NVFP4) std::memcpy(const_cast<float*>(panel.factors), factors + first, count * sizeof(float));
      uint8_t* pairs = const_cast<uint8_t*>(panel.pairs);
      for (int64_t begin = 0; begin < inputs; begin += LINE_BYTES)  // a line of each output, into what L1 keeps
        for (int64_t output = 0; output < count; ++output)
          for (int64_t i = begin; i < std::min(begin + LINE_BYTES, inputs); ++i) {
            const uint8_t value = values[(first + output) * inputs + i];
            uint8_t* pair = pairs + i / 2 * PAIR_BYTES<S> + output * OUTPUT_BYTES<S>;
            if (HAS_4_BITS<S>)
              *pair |= value << i % 2 * 4;
            else
              pair[i % 2 * (INTERLEAVES<S> ? 1 : WIDE_PANEL)] = value;
          }
    }
  }
};

}  // namespace
