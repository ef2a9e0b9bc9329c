// What LoRA adapters add to the product of a linear on a CPU: y[row] += (x[row] a^T) b * scale, each row by its own
// adapter's matrices.
//
// Rows come grouped by adapter, so that each matrix is read once for all rows that want it. Every sum has one order,
// on vectors of 16: over the inputs by lane, then over the lanes, then over the ranks. All products are fused with the
// sum that they go to, at each level of instructions (levels.py). A row's bits depend neither on the rows beside it, nor
// on threads, nor on that level.
//
//   shrink   hidden[row] = x[row] a^T, float32
//   expand   y[row] = round(y[row] + hidden[row] b * scale)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t W = 16, COLUMN_TASK = 256, ROW_TASK = 32;
#if defined(__AVX512F__)
constexpr int ROWS = 4, RANKS = 4, COLUMNS = 4;  // of a register tile: of 32 registers, 16 accumulate
#else
constexpr int ROWS = 2, RANKS = 2, COLUMNS = 2;  // a vector is two or four registers of 16 or 32
#endif
typedef float Vec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

// The matrices of one module, and the outputs of the linear that are its own. Laid out as PART in library.py.
struct Part {
  const void* a;  // (rank, inputs)
  const void* b;  // (rank, outputs)
  int64_t rank;   // 0: the adapter has none for this module
  int64_t first_output, outputs;
  double scale;
};

// x * y + sum, rounded once. A compiler that may contract by itself does so in some copies of a loop and not in others.
inline Vec fused(Vec x, Vec y, Vec sum) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
  struct Halves { __m256 low, high; } a, b, c;
  std::memcpy(&a, &x, sizeof x), std::memcpy(&b, &y, sizeof y), std::memcpy(&c, &sum, sizeof sum);
  c = {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  std::memcpy(&sum, &c, sizeof sum);
  return sum;
#else
  for (int64_t lane = 0; lane < W; ++lane) sum[lane] = __builtin_fmaf(x[lane], y[lane], sum[lane]);
  return sum;
#endif
}
inline Vec fused(Vec x, float y, Vec sum) { return fused(x, y - Vec{}, sum); }

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Vec load(const bf16* from) {
  HVec half;
  std::memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, UVec) << 16);
}
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Vec x) {  // rounds to nearest even; a NaN stays one
  const UVec bits = (UVec)x, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const HVec half = __builtin_convertvector((x == x ? rounded : (bits | 0x400000u)) >> 16, HVec);
  std::memcpy(to, &half, sizeof half);
}

// `count` elements, then zeros.
template <typename T>
Vec load(const T* from, int64_t count) {
  if (count >= W) return load(from);
  T lanes[W] = {};
  std::copy_n(from, count, lanes);
  return load(lanes);
}
template <typename T>
void store(T* to, Vec x, int64_t count) {
  if (count >= W) return store(to, x);
  T lanes[W];
  store(lanes, x);
  std::copy_n(lanes, count, to);
}

// Products of M rows of x with N rows of a: `to` of a row is `to_stride` behind that of the one before.
template <int M, int N, typename T>
void dot(const T* const* x, const T* a, int64_t inputs, float* to, int64_t to_stride) {
  Vec sums[M][N] = {};
  for (int64_t i = 0; i < inputs; i += W) {
    const int64_t left = inputs - i;
    const bool is_whole = left >= W;
    Vec rows[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) rows[m] = is_whole ? load(x[m] + i) : load(x[m] + i, left);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Vec weight = is_whole ? load(a + n * inputs + i) : load(a + n * inputs + i, left);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][n] = fused(rows[m], weight, sums[m][n]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float lanes[W];
      store(lanes, sums[m][n]);
      for (int64_t width = W / 2; width; width /= 2)
        for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
      to[m * to_stride + n] = lanes[0];
    }
}

// y += hidden b * scale for M rows of `count` outputs, C vectors of them; IS_WHOLE: all are full.
template <int M, int C, bool IS_WHOLE, typename T>
void add_product(T* const* y, const float* const* hidden, const T* b, const Part& part, int64_t count) {
  Vec sums[M][C] = {};
  const auto read = [count](const T* from, int c) {
    if (IS_WHOLE) return load(from + c * W);
    return c * W < count ? load(from + c * W, count - c * W) : Vec{};
  };
  for (int64_t r = 0; r < part.rank; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vec weight = read(b + r * part.outputs, c);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][c] = fused(weight, hidden[m][r], sums[m][c]);
    }
  }
  const float scale = float(part.scale);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vec sum = fused(sums[m][c], scale, read(y[m], c));
      if (IS_WHOLE) {
        store(y[m] + c * W, sum);
      } else if (c * W < count) {
        store(y[m] + c * W, sum, count - c * W);
      }
    }
}

// Rows `first` to `last` of the order, which belong to one adapter, and what they have of one module.
struct Task {
  const Part* part;
  int64_t first, last;
  int64_t begin, end;  // ranks of a shrink, outputs of an expand
  int64_t hidden_at;   // of the part's ranks among those of the linear
};

template <typename T>
struct Step {
  T* y;
  const T* x;
  int64_t y_stride, x_stride, inputs;
  const Part* table;  // (slots, parts)
  int64_t parts;
  const int64_t* order;   // (rows,): rows of x and y, grouped by adapter
  const int64_t* starts;  // (groups + 1,): of each group in the order
  const int64_t* slots;   // (groups,): of its adapter in the table
  int64_t groups;

  void run(int threads) const {
    std::vector<Task> shrinks, expands;
    int64_t width = 0;
    for (int64_t g = 0; g < groups; ++g) {
      int64_t hidden_at = 0;
      for (int64_t p = 0; p < parts; ++p) {
        const Part* part = table + slots[g] * parts + p;
        for (int64_t first = starts[g]; part->rank && first < starts[g + 1]; first += ROW_TASK) {
          const int64_t last = std::min(first + ROW_TASK, starts[g + 1]);
          for (int64_t r = 0; r < part->rank; r += RANKS)
            shrinks.push_back({part, first, last, r, std::min(r + RANKS, part->rank), hidden_at});
          for (int64_t o = 0; o < part->outputs; o += COLUMN_TASK)
            expands.push_back({part, first, last, o, std::min(o + COLUMN_TASK, part->outputs), hidden_at});
        }
        hidden_at += part->rank;
      }
      width = std::max(width, hidden_at);
    }
    if (shrinks.empty()) return;
    std::vector<float> hidden(starts[groups] * width);
    const int64_t num_shrinks = shrinks.size(), num_expands = expands.size();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < num_shrinks; ++i) shrink(shrinks[i], hidden.data(), width);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < num_expands; ++i) expand(expands[i], hidden.data(), width);
    }
  }

  void shrink(const Task& task, float* hidden, int64_t width) const {
    const T* a = static_cast<const T*>(task.part->a) + task.begin * inputs;
    float* to = hidden + task.first * width + task.hidden_at + task.begin;
    int64_t i = task.first;
    for (; i + ROWS <= task.last; i += ROWS, to += ROWS * width) shrink_rows<ROWS>(i, a, task, to, width);
    for (; i < task.last; ++i, to += width) shrink_rows<1>(i, a, task, to, width);
  }

  template <int M>
  void shrink_rows(int64_t i, const T* a, const Task& task, float* to, int64_t width) const {
    const T* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x + order[i + m] * x_stride;
    if (task.end - task.begin == RANKS) return dot<M, RANKS>(rows, a, inputs, to, width);
    for (int64_t r = 0; r < task.end - task.begin; ++r) dot<M, 1>(rows, a + r * inputs, inputs, to + r, width);
  }

  void expand(const Task& task, const float* hidden, int64_t width) const {
    for (int64_t first = task.begin; first < task.end; first += COLUMNS * W) {
      const int64_t count = std::min(COLUMNS * W, task.end - first);
      int64_t i = task.first;
      for (; i + ROWS <= task.last; i += ROWS) expand_rows<ROWS>(i, first, count, task, hidden, width);
      for (; i < task.last; ++i) expand_rows<1>(i, first, count, task, hidden, width);
    }
  }

  template <int M>
  void expand_rows(int64_t i, int64_t first, int64_t count, const Task& task, const float* hidden,
                   int64_t width) const {
    const Part& part = *task.part;
    T* rows[M];
    const float* from[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = y + order[i + m] * y_stride + part.first_output + first;
      from[m] = hidden + (i + m) * width + task.hidden_at;
    }
    const T* b = static_cast<const T*>(part.b) + first;
    if (count == COLUMNS * W) return add_product<M, COLUMNS, true>(rows, from, b, part, count);
    add_product<M, COLUMNS, false>(rows, from, b, part, count);
  }
};

}  // namespace

extern "C" {
void lora_float32(float* y, const float* x, int64_t y_stride, int64_t x_stride, int64_t inputs, const Part* table,
                  int64_t parts, const int64_t* order, const int64_t* starts, const int64_t* slots, int64_t groups,
                  int threads) {
  Step<float>{y, x, y_stride, x_stride, inputs, table, parts, order, starts, slots, groups}.run(threads);
}
void lora_bfloat16(bf16* y, const bf16* x, int64_t y_stride, int64_t x_stride, int64_t inputs, const Part* table,
                   int64_t parts, const int64_t* order, const int64_t* starts, const int64_t* slots, int64_t groups,
                   int threads) {
  Step<bf16>{y, x, y_stride, x_stride, inputs, table, parts, order, starts, slots, groups}.run(threads);
}
}
