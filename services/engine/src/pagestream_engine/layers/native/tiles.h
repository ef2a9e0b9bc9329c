// Products of bfloat16 by AMX: TDPBF16PS multiplies a tile of x, 16 rows of 16 words, by a tile of a weight, 16 words
// of 16 outputs, and adds to a tile of 16 x 16 float32 sums.
//
// The order of additions, by Intel's description of the instruction: of the 32 inputs of a tile, the even ones are
// summed from zero by fused multiply-add, from first to last, and so are the odd ones; their sum is added to the
// element. Rounding is to nearest even, subnormal inputs and results count as zero. An element of a result is a chain
// of such steps over the inputs: nothing in it depends on the row's place in a tile, or on what the tile's other rows
// hold. Rows, inputs and outputs that a last tile lacks are zeros. vdpbf16ps, which adds each product to the element
// itself, gives other bits, so that every row goes through tiles, a single one too.
//
// With PAGESTREAM_TILE_MODEL the tiles are memory and the instructions are C++ of the same arithmetic, for processors
// without AMX: so the tests reach packing, tails and order everywhere.

#pragma once

#include <atomic>

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_WIDTH = 16;                          // words of a row
constexpr int64_t TILE_WORDS = TILE_ROWS * TILE_WIDTH;
constexpr int64_t TILE_ROW_BYTES = TILE_WIDTH * WORD_BYTES;

// -- the instructions --

#if defined(PAGESTREAM_TILE_MODEL)

struct ModelTile {
  uint32_t words[TILE_ROWS][TILE_WIDTH];
};
thread_local ModelTile model_tiles[8];

inline void model_load(int tile, const void* from, int64_t stride) {
  for (int64_t row = 0; row < TILE_ROWS; ++row)
    std::memcpy(model_tiles[tile].words[row], static_cast<const char*>(from) + row * stride, TILE_ROW_BYTES);
}

inline void model_store(int tile, void* to, int64_t stride) {
  for (int64_t row = 0; row < TILE_ROWS; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, model_tiles[tile].words[row], TILE_ROW_BYTES);
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float model_multiply_add(float x, float y, float sum) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(x, y, sum);
#else
  return sum + x * y;  // the product is exact, unless it is subnormal or overflows
#endif
}

__attribute__((noinline)) void model_dot_rows(ModelTile& sums, const ModelTile& x, const ModelTile& weight) {
  for (int64_t row = 0; row < TILE_ROWS; ++row) {
    float even[TILE_WIDTH] = {}, odd[TILE_WIDTH] = {};
    for (int64_t step = 0; step < TILE_ROWS; ++step) {
      const float first = as_float(x.words[row][step] << 16), second = as_float(x.words[row][step] & 0xffff0000u);
      for (int64_t i = 0; i < TILE_WIDTH; ++i) {
        even[i] = model_multiply_add(first, as_float(weight.words[step][i] << 16), even[i]);
        odd[i] = model_multiply_add(second, as_float(weight.words[step][i] & 0xffff0000u), odd[i]);
      }
    }
    for (int64_t i = 0; i < TILE_WIDTH; ++i) {
      const float sum = as_float(sums.words[row][i]) + (even[i] + odd[i]);
      std::memcpy(&sums.words[row][i], &sum, sizeof sum);
    }
  }
}

inline void model_dot(int sums, int x, int weight) {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);  // no exceptions, to nearest even; subnormal inputs and results are zero
  model_dot_rows(model_tiles[sums], model_tiles[x], model_tiles[weight]);
  _mm_setcsr(before);
#else
  model_dot_rows(model_tiles[sums], model_tiles[x], model_tiles[weight]);
#endif
}

struct TileScope {
  explicit TileScope(int64_t = TILE_ROWS) { std::memset(model_tiles, 0, sizeof model_tiles); }
};

#define TILE_ZERO(tile) std::memset(&model_tiles[tile], 0, sizeof(ModelTile))
#define TILE_LOAD(tile, from, stride) model_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) model_store(tile, to, stride)
#define TILE_DOT(sums, x, weight) model_dot(sums, x, weight)

#else

// Linux gives a process the registers when it asks; its threads, old and new, have them too.
inline bool acquire_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Whole tiles, all eight, in this thread; what the tiles held before is lost. With fewer rows than a tile has, those of
// sums, 0 to 3, and of x, 4, have so many: a product takes less time.
struct TileScope {
  explicit TileScope(int64_t few_rows = TILE_ROWS) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::fill_n(config.row_bytes, 8, TILE_ROW_BYTES);
    std::fill_n(config.rows, 8, TILE_ROWS);
    std::fill_n(config.rows, 5, few_rows);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // see TILE_LOAD
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
};

// Compilers need not know that the loads read memory: what has been written must be there by a fence before them.
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(sums, x, weight) _tile_dpbf16ps(sums, x, weight)

#endif

// -- the product --

// Weights are packed in panels of two tiles' outputs, (steps, 32) words each, the steps filled up to whole tiles; x in
// tiles, row tile by row tile. A block multiplies up to two row tiles by a panel: four chains of sums hide the
// instruction's latency of 52 cycles, at 16 cycles each.
struct TileProduct : Product<bf16> {
  static constexpr int64_t PANEL = 2 * TILE_WIDTH;        // outputs
  static constexpr int64_t PANEL_WIDTH = PANEL;
  static constexpr int64_t BLOCK_ROWS = 2 * TILE_ROWS;
  static constexpr int64_t SEGMENT = 16;                  // tiles of inputs: 32 KiB of a panel, which L1 keeps
  static constexpr int64_t GROUP_BYTES = 384 << 10;       // of rows that meet a panel before the next one: L2 keeps them
  static constexpr int64_t MAX_GROUP_BLOCKS = 16;         // their sums take 64 KiB
  static constexpr int64_t AHEAD = 4;                     // tiles of inputs from a panel's prefetch to its use

  static int64_t input_tiles_of(int64_t inputs) { return ceil_div(inputs, INPUTS_OF_WORD<bf16> * TILE_WIDTH); }
  static int64_t panel_words_of(int64_t inputs) { return input_tiles_of(inputs) * TILE_ROWS * PANEL; }
  static int64_t packed_words(int64_t inputs, int64_t outputs) {
    return ceil_div(outputs, PANEL) * panel_words_of(inputs);
  }

  static void pack_panel(const bf16* weight, int64_t inputs, int64_t outputs, int64_t output, uint32_t* to) {
    const int64_t steps = input_tiles_of(inputs) * TILE_ROWS;
    pack(weight + output * inputs, inputs, std::min(PANEL, outputs - output), steps, PANEL, to);
  }

  static void pack_weight(uint32_t* to, const bf16* weight, int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < ceil_div(outputs, PANEL); ++panel)
      pack_panel(weight, inputs, outputs, panel * PANEL, to + panel * panel_words_of(inputs));
  }

  int64_t input_tiles() const { return input_tiles_of(inputs); }
  int64_t row_tiles() const { return ceil_div(rows, TILE_ROWS); }
  int64_t row_tile_words() const { return input_tiles() * TILE_WORDS; }
  int64_t num_blocks() const { return ceil_div(rows, BLOCK_ROWS); }
  int64_t num_panels() const { return ceil_div(columns(), PANEL); }  // where gated, of gates
  int64_t num_groups() const {
    const int64_t blocks = GROUP_BYTES / (2 * row_tile_words() * WORD_BYTES);  // of a group
    return ceil_div(num_blocks(), std::clamp<int64_t>(blocks, 1, MAX_GROUP_BLOCKS));
  }
  int64_t first_block(int64_t group) const { return num_blocks() * group / num_groups(); }

  // Scratch: x in tiles; then of each thread the sums of a group, where gated twice, and a panel if the weight is not
  // packed.
  int64_t sums_words() const { return ceil_div(num_blocks(), num_groups()) * BLOCK_ROWS * PANEL; }
  int64_t own_words() const { return (is_gated() ? 2 : 1) * sums_words() + (weight ? panel_words_of(inputs) : 0); }
  int64_t scratch_words() const { return row_tiles() * row_tile_words() + threads * own_words(); }

  void run() const {
    const int64_t num_items = num_groups() * num_panels();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < row_tiles(); ++tile) pack_rows(tile, scratch + tile * row_tile_words());
      uint32_t* own = scratch + row_tiles() * row_tile_words() + omp_get_thread_num() * own_words();
      uint32_t* own_panel = own + sums_words();  // a gated product has none
      float* sums = reinterpret_cast<float*>(own);
      float* ups = sums + sums_words();
      const TileScope scope;
#pragma omp for schedule(static) nowait
      for (int64_t item = 0; item < num_items; ++item) {
        const int64_t group = item / num_panels(), output = item % num_panels() * PANEL;
        if (weight) pack_panel(weight, inputs, outputs, output, own_panel);
        std::atomic_signal_fence(std::memory_order_seq_cst);  // see TILE_LOAD
        const uint32_t* panel = weight ? own_panel : packed + output / PANEL * panel_words_of(inputs);
        if (!is_gated()) {
          multiply_group(group, panel, sums, [&](const float* block_sums, int64_t row, int64_t count) {
            finish<PANEL>(block_sums, row, count, output);
          });
          continue;
        }
        multiply_group(group, panel, sums, [](const float*, int64_t, int64_t) {});
        const uint32_t* up_panel = panel + columns() / PANEL * panel_words_of(inputs);
        multiply_group(group, up_panel, ups, [&](const float* block_sums, int64_t row, int64_t count) {
          finish_gated<PANEL>(sums + (block_sums - ups), block_sums, row, count, output);
        });
      }
    }
  }

  // A row tile of x, (16, inputs) -> (input tiles, 16, 16) words.
  void pack_rows(int64_t tile, uint32_t* to) const {
    constexpr int64_t INPUTS = INPUTS_OF_WORD<bf16> * TILE_WIDTH;
    const int64_t first = tile * TILE_ROWS, count = std::min(TILE_ROWS, rows - first), whole = inputs / INPUTS;
    if (count < TILE_ROWS || whole < input_tiles()) std::memset(to, 0, row_tile_words() * WORD_BYTES);
    for (int64_t row = 0; row < count; ++row) {
      const bf16* from = x + (first + row) * inputs;
      for (int64_t i = 0; i < whole; ++i)
        std::memcpy(to + i * TILE_WORDS + row * TILE_WIDTH, from + i * INPUTS, TILE_ROW_BYTES);
      std::memcpy(to + whole * TILE_WORDS + row * TILE_WIDTH, from + whole * INPUTS,
                  (inputs - whole * INPUTS) * sizeof(bf16));
    }
  }

  // A group's rows by one panel, segment by segment of the inputs: between segments the sums lie in memory. Calls
  // done(sums, first row, rows) for each block.
  template <class Done>
  void multiply_group(int64_t group, const uint32_t* panel, float* sums, Done done) const {
    const int64_t begin = first_block(group), end = first_block(group + 1);
    const int64_t segments = ceil_div(input_tiles(), SEGMENT);
    for (int64_t segment = 0; segment < segments; ++segment) {
      const int64_t first = input_tiles() * segment / segments, last = input_tiles() * (segment + 1) / segments;
      const Segment part{panel + first * TILE_ROWS * PANEL, first, last - first, segment > 0};
      for (int64_t block = begin; block < end; ++block) {
        float* block_sums = sums + (block - begin) * BLOCK_ROWS * PANEL;
        const bool prefetch = block == begin;  // the next blocks find the segment in L1
        if (2 * block + 1 < row_tiles())
          multiply_block<2>(part, block, prefetch, block_sums);
        else
          multiply_block<1>(part, block, prefetch, block_sums);
        const int64_t row = block * BLOCK_ROWS;
        if (segment == segments - 1) done(block_sums, row, std::min(BLOCK_ROWS, rows - row));
      }
    }
  }

  // Tiles of inputs of a panel that follow each other.
  struct Segment {
    const uint32_t* panel;  // (input_tiles * 16, PANEL)
    int64_t first;          // input tile
    int64_t input_tiles;
    bool continues;         // from sums of the segment before
  };

  // Row tiles of a block by a segment of a panel; adds to sums (BLOCK_ROWS, PANEL).
  template <int COUNT>
  __attribute__((noinline)) void multiply_block(const Segment& segment, int64_t block, bool prefetch, float* sums) const {
    constexpr int64_t STRIDE = PANEL * WORD_BYTES;
    const uint32_t* upper = scratch + 2 * block * row_tile_words() + segment.first * TILE_WORDS;
    const uint32_t* lower = upper + row_tile_words();
    const uint32_t* panel = segment.panel;
    float* lower_sums = sums + TILE_ROWS * PANEL;
    if (segment.continues) {
      TILE_LOAD(0, sums, STRIDE);
      TILE_LOAD(1, sums + TILE_WIDTH, STRIDE);
      if constexpr (COUNT == 2) {
        TILE_LOAD(2, lower_sums, STRIDE);
        TILE_LOAD(3, lower_sums + TILE_WIDTH, STRIDE);
      }
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int64_t i = 0; i < segment.input_tiles; ++i, panel += TILE_ROWS * PANEL) {
      if (prefetch)
        for (int64_t word = 0; word < TILE_ROWS * PANEL; word += TILE_WIDTH)
          __builtin_prefetch(panel + AHEAD * TILE_ROWS * PANEL + word);
      TILE_LOAD(4, upper + i * TILE_WORDS, TILE_ROW_BYTES);
      TILE_LOAD(6, panel, STRIDE);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, panel + TILE_WIDTH, STRIDE);
      TILE_DOT(1, 4, 7);
      if constexpr (COUNT == 2) {
        TILE_LOAD(5, lower + i * TILE_WORDS, TILE_ROW_BYTES);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
      }
    }
    TILE_STORE(0, sums, STRIDE);
    TILE_STORE(1, sums + TILE_WIDTH, STRIDE);
    if constexpr (COUNT == 2) {
      TILE_STORE(2, lower_sums, STRIDE);
      TILE_STORE(3, lower_sums + TILE_WIDTH, STRIDE);
    }
  }
};

}  // namespace
