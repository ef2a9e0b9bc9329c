// What LoRA adapters add to the product of a linear on a CPU: y[row] += (x[row] a^T) b * scale, each row by its own
// adapter's matrices.
//
// Rows come grouped by adapter, so that each matrix is read once for all rows that want it. Every sum has one order,
// on vectors of 16 and without contraction: over the inputs by lane, then over the lanes, then over the ranks. A row's
// bits depend neither on the rows beside it, nor on threads, nor on the level of instructions.
//
//   shrink   hidden[row] = x[row] a^T, float32
//   expand   y[row] = round(y[row] + hidden[row] b * scale)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t W = 16, RANKS = 4, COLUMNS = 4, COLUMN_TASK = 256, ROW_TASK = 32;
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

// Products of a row with N rows of a.
template <int N, typename T>
void dot(const T* x, const T* a, int64_t inputs, float* to) {
  Vec sums[N] = {};
  for (int64_t i = 0; i < inputs; i += W) {
    const Vec input = load(x + i, inputs - i);
    for (int n = 0; n < N; ++n) sums[n] += input * load(a + n * inputs + i, inputs - i);
  }
  for (int n = 0; n < N; ++n) {
    float lanes[W];
    store(lanes, sums[n]);
    for (int64_t width = W / 2; width; width /= 2)
      for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    to[n] = lanes[0];
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
    for (int64_t i = task.first; i < task.last; ++i) {
      const T* row = x + order[i] * x_stride;
      float* to = hidden + i * width + task.hidden_at + task.begin;
      if (task.end - task.begin == RANKS) {
        dot<RANKS>(row, a, inputs, to);
      } else {
        for (int64_t r = 0; r < task.end - task.begin; ++r) dot<1>(row, a + r * inputs, inputs, to + r);
      }
    }
  }

  void expand(const Task& task, const float* hidden, int64_t width) const {
    const Part& part = *task.part;
    const T* b = static_cast<const T*>(part.b);
    const float scale = float(part.scale);
    for (int64_t first = task.begin; first < task.end; first += COLUMNS * W) {
      const int64_t last = std::min(first + COLUMNS * W, task.end);
      for (int64_t i = task.first; i < task.last; ++i) {
        const float* from = hidden + i * width + task.hidden_at;
        T* row = y + order[i] * y_stride + part.first_output;
        Vec sums[COLUMNS] = {};
        for (int64_t r = 0; r < part.rank; ++r)
          for (int64_t c = 0, o = first; o < last; ++c, o += W)
            sums[c] += load(b + r * part.outputs + o, last - o) * from[r];
        for (int64_t c = 0, o = first; o < last; ++c, o += W)
          store(row + o, load(row + o, last - o) + sums[c] * scale, last - o);
      }
    }
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
