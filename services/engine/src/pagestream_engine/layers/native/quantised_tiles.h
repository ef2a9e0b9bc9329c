// Products of bfloat16 with weights of 8 or 4 bits by AMX: a part of a weight is widened to bfloat16 in cache, in the
// packing of tiles.h, and multiplied by its instructions in its order.
//
// With more groups of inputs than one, a weight is scale * (value - zero) rounded to bfloat16, as references dequantise
// it: the product has the bits of `TileProduct` with that weight. With one group values are exact, and the scale
// multiplies the sum. So does the factor of NVFP4, whose values times scales in float8 are exact, like those of MXFP4.

#pragma once

#include "quantised.h"
#include "tiles.h"

namespace {

// Two inputs of LANES outputs, rounded to bfloat16.
inline Words rounded_pairs(PairOfInputs weights) {
#if defined(__AVX512BF16__)
  const Words order = {0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007,
                       0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weights.second, weights.first);  // one after the other
  return (Words)_mm512_permutexvar_epi16((__m512i)order, both);
#else
  return rounded_words(weights.first) >> 16 | (rounded_words(weights.second) & 0xffff0000u);
#endif
}

template <Storage S>
struct QuantisedTileProduct : TileProduct {
  static constexpr int64_t COLUMN_TILES = WIDE_PANEL / TILE_WIDTH;
  static_assert(COLUMN_TILES == 4, "a wide panel fills the tiles of sums");
  static constexpr int64_t GROUP_BLOCKS = 16;  // of rows: a widened segment meets 512 before it goes
  static constexpr int64_t CHUNK_PANELS = 8;   // their sums, and a segment of the rows, take 512 KiB of L2 each

  int64_t group_inputs;

  int64_t num_pairs() const { return ceil_div(inputs, 2); }
  WidePanel<S> panel_at(const uint32_t* from) const { return {from, num_pairs(), ceil_div(group_inputs, 2)}; }
  WidePanel<S> panel_of(int64_t output) const {
    return panel_at(packed + output / WIDE_PANEL * panel_at(nullptr).num_words());
  }
  bool folds_scales() const { return panel_at(nullptr).num_groups() > 1; }
  bool scales_sums() const { return !folds_scales() || S == NVFP4; }
  bool is_one_tile() const { return row_tiles() == 1; }

  int64_t sides() const { return is_gated() ? 2 : 1; }
  int64_t groups() const { return ceil_div(num_blocks(), GROUP_BLOCKS); }
  int64_t group_blocks() const { return ceil_div(num_blocks(), groups()); }
  int64_t chunk_panels() const {  // so many that each thread has some
    return std::clamp<int64_t>(num_panels() * groups() / (4 * threads), 1, CHUNK_PANELS / sides());
  }
  int64_t panel_sums() const { return group_blocks() * BLOCK_ROWS * PANEL; }
  int64_t own_words() const {
    if (is_one_tile()) return (2 + sides()) * TILE_ROWS * WIDE_PANEL;
    return SEGMENT * TILE_ROWS * PANEL + sides() * chunk_panels() * panel_sums();
  }
  int64_t scratch_words() const { return row_tiles() * row_tile_words() + threads * own_words(); }

  void run() const {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < row_tiles(); ++tile) pack_rows(tile, scratch + tile * row_tile_words());
      uint32_t* own = scratch + row_tiles() * row_tile_words() + omp_get_thread_num() * own_words();
      if (is_one_tile()) {
        const TileScope scope(rows);
#pragma omp for schedule(static) nowait
        for (int64_t output = 0; output < columns(); output += WIDE_PANEL) multiply_one_tile(output, own);
      } else {
        const TileScope scope;
        const int64_t chunks = ceil_div(num_panels(), chunk_panels());
#pragma omp for schedule(static) nowait
        for (int64_t item = 0; item < groups() * chunks; ++item) multiply_chunk(item / chunks, item % chunks, own);
      }
    }
  }

  // -- one tile of rows by a wide panel, widened tile by tile --

  void multiply_one_tile(int64_t output, uint32_t* own) const {
    float* sums = reinterpret_cast<float*>(own + 2 * TILE_ROWS * WIDE_PANEL);
    float* ups = sums + TILE_ROWS * WIDE_PANEL;  // where gated
    sum_up_one_tile(panel_of(output), own, sums);
    if (!is_gated()) return finish<WIDE_PANEL>(sums, 0, rows, output);
    sum_up_one_tile(panel_of(columns() + output), own, ups);
    finish_gated<WIDE_PANEL>(sums, ups, 0, rows, output);
  }

  void sum_up_one_tile(const WidePanel<S>& panel, uint32_t* own, float* sums) const {
    if (folds_scales())
      dot_wide_panel<true>(panel, own, sums);
    else
      dot_wide_panel<false>(panel, own, sums);
    if (scales_sums()) multiply_scales<WIDE_PANEL>(panel, 0, rows, sums);
  }

  template <bool FOLDS>
  __attribute__((noinline)) void dot_wide_panel(const WidePanel<S>& panel, uint32_t* own, float* sums) const {
    constexpr int64_t STRIDE = WIDE_PANEL * WORD_BYTES;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t i = 0; i < input_tiles(); ++i) {
      uint32_t* weight = own + i % 2 * TILE_ROWS * WIDE_PANEL;  // the tiles of one are read while the other is written
      widen<WIDE_PANEL, FOLDS>(panel, 0, i * TILE_ROWS, TILE_ROWS, weight);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // see TILE_LOAD
      TILE_LOAD(4, scratch + i * TILE_WORDS, TILE_ROW_BYTES);
      TILE_LOAD(5, weight, STRIDE);
      TILE_DOT(0, 4, 5);
      TILE_LOAD(6, weight + TILE_WIDTH, STRIDE);
      TILE_DOT(1, 4, 6);
      TILE_LOAD(7, weight + 2 * TILE_WIDTH, STRIDE);
      TILE_DOT(2, 4, 7);
      TILE_LOAD(5, weight + 3 * TILE_WIDTH, STRIDE);
      TILE_DOT(3, 4, 5);
    }
    TILE_STORE(0, sums, STRIDE);
    TILE_STORE(1, sums + TILE_WIDTH, STRIDE);
    TILE_STORE(2, sums + 2 * TILE_WIDTH, STRIDE);
    TILE_STORE(3, sums + 3 * TILE_WIDTH, STRIDE);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  // -- a group of rows by a chunk of panels, segment by segment of the inputs --

  void multiply_chunk(int64_t group, int64_t chunk, uint32_t* own) const {
    const int64_t first_panel = chunk * chunk_panels(), count = std::min(chunk_panels(), num_panels() - first_panel);
    const int64_t begin = num_blocks() * group / groups(), end = num_blocks() * (group + 1) / groups();
    float* sums = reinterpret_cast<float*>(own + SEGMENT * TILE_ROWS * PANEL);
    const auto output_of = [&](int64_t panel) {  // where gated, the panels after the first `count` are gated by those
      return panel < count ? (first_panel + panel) * PANEL : columns() + (first_panel + panel - count) * PANEL;
    };
    const int64_t segments = ceil_div(input_tiles(), SEGMENT);
    for (int64_t segment = 0; segment < segments; ++segment) {
      const int64_t first = input_tiles() * segment / segments, last = input_tiles() * (segment + 1) / segments;
      for (int64_t panel = 0; panel < sides() * count; ++panel) {
        const int64_t output = output_of(panel), pair = first * TILE_ROWS, pairs = (last - first) * TILE_ROWS;
        if (folds_scales())
          widen<PANEL, true>(panel_of(output), output % WIDE_PANEL, pair, pairs, own);
        else
          widen<PANEL, false>(panel_of(output), output % WIDE_PANEL, pair, pairs, own);
        std::atomic_signal_fence(std::memory_order_seq_cst);  // see TILE_LOAD
        const Segment part{own, first, last - first, segment > 0};
        for (int64_t block = begin; block < end; ++block) {
          float* block_sums = sums + panel * panel_sums() + (block - begin) * BLOCK_ROWS * PANEL;
          if (2 * block + 1 < row_tiles())
            multiply_block<2>(part, block, false, block_sums);
          else
            multiply_block<1>(part, block, false, block_sums);
        }
      }
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const int64_t row = begin * BLOCK_ROWS, num_rows = std::min(end * BLOCK_ROWS, rows) - row;
    for (int64_t panel = 0; scales_sums() && panel < sides() * count; ++panel) {
      const int64_t output = output_of(panel);
      multiply_scales<PANEL>(panel_of(output), output % WIDE_PANEL, num_rows, sums + panel * panel_sums());
    }
    for (int64_t panel = 0; panel < count; ++panel) {
      const float* of_panel = sums + panel * panel_sums();
      if (is_gated())
        finish_gated<PANEL>(of_panel, of_panel + count * panel_sums(), row, num_rows, output_of(panel));
      else
        finish<PANEL>(of_panel, row, num_rows, output_of(panel));
    }
  }

  // -- widening --

  // WIDTH outputs of a panel from `offset` on, `count` pairs of inputs from `first` on -> (count, WIDTH) words. Zeros
  // are the pairs that the panel lacks.
  template <int64_t WIDTH, bool FOLDS>
  static void widen(const WidePanel<S>& panel, int64_t offset, int64_t first, int64_t count, uint32_t* to) {
    constexpr int VECTORS_WIDE = WIDTH / LANES;
    const Table table = panel.template numbers<std::conditional_t<FOLDS, float, bf16>>();
    const int64_t end = std::min(first + count, panel.num_pairs);
    int64_t i = first;
    for (int64_t group = first / panel.group_pairs; i < end; ++group) {
      Floats scales[VECTORS_WIDE], zeros[VECTORS_WIDE];
      for (int v = 0; v < VECTORS_WIDE; ++v) {
        zeros[v] = panel.shifted_zeros(group, offset + v * LANES);
        scales[v] = FOLDS ? panel.group_scale(group, offset + v * LANES) : Floats{};
      }
      const int64_t until = std::min(end, panel.end(group));
      const uint8_t* pair = panel.pairs + i * PAIR_BYTES<S> + offset * OUTPUT_BYTES<S>;
      for (; i < until; ++i, to += WIDTH, pair += PAIR_BYTES<S>) {
        for (int64_t byte = 0; byte < WIDTH * PAIR_BYTES<S> / WIDE_PANEL; byte += LINE_BYTES)
          __builtin_prefetch(pair + AHEAD_BYTES + byte);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_WIDE; ++v) {
          const uint8_t* from = pair + v * LANES * OUTPUT_BYTES<S>;
          Words words;
          if constexpr (FOLDS) {
            const PairOfInputs weights = widened<S>(from, zeros[v], table);
            const PairOfInputs scaled{weights.first * scales[v], weights.second * scales[v]};
            words = HAS_BYTE_SCALES<S> ? bf16_words(scaled) : rounded_pairs(scaled);
          } else {
            words = exact_words<S>(from, zeros[v], table);
          }
          std::memcpy(to + v * LANES, &words, sizeof words);
        }
      }
    }
    std::fill(to, to + (first + count - std::max(i, first)) * WIDTH, 0u);
  }

  // (count, WIDTH) sums by the scales of a panel's only group, or by factors.
  template <int64_t WIDTH>
  void multiply_scales(const WidePanel<S>& panel, int64_t offset, int64_t count, float* sums) const {
    for (int64_t i = 0; i < WIDTH; i += LANES) {
      const Floats scale = folds_scales() ? load(panel.factors + offset + i) : panel.scale(0, offset + i);
      for (int64_t row = 0; row < count; ++row)
        store(sums + row * WIDTH + i, load(sums + row * WIDTH + i) * scale);
    }
  }
};

}  // namespace
