// The CPU's kernels: attention over the paged cache, and the small steps between the matrix products.
//
// Plain C++ on the compilers' vector extensions (GCC >= 9, Clang), so that one source serves AVX2, AVX-512 and NEON.
// All arithmetic is in float32; bfloat16 and float16 are widened on load and rounded to nearest even on store. Every
// sequence (and every query row) is reduced in a fixed order, whatever else is in the batch, wherever a chunk of its
// prompt begins, and by decode as by prefill. Layouts are those of attention/kv_store.py: a block of a layer's cache is
// (num_kv_heads, block_size, head_dim), contiguous.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t W = 16;  // floats a vector
typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x7fff + ((bits >> 16) & 1);
  to->bits = std::isnan(x) ? 0x7fc0 : uint16_t(bits >> 16);
}
template <typename T>
inline float rounded(float x) {
  T narrow;
  store(&narrow, x);
  return widen(narrow);
}

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
inline void store(bf16* to, Vec x) {
  UVec bits = (UVec)x;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bits = (x == x) ? bits : (bits & 0) + 0x7fc0;  // a NaN stays one
  HVec half = __builtin_convertvector(bits, HVec);
  std::memcpy(to, &half, sizeof half);
}

// float16: by instructions where the compiler's target has them, by exact arithmetic on the bits elsewhere.
inline Vec load(const fp16* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  Vec x;
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + 1));
  std::memcpy(&x, &low, sizeof low);
  std::memcpy((char*)&x + sizeof low, &high, sizeof high);
  return x;
#else
  HVec half;
  std::memcpy(&half, from, sizeof half);
  const UVec bits = __builtin_convertvector(half, UVec), size = bits & 0x7fff;
  UVec wide = (UVec)((Vec)(size << 13) * 0x1p112f);  // the exponent's bias differs by 112
  wide = size >= 0x7c00 ? (size << 13) | 0x7f800000 : wide;
  return (Vec)(wide | (bits & 0x8000) << 16);
#endif
}
inline void store(fp16* to, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  __m256 part[2];
  std::memcpy(part, &x, sizeof part);
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128((__m128i*)to + i, _mm256_cvtps_ph(part[i], _MM_FROUND_TO_NEAREST_INT));
#else
  const UVec bits = (UVec)x, size = bits & 0x7fffffff;
  const UVec normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  const UVec subnormal = (UVec)((Vec)size + 0.5f) - 0x3f000000;  // 0.5 aligns the bits that stay, and rounds
  UVec half = size < 0x38800000 ? subnormal : normal;
  half = size >= 0x477ff000 ? (size > 0x7f800000 ? (size & 0) + 0x7e00 : (size & 0) + 0x7c00) : half;
  const HVec narrow = __builtin_convertvector(half | (bits >> 16 & 0x8000), HVec);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}
inline float widen(fp16 x) {
  const fp16 same[W] = {x};
  return load(same)[0];
}
inline void store(fp16* to, float x) {
  fp16 same[W];
  store(same, (Vec){x});
  *to = same[0];
}

inline Vec splat(float x) { return (Vec){} + x; }
template <typename T>
inline Vec rounded(Vec x) {
  T narrow[W];
  store(narrow, x);
  return load(narrow);
}
inline float sum(Vec x) {
  float lane[W];
  std::memcpy(lane, &x, sizeof x);
  for (int64_t width = W / 2; width; width /= 2)
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IVec){__VA_ARGS__})
#endif

// In-place transpose of a 16 x 16 tile: four perfect shuffles of the rows.
inline void transpose(Vec* rows) {
  for (int round = 0; round < 4; ++round) {
    Vec next[W];
    for (int64_t i = 0; i < W / 2; ++i) {
      const Vec a = rows[i], b = rows[i + W / 2];
      next[2 * i] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, next, sizeof next);
  }
}

// Lane t of the result is the sum of rows[t]: a tree over the 16 rows.
inline Vec sums(Vec* rows) {
  for (int64_t i = 0; i < 8; ++i) {
    const Vec a = rows[2 * i], b = rows[2 * i + 1];
    rows[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int64_t i = 0; i < 4; ++i) {
    const Vec a = rows[2 * i], b = rows[2 * i + 1];
    rows[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int64_t i = 0; i < 2; ++i) {
    const Vec a = rows[2 * i], b = rows[2 * i + 1];
    rows[i] = SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
              SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  return SHUFFLE(rows[0], rows[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         SHUFFLE(rows[0], rows[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// exp by 2^n * 2^f, |f| <= 1/2, a polynomial for 2^f (relative error about 1e-7); below -87 it is 0.
inline Vec exponential(Vec x) {
  Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : (x > splat(88.0f) ? splat(88.0f) : x);
  Vec scaled = clamped * 1.44269504088896341f;
  Vec shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest whole number
  IVec whole = (IVec)shifted - 0x4b400000;
  Vec f = scaled - (shifted - 12582912.0f);
  Vec p = splat(1.5403530393381608e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910071e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  Vec power = (Vec)((whole + 127) << 23);
  return x < splat(-87.0f) ? splat(0.0f) : p * power;
}

inline Vec hyperbolic_tangent(Vec x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// Absolute error below 5e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline Vec error_function(Vec x) {
  const Vec size = x < 0.0f ? -x : x, place = 1.0f / (size * 0.3275911f + 1.0f);
  Vec p = splat(1.061405429f);
  p = p * place - 1.453152027f;
  p = p * place + 1.421413741f;
  p = p * place - 0.284496736f;
  p = p * place + 0.254829592f;
  const Vec rest = 1.0f - p * place * exponential(-(size * size));
  return x < 0.0f ? -rest : rest;
}

// -- rms norm --

template <typename T>
void norm_row(T* out, const T* x, T* residual, const T* weight, int64_t dim, float eps) {
  const int64_t whole = dim / W * W;
  Vec squares = splat(0.0f);
  float rest = 0.0f;
  for (int64_t i = 0; i < whole; i += W) {
    Vec value = load(x + i);
    if (residual) {
      store(residual + i, value + load(residual + i));
      value = load(residual + i);
    }
    squares += value * value;
  }
  for (int64_t i = whole; i < dim; ++i) {
    float value = widen(x[i]);
    if (residual) {
      store(residual + i, value + widen(residual[i]));
      value = widen(residual[i]);
    }
    rest += value * value;
  }
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / float(dim) + eps);
  const T* from = residual ? residual : x;
  for (int64_t i = 0; i < whole; i += W) store(out + i, rounded<T>(load(from + i) * factor) * load(weight + i));
  for (int64_t i = whole; i < dim; ++i) store(out + i, rounded<T>(widen(from[i]) * factor) * widen(weight[i]));
}

template <typename T>
void rms_norm(T* out, const T* x, T* residual, const T* weight, int64_t outer, int64_t inner, int64_t outer_stride,
              int64_t inner_stride, int64_t dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (outer * inner * dim > 16384)
  for (int64_t row = 0; row < outer * inner; ++row) {
    const int64_t from = row / inner * outer_stride + row % inner * inner_stride;
    norm_row(out + row * dim, x + from, residual ? residual + from : nullptr, weight, dim, eps);
  }
}

// -- activation(gate) * up --

enum Activation { SILU, GELU, GELU_TANH };

template <Activation A>
inline Vec activated(Vec x) {
  if constexpr (A == SILU) return x / (exponential(-x) + 1.0f);
  if constexpr (A == GELU) return x * 0.5f * (error_function(x * 0.70710678f) + 1.0f);
  return x * 0.5f * (hyperbolic_tangent((x * x * x * 0.044715f + x) * 0.79788456f) + 1.0f);
}
template <Activation A>
inline float activated(float x) {
  if constexpr (A == SILU) return x / (1.0f + std::exp(-x));
  if constexpr (A == GELU) return x * 0.5f * (std::erf(x * 0.70710678f) + 1.0f);
  return x * 0.5f * (std::tanh((x * x * x * 0.044715f + x) * 0.79788456f) + 1.0f);
}

template <Activation A, typename T>
void gate_and_mul(T* out, const T* gate_up, int64_t rows, int64_t dim, int threads) {
  const int64_t whole = dim / W * W;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * dim;
    const T* up = gate + dim;
    T* to = out + row * dim;
    for (int64_t i = 0; i < whole; i += W) store(to + i, rounded<T>(activated<A>(load(gate + i))) * load(up + i));
    for (int64_t i = whole; i < dim; ++i) store(to + i, rounded<T>(activated<A>(widen(gate[i]))) * widen(up[i]));
  }
}

// -- rotary embedding and the write to the cache --

// A head's first `dim` elements; the others are the caller's.
template <typename T>
void rotate_halves(T* to, const T* from, const float* cos, int64_t dim) {
  const int64_t half = dim / 2, whole = half / W * W;
  const float* sin = cos + half;
  for (int64_t i = 0; i < whole; i += W) {
    const Vec a = load(from + i), b = load(from + half + i), c = load(cos + i), s = load(sin + i);
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  for (int64_t i = whole; i < half; ++i) {
    const float a = widen(from[i]), b = widen(from[half + i]);
    store(to + i, a * cos[i] - b * sin[i]);
    store(to + half + i, b * cos[i] + a * sin[i]);
  }
}

template <typename T>
void rotate_pairs(T* to, const T* from, const float* cos, int64_t dim) {
  const int64_t half = dim / 2;
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(from[2 * i]), b = widen(from[2 * i + 1]);
    store(to + 2 * i, a * cos[i] - b * sin[i]);
    store(to + 2 * i + 1, b * cos[i] + a * sin[i]);
  }
}

struct Rotation {
  const float* cos_sin;  // (positions, dim)
  int64_t dim;           // 0: nothing turns
  bool interleaved;

  template <typename T>
  void apply(T* to, const T* from, int64_t position) const {
    const float* cos = cos_sin + position * dim;
    if (interleaved)
      rotate_pairs(to, from, cos, dim);
    else
      rotate_halves(to, from, cos, dim);
  }
};

// Where keys and values go: blocks of (kv_heads, block_size, head_dim), `block_stride` elements apart.
template <typename T>
struct Target {
  T* keys;
  T* values;
  const int64_t* slots;
  int64_t kv_heads, head_dim, block_size, block_stride;
};

template <typename T>
void rope_and_cache(T* query, const T* key, const T* value, const int64_t* positions, const Rotation& rotation,
                    const Target<T>& target, int64_t tokens, int64_t heads, int64_t query_stride, int64_t key_stride,
                    int64_t value_stride, int threads) {
  const int64_t dim = target.head_dim, rest = dim - rotation.dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 8)
  for (int64_t token = 0; token < tokens; ++token) {
    if (rotation.dim)
      for (int64_t head = 0; head < heads; ++head) {
        T* row = query + token * query_stride + head * dim;
        rotation.apply(row, row, positions[token]);
      }
    const int64_t slot = target.slots[token], block = slot / target.block_size, offset = slot % target.block_size;
    for (int64_t head = 0; head < target.kv_heads; ++head) {
      const int64_t to = block * target.block_stride + (head * target.block_size + offset) * dim;
      const T* from = key + token * key_stride + head * dim;
      if (rotation.dim) rotation.apply(target.keys + to, from, positions[token]);
      std::memcpy(target.keys + to + rotation.dim, from + rotation.dim, rest * sizeof(T));
      std::memcpy(target.values + to, value + token * value_stride + head * dim, dim * sizeof(T));
    }
  }
}

// -- attention --

// What decode and prefill share. `tables` is (rows, table_stride); blocks are `block_stride` elements apart.
struct Cache {
  const void* keys;
  const void* values;
  const int32_t* tables;
  int64_t table_stride, heads, kv_heads, dim, block_size, block_stride;

  int64_t place(int64_t table_row, int64_t token, int64_t kv_head) const {
    const int64_t block = tables[table_row * table_stride + token / block_size];
    return block * block_stride + kv_head * block_size * dim;
  }
};

// An AttentionSpec: no soft cap is 0, no window is the largest number, no sinks are null.
struct Options {
  float scale, soft_cap;
  int64_t window;
  const float* sinks;

  // The first token that the query token before `end` sees.
  int64_t begin(int64_t end) const { return end > window ? end - window : 0; }
  float sink(int64_t head) const { return sinks ? sinks[head] : -INFINITY; }
};

// `count` rows of V vectors as floats, times `scale`.
template <int64_t V, typename T>
void widen_rows(float* to, const T* from, int64_t count, float scale) {
  for (int64_t i = 0; i < count * V; ++i) store(to + i * W, load(from + i * W) * scale);
}

// 16 keys or values from token `first` on, as floats: a pointer into the cache, or to `scratch`. Before `begin` and
// from `end` on the scratch repeats the nearest token between them, whose weight there is zero: other places of a block
// are not read.
template <int64_t V, typename T>
inline const float* sixteen(const T* base, const Cache& cache, int64_t table_row, int64_t kv_head, int64_t first,
                            int64_t begin, int64_t end, float* scratch) {
  constexpr int64_t dim = V * W;
  const int64_t offset = first % cache.block_size;
  const bool inside = offset + W <= cache.block_size && first >= begin && first + W <= end;
  if (inside) {
    const T* rows = base + cache.place(table_row, first, kv_head) + offset * dim;
    if constexpr (std::is_same_v<T, float>) return rows;
    widen_rows<V>(scratch, rows, W, 1.0f);
    return scratch;
  }
  for (int64_t t = 0; t < W; ++t) {
    const int64_t token = std::max(begin, std::min(first + t, end - 1));
    const T* row = base + cache.place(table_row, token, kv_head) + token % cache.block_size * dim;
    widen_rows<V>(scratch + t * dim, row, 1, 1.0f);
  }
  return scratch;
}

// Softmax of one row of `count` scores in place, of which the first `hidden` get no weight; returns 1 / sum. The
// weights are left unnormalised; up to a whole vector, what lies behind them is overwritten. Never inlined: decode and
// prefill must run the same instructions.
__attribute__((noinline)) float softmax(float* scores, int64_t hidden, int64_t count, float soft_cap, float sink) {
  const int64_t whole = count / W * W;
  if (soft_cap != 0.0f)
    for (int64_t i = 0; i < count; i += W)
      store(scores + i, hyperbolic_tangent(load(scores + i) / soft_cap) * soft_cap);
  std::fill(scores, scores + hidden, -INFINITY);
  float largest = sink;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
  Vec total = splat(0.0f);
  for (int64_t i = 0; i < whole; i += W) {
    const Vec weight = exponential(load(scores + i) - largest);
    store(scores + i, weight);
    total += weight;
  }
  float rest = 0.0f;
  for (int64_t i = whole; i < count; ++i) rest += scores[i] = std::exp(scores[i] - largest);
  return 1.0f / (sum(total) + rest + std::exp(sink - largest));
}

// P vectors of totals[r] += sum over t of weights[r][t] * values[t]: R rows, `count` tokens, all totals in registers.
template <int64_t R, int64_t P>
inline void mix_part(float* totals, const float* weights, int64_t stride, const float* values, int64_t count,
                     int64_t dim) {
  Vec total[R][P];
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < P; ++i) total[r][i] = load(totals + r * dim + i * W);
  for (int64_t t = 0; t < count; ++t) {
    Vec value[P];
    for (int64_t i = 0; i < P; ++i) value[i] = load(values + t * dim + i * W);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < P; ++i) total[r][i] += value[i] * weights[r * stride + t];
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < P; ++i) store(totals + r * dim + i * W, total[r][i]);
}

template <int64_t R, int64_t V>
inline void mix_rows(float* totals, const float* weights, int64_t stride, const float* values, int64_t count) {
  constexpr int64_t P = 4, rest = V % P;
  for (int64_t part = 0; part + P <= V; part += P)
    mix_part<R, P>(totals + part * W, weights, stride, values + part * W, count, V * W);
  if constexpr (rest != 0) {
    constexpr int64_t done = (V - rest) * W;
    mix_part<R, rest>(totals + done, weights, stride, values + done, count, V * W);
  }
}

struct Scratch {
  std::vector<float> query, rows, transposed, scores, totals, factors;
};

// Scores of one query row against 16 keys. The order of its additions is that of `lane_sums`, bit for bit.
template <int64_t V>
inline Vec score_sixteen(const float* query, const float* keys) {
  Vec held[V], total[W];
  for (int64_t i = 0; i < V; ++i) held[i] = load(query + i * W);
  for (int64_t t = 0; t < W; ++t) {
    total[t] = splat(0.0f);
    for (int64_t i = 0; i < V; ++i) total[t] += held[i] * load(keys + (t * V + i) * W);
  }
  return sums(total);
}

// One query token of a sequence: its row of the tables, and the tokens that it sees.
struct Decode {
  int64_t table_row, seq_len;
};

// One sequence and some neighbouring KV heads, which lie side by side in a block: the processor prefetches long
// contiguous reads better. A group's queries share each key and value that was widened. Vectors of scores begin at
// multiples of 16 tokens, wherever the window begins.
template <int64_t V, typename T>
void decode_task(T* out, const Cache& cache, const Options& options, const Decode& decode, int64_t first_head,
                 int64_t num_heads, Scratch& scratch) {
  constexpr int64_t dim = V * W;
  const auto [table_row, seq_len] = decode;
  const int64_t group = cache.heads / cache.kv_heads, rows = num_heads * group;
  const int64_t begin = options.begin(seq_len), origin = begin / W * W;
  const int64_t stride = (seq_len - origin + W - 1) / W * W;
  scratch.scores.resize(rows * stride);
  scratch.totals.assign(rows * dim, 0.0f);
  scratch.factors.resize(rows);
  float* scores = scratch.scores.data();
  float* totals = scratch.totals.data();
  for (int64_t first = origin; first < seq_len; first += W)
    for (int64_t head = 0; head < num_heads; ++head) {
      const float* keys =
          sixteen<V>((const T*)cache.keys, cache, table_row, first_head + head, first, begin, seq_len,
                     scratch.rows.data());
      for (int64_t row = head * group; row < (head + 1) * group; ++row)
        store(scores + row * stride + first - origin, score_sixteen<V>(scratch.query.data() + row * dim, keys));
    }
  for (int64_t row = 0; row < rows; ++row)
    scratch.factors[row] = softmax(scores + row * stride, begin - origin, seq_len - origin, options.soft_cap,
                                   options.sink(first_head * group + row));
  for (int64_t first = origin; first < seq_len; first += W)
    for (int64_t head = 0; head < num_heads; ++head) {
      const float* values =
          sixteen<V>((const T*)cache.values, cache, table_row, first_head + head, first, begin, seq_len,
                     scratch.rows.data());
      const float* weights = scores + first - origin;
      const int64_t count = std::min(W, seq_len - first), end = (head + 1) * group;
      int64_t row = head * group;
      for (; row + 3 <= end; row += 3)
        mix_rows<3, V>(totals + row * dim, weights + row * stride, stride, values, count);
      for (; row < end; ++row) mix_rows<1, V>(totals + row * dim, weights + row * stride, stride, values, count);
    }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < dim; i += W)
      store(out + row * dim + i, load(totals + row * dim + i) * scratch.factors[row]);
}

template <int64_t V, typename T>
void decode(T* out, const T* query, const Cache& cache, const Options& options, const Decode* decodes, int64_t seqs,
            int64_t query_stride, int threads) {
  constexpr int64_t dim = V * W;
  const int64_t group = cache.heads / cache.kv_heads;
  // All heads of a sequence are one task, unless there are too few sequences to keep the threads busy.
  const int64_t together = seqs >= 4 * threads ? cache.kv_heads : 1, parts = cache.kv_heads / together;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    scratch.query.resize(together * group * dim);
    scratch.rows.resize(W * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < seqs * parts; ++task) {
      const int64_t seq = task / parts, first_head = task % parts * together, row = first_head * group;
      widen_rows<V>(scratch.query.data(), query + seq * query_stride + row * dim, together * group, options.scale);
      decode_task<V, T>(out + (seq * cache.heads + row) * dim, cache, options, decodes[seq], first_head, together,
                        scratch);
    }
  }
}

// A tile of a prefill chunk: consecutive query tokens of one sequence.
struct Tile {
  int64_t table_row, row, position, count;  // packed row and position of the first token
};

// total[r] = scores of R query rows against W keys, which lie transposed (dim, W). The products of elements l, l + 16,
// ... are added up for each lane l, then lane l and lane l + Width, as `sums` does: a decode's scores have the same bits
// as those of a prefill, so that a token may be computed by either.
template <int64_t R, int64_t V, int64_t Width>
inline void lane_sums(Vec* total, const float* query, const float* keys, int64_t lane) {
  if constexpr (Width == W) {
    for (int64_t r = 0; r < R; ++r) total[r] = splat(0.0f);
    for (int64_t i = 0; i < V; ++i) {
      const Vec key = load(keys + (i * W + lane) * W);
      for (int64_t r = 0; r < R; ++r) total[r] += key * query[(r * V + i) * W + lane];
    }
  } else {
    Vec other[R];
    lane_sums<R, V, 2 * Width>(total, query, keys, lane);
    lane_sums<R, V, 2 * Width>(other, query, keys, lane + Width);
    for (int64_t r = 0; r < R; ++r) total[r] += other[r];
  }
}

template <int64_t R, int64_t V>
inline void score_rows(float* scores, int64_t stride, const float* query, const float* keys) {
  Vec total[R];
  lane_sums<R, V, 1>(total, query, keys, 0);
  for (int64_t r = 0; r < R; ++r) store(scores + r * stride, total[r]);
}

template <int64_t V, typename T>
void prefill_task(T* out, const T* query, const Cache& cache, const Options& options, const Tile& tile, int64_t kv_head,
                  int64_t query_stride, Scratch& scratch) {
  constexpr int64_t dim = V * W, R = 6;
  const int64_t group = cache.heads / cache.kv_heads, rows = tile.count * group;
  const int64_t padded = (rows + R - 1) / R * R, end = tile.position + tile.count;
  const int64_t begin = options.begin(tile.position + 1), origin = begin / W * W;
  const int64_t stride = (end - origin + W - 1) / W * W;
  scratch.query.assign(padded * dim, 0.0f);
  scratch.totals.assign(padded * dim, 0.0f);
  scratch.scores.assign(padded * stride, 0.0f);
  scratch.transposed.resize(W * dim);
  scratch.rows.resize(W * dim);
  scratch.factors.resize(rows);
  float* scores = scratch.scores.data();
  for (int64_t t = 0; t < tile.count; ++t)
    widen_rows<V>(scratch.query.data() + t * group * dim,
                  query + (tile.row + t) * query_stride + kv_head * group * dim, group, options.scale);
  for (int64_t first = origin; first < end; first += W) {
    const float* keys =
        sixteen<V>((const T*)cache.keys, cache, tile.table_row, kv_head, first, begin, end, scratch.rows.data());
    for (int64_t i = 0; i < V; ++i) {
      Vec part[W];
      for (int64_t t = 0; t < W; ++t) part[t] = load(keys + t * dim + i * W);
      transpose(part);
      std::memcpy(scratch.transposed.data() + i * W * W, part, sizeof part);
    }
    for (int64_t r = 0; r < padded; r += R)
      score_rows<R, V>(scores + r * stride + first - origin, stride, scratch.query.data() + r * dim,
                       scratch.transposed.data());
  }
  for (int64_t r = 0; r < rows; ++r) {
    // A row's own vectors begin where those of a decode would.
    const int64_t visible = tile.position + r / group + 1, hidden = options.begin(visible), own = hidden / W * W;
    float* row = scores + r * stride;
    scratch.factors[r] = softmax(row + own - origin, hidden - own, visible - own, options.soft_cap,
                                 options.sink(kv_head * group + r % group));
    std::fill(row, row + own - origin, 0.0f);
    std::fill(row + visible - origin, row + stride, 0.0f);
  }
  for (int64_t first = origin; first < end; first += W) {
    const float* values =
        sixteen<V>((const T*)cache.values, cache, tile.table_row, kv_head, first, begin, end, scratch.rows.data());
    for (int64_t r = 0; r < padded; r += R)
      mix_rows<R, V>(scratch.totals.data() + r * dim, scores + r * stride + first - origin, stride, values,
                     std::min(W, end - first));
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* to = out + ((tile.row + r / group) * cache.heads + kv_head * group + r % group) * dim;
    for (int64_t i = 0; i < dim; i += W) store(to + i, load(scratch.totals.data() + r * dim + i) * scratch.factors[r]);
  }
}

template <int64_t V, typename T>
void prefill(T* out, const T* query, const Cache& cache, const Options& options, const Tile* tiles, int64_t num_tiles,
             int64_t query_stride, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tiles * cache.kv_heads; ++task)
      prefill_task<V, T>(out, query, cache, options, tiles[task / cache.kv_heads], task % cache.kv_heads, query_stride,
                         scratch);
  }
}

}  // namespace

// PAGESTREAM_HEAD_DIM comes from the compiler's command line: a multiple of 16. One library serves one head size.
constexpr int64_t VECTORS = PAGESTREAM_HEAD_DIM / W;
static_assert(PAGESTREAM_HEAD_DIM % W == 0, "head_dim must be a multiple of 16");

#define PAGESTREAM_KERNELS(T, NAME)                                                                                    \
  void rms_norm_##NAME(T* out, const T* x, T* residual, const T* weight, int64_t outer, int64_t inner,                 \
                       int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps, int threads) {              \
    rms_norm(out, x, residual, weight, outer, inner, outer_stride, inner_stride, dim, eps, threads);                   \
  }                                                                                                                    \
  void silu_and_mul_##NAME(T* out, const T* gate_up, int64_t rows, int64_t dim, int threads) {                         \
    gate_and_mul<SILU>(out, gate_up, rows, dim, threads);                                                              \
  }                                                                                                                    \
  void gelu_and_mul_##NAME(T* out, const T* gate_up, int64_t rows, int64_t dim, int threads) {                         \
    gate_and_mul<GELU>(out, gate_up, rows, dim, threads);                                                              \
  }                                                                                                                    \
  void gelu_tanh_and_mul_##NAME(T* out, const T* gate_up, int64_t rows, int64_t dim, int threads) {                    \
    gate_and_mul<GELU_TANH>(out, gate_up, rows, dim, threads);                                                         \
  }                                                                                                                    \
  void rope_and_cache_##NAME(T* query, const T* key, const T* value, const int64_t* positions, const int64_t* slots,   \
                             const float* cos_sin, int64_t rotary_dim, bool interleaved, T* key_cache,                 \
                             T* value_cache, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t block_size,      \
                             int64_t block_stride, int64_t query_stride, int64_t key_stride, int64_t value_stride,     \
                             int threads) {                                                                            \
    const Rotation rotation{cos_sin, rotary_dim, interleaved};                                                         \
    const Target<T> target{key_cache, value_cache, slots, kv_heads, VECTORS * W, block_size, block_stride};            \
    rope_and_cache(query, key, value, positions, rotation, target, tokens, heads, query_stride, key_stride,            \
                   value_stride, threads);                                                                             \
  }                                                                                                                    \
  void decode_##NAME(T* out, const T* query, const T* keys, const T* values, const int32_t* tables,                    \
                     int64_t table_stride, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t block_stride,  \
                     int64_t query_stride, float scale, float soft_cap, int64_t window, const float* sinks,            \
                     const int64_t* decodes, int64_t seqs, int threads) {                                              \
    const Cache cache{keys, values, tables, table_stride, heads, kv_heads, VECTORS * W, block_size, block_stride};     \
    decode<VECTORS, T>(out, query, cache, {scale, soft_cap, window, sinks}, (const Decode*)decodes, seqs,              \
                       query_stride, threads);                                                                         \
  }                                                                                                                    \
  void prefill_##NAME(T* out, const T* query, const T* keys, const T* values, const int32_t* tables,                   \
                      int64_t table_stride, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t block_stride, \
                      int64_t query_stride, float scale, float soft_cap, int64_t window, const float* sinks,           \
                      const int64_t* tiles, int64_t num_tiles, int threads) {                                          \
    const Cache cache{keys, values, tables, table_stride, heads, kv_heads, VECTORS * W, block_size, block_stride};     \
    prefill<VECTORS, T>(out, query, cache, {scale, soft_cap, window, sinks}, (const Tile*)tiles, num_tiles,            \
                        query_stride, threads);                                                                        \
  }

extern "C" {
PAGESTREAM_KERNELS(float, float32)
PAGESTREAM_KERNELS(bf16, bfloat16)
PAGESTREAM_KERNELS(fp16, float16)
}
