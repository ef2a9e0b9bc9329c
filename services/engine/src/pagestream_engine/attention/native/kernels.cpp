// The CPU's kernels: attention over the paged cache, and the small steps between the matrix products.
//
// Plain C++ on the compilers' vector extensions (GCC >= 9, Clang), so that one source serves AVX2, AVX-512 and NEON.
// All arithmetic is in float32; bfloat16 and float16 are widened on load and rounded to nearest even on store. Every
// sequence (and every query row) is reduced in a fixed order, whatever else is in the batch, wherever a chunk of its
// prompt begins, and by decode as by prefill. Layouts are those of attention/base.py: a block of a layer's cache is
// (num_kv_heads, block_size, head_dim), contiguous.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__F16C__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "activations.h"

namespace {

constexpr int64_t W = 16;  // floats a vector
typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));
typedef uint8_t BVec __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinity, the largest number is 448; of a cache, with a scale for each block and head
  uint8_t bits;
};

// What keys and values are kept as, of a model of dtype T. The compiler's command line may name another type.
#ifdef PAGESTREAM_CACHE
template <typename T>
using Stored = PAGESTREAM_CACHE;
#else
template <typename T>
using Stored = T;
#endif

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

inline Vec load(const fp8* from) {
  BVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const UVec bits = __builtin_convertvector(bytes, UVec), size = bits & 0x7f;
  const Vec small = __builtin_convertvector((IVec)size, Vec) * 0x1p-9f;
  UVec wide = size < 8 ? (UVec)small : (size << 20) + 0x3c000000;  // the exponent's bias differs by 120
  wide = size == 0x7f ? (size & 0) + 0x7fc00000 : wide;
  return (Vec)(wide | (bits & 0x80) << 24);
}
// What is too large becomes the largest.
inline void store(fp8* to, Vec x) {
  x = x > 448.0f ? splat(448.0f) : (x < -448.0f ? splat(-448.0f) : x);
  const UVec bits = (UVec)x, size = bits & 0x7fffffff;
  const UVec normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 0x3c0;
  const UVec subnormal = (UVec)((Vec)size + 16384.0f) - 0x46800000;  // 2^14 aligns the bits that stay, and rounds
  UVec narrow = size < 0x3c800000 ? subnormal : normal;
  narrow = x == x ? narrow : (size & 0) + 0x7f;
  const BVec bytes = __builtin_convertvector(narrow | (bits >> 24 & 0x80), BVec);
  std::memcpy(to, &bytes, sizeof bytes);
}
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

// -- rms norm --

template <typename T, typename Weight>
void norm_row(T* out, const T* x, T* residual, const Weight* weight, int64_t dim, float eps) {
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
  // Rounded to the weight's dtype: a wide weight is multiplied with what is not rounded yet.
  for (int64_t i = 0; i < whole; i += W) store(out + i, rounded<Weight>(load(from + i) * factor) * load(weight + i));
  for (int64_t i = whole; i < dim; ++i) store(out + i, rounded<Weight>(widen(from[i]) * factor) * widen(weight[i]));
}

// The norm of rows of T, by weights of T or in float32.
template <typename T>
struct Norm {
  const void* weight;  // null: there is none
  bool is_wide;
  float eps;

  // `out` may be `x`.
  void apply(T* out, const T* x, T* residual, int64_t dim) const {
    if (is_wide)
      norm_row(out, x, residual, (const float*)weight, dim, eps);
    else
      norm_row(out, x, residual, (const T*)weight, dim, eps);
  }
};

template <typename T>
void rms_norm(T* out, const T* x, T* residual, const Norm<T>& norm, int64_t outer, int64_t inner, int64_t outer_stride,
              int64_t inner_stride, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (outer * inner * dim > 16384)
  for (int64_t row = 0; row < outer * inner; ++row) {
    const int64_t from = row / inner * outer_stride + row % inner * inner_stride;
    norm.apply(out + row * dim, x + from, residual ? residual + from : nullptr, dim);
  }
}

// -- layer norm --

template <typename T>
void layer_norm_row(T* out, const T* x, T* residual, const T* weight, const T* bias, int64_t dim, float eps) {
  const int64_t whole = dim / W * W;
  Vec total = splat(0.0f), squares = splat(0.0f);
  float rest = 0.0f, rest_squares = 0.0f;
  for (int64_t i = 0; i < whole; i += W) {
    Vec value = load(x + i);
    if (residual) {
      store(residual + i, value + load(residual + i));
      value = load(residual + i);
    }
    total += value;
  }
  for (int64_t i = whole; i < dim; ++i) {
    float value = widen(x[i]);
    if (residual) {
      store(residual + i, value + widen(residual[i]));
      value = widen(residual[i]);
    }
    rest += value;
  }
  const T* from = residual ? residual : x;
  const float mean = (sum(total) + rest) / float(dim);
  for (int64_t i = 0; i < whole; i += W) {
    const Vec value = load(from + i) - mean;
    squares += value * value;
  }
  for (int64_t i = whole; i < dim; ++i) rest_squares += (widen(from[i]) - mean) * (widen(from[i]) - mean);
  const float factor = 1.0f / std::sqrt((sum(squares) + rest_squares) / float(dim) + eps);
  for (int64_t i = 0; i < whole; i += W) {
    const Vec normed = (load(from + i) - mean) * factor * load(weight + i);
    store(out + i, bias ? normed + load(bias + i) : normed);
  }
  for (int64_t i = whole; i < dim; ++i) {
    const float normed = (widen(from[i]) - mean) * factor * widen(weight[i]);
    store(out + i, bias ? normed + widen(bias[i]) : normed);
  }
}

// Weights and biases of inner row r begin at r * weight_stride.
template <typename T>
void layer_norm(T* out, const T* x, T* residual, const T* weight, const T* bias, float eps, int64_t outer, int64_t inner,
                int64_t outer_stride, int64_t inner_stride, int64_t dim, int64_t weight_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (outer * inner * dim > 16384)
  for (int64_t row = 0; row < outer * inner; ++row) {
    const int64_t from = row / inner * outer_stride + row % inner * inner_stride;
    const int64_t own = row % inner * weight_stride;
    layer_norm_row(out + row * dim, x + from, residual ? residual + from : nullptr, weight + own,
                   bias ? bias + own : nullptr, dim, eps);
  }
}

// -- activation(x), and activation(gate) * up --

template <Activation A, typename T>
void activate(T* out, const T* x, int64_t rows, int64_t dim, int threads) {
  const int64_t whole = dim / W * W;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * dim;
    T* to = out + row * dim;
    for (int64_t i = 0; i < whole; i += W) store(to + i, activated<A>(load(from + i)));
    for (int64_t i = whole; i < dim; ++i) store(to + i, activated<A>(widen(from[i])));
  }
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

// -- norm and rotary embedding of query and key, and the write to the cache --

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

// What becomes of a head of a query or a key before attention.
template <typename T>
struct Turn {
  Norm<T> norm;
  Rotation rotation;

  // `to` may be `from`; without a rotation `position` is not read.
  void apply(T* to, const T* from, const int64_t* position, int64_t dim) const {
    if (norm.weight) {
      norm.apply(to, from, nullptr, dim);
      from = to;
    } else if (to != from) {
      std::memcpy(to + rotation.dim, from + rotation.dim, (dim - rotation.dim) * sizeof(T));
    }
    if (rotation.dim) rotation.apply(to, from, *position);
  }
};

// Where keys and values go: blocks of (kv_heads, block_size, head_dim), `block_stride` elements apart.
template <typename S>
struct Target {
  S* keys;
  S* values;
  float* key_scales;  // of float8: (blocks, kv_heads), rows `scale_stride` apart
  float* value_scales;
  int64_t scale_stride;
  const int64_t* slots;
  int64_t kv_heads, head_dim, block_size, block_stride;
};

template <typename S, typename T>
void narrow(S* to, const T* from, int64_t count) {
  if constexpr (std::is_same_v<S, T>)
    std::memcpy(to, from, count * sizeof(T));
  else
    for (int64_t i = 0; i < count; i += W) store(to + i, load(from + i));
}

// Tokens of a step in consecutive slots of one block.
struct Run {
  int64_t token, count, block, offset;
};

inline std::vector<Run> runs_of(const int64_t* slots, int64_t tokens, int64_t block_size) {
  std::vector<Run> runs;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = slots[token];
    if (token && slot % block_size && slot == slots[token - 1] + 1)
      ++runs.back().count;
    else
      runs.push_back({token, 1, slot / block_size, slot % block_size});
  }
  return runs;
}

// The least power of two by which numbers of at most this size are float8s, within 2^-60 and 2^60; 448 is 1.75 * 2^8.
inline float scale_for(float largest) {
  int32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const int32_t exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000);
  return std::ldexp(1.0f, std::max(-60, std::min(exponent, 60)));
}

// Appends rows to the `offset` that one head of a block has. Where they need a larger scale, what is there shrinks.
template <typename T>
void append_scaled(fp8* page, float* scale, int64_t offset, const T* rows, int64_t row_stride, int64_t count,
                   int64_t dim) {
  Vec most = splat(0.0f);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < dim; i += W) {
      const Vec x = load(rows + row * row_stride + i), size = x < 0.0f ? -x : x;
      most = (size > most) & (size < INFINITY) ? size : most;
    }
  float lane[W], largest = 0.0f;
  store(lane, most);
  for (int64_t i = 0; i < W; ++i) largest = std::max(largest, lane[i]);
  const float held = offset ? *scale : 0.0f, now = std::max(held, scale_for(largest));
  if (now > held)
    for (int64_t i = 0; i < offset * dim; i += W) store(page + i, load(page + i) * (held / now));
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < dim; i += W)
      store(page + (offset + row) * dim + i, load(rows + row * row_stride + i) * (1.0f / now));
  *scale = now;
}

template <typename T, typename S>
void rope_and_cache(T* query, const T* key, const T* value, const int64_t* positions, const Turn<T>& query_turn,
                    const Turn<T>& key_turn, const Target<S>& target, int64_t tokens, int64_t heads,
                    int64_t query_stride, int64_t key_stride, int64_t value_stride, int threads) {
  const int64_t dim = target.head_dim;
  constexpr bool is_scaled = std::is_same_v<S, fp8>;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 8)
  for (int64_t token = 0; token < tokens; ++token) {
    if (query_turn.rotation.dim)
      for (int64_t head = 0; head < heads; ++head) {
        T* row = query + token * query_stride + head * dim;
        query_turn.apply(row, row, positions + token, dim);
      }
    if constexpr (is_scaled) continue;
    const int64_t slot = target.slots[token], block = slot / target.block_size, offset = slot % target.block_size;
    T rotated[PAGESTREAM_HEAD_DIM];
    for (int64_t head = 0; head < target.kv_heads; ++head) {
      const int64_t to = block * target.block_stride + (head * target.block_size + offset) * dim;
      const T* from = key + token * key_stride + head * dim;
      if constexpr (std::is_same_v<S, T>) {
        key_turn.apply(target.keys + to, from, positions + token, dim);
      } else {
        key_turn.apply(rotated, from, positions + token, dim);
        narrow(target.keys + to, rotated, dim);
      }
      narrow(target.values + to, value + token * value_stride + head * dim, dim);
    }
  }
  if constexpr (is_scaled) {
    const std::vector<Run> runs = runs_of(target.slots, tokens, target.block_size);
#pragma omp parallel num_threads(threads) if (tokens > 8)
    {
      std::vector<T> rotated(target.block_size * dim);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < int64_t(runs.size()) * target.kv_heads; ++i) {
        const Run& run = runs[i / target.kv_heads];
        const int64_t head = i % target.kv_heads, scale = run.block * target.scale_stride + head;
        const int64_t page = run.block * target.block_stride + head * target.block_size * dim;
        for (int64_t row = 0; row < run.count; ++row) {
          const T* from = key + (run.token + row) * key_stride + head * dim;
          key_turn.apply(rotated.data() + row * dim, from, positions + run.token + row, dim);
        }
        append_scaled(target.keys + page, target.key_scales + scale, run.offset, rotated.data(), dim, run.count, dim);
        append_scaled(target.values + page, target.value_scales + scale, run.offset,
                      value + run.token * value_stride + head * dim, value_stride, run.count, dim);
      }
    }
  }
}

// -- attention --
//
// A tile is some consecutive query tokens of a sequence: one for a decode, up to 16 of a prompt. Its rows are those of
// the query heads that share a KV head. Keys are taken in segments of 256 tokens that begin at multiples of 256: each
// gives a row a maximum, a sum of weights and a weighted sum of values, and these are folded in the order of the
// segments. What a row's bits depend on is thus its position alone: a tile's rows, the threads, and which of them
// computes a segment change nothing, and the memory that a tile needs does not grow with the context.

constexpr int64_t SEGMENT = 256;

// Consecutive query tokens of a sequence: its row of the tables, packed row and position of the first, their number.
struct Tile {
  int64_t table_row, row, position, count;
};

// `tables` is (rows, table_stride); blocks are `block_stride` elements apart, their scales `scale_stride`.
struct Cache {
  const int32_t* tables;
  int64_t table_stride, heads, kv_heads, dim, block_size, block_stride, scale_stride;

  int64_t group() const { return heads / kv_heads; }
  int64_t block(int64_t table_row, int64_t token) const {
    return tables[table_row * table_stride + token / block_size];
  }
  int64_t place(int64_t table_row, int64_t token, int64_t kv_head) const {
    return block(table_row, token) * block_stride + (kv_head * block_size + token % block_size) * dim;
  }
};

// All keys, or all values, as they are kept.
template <typename S>
struct Half {
  const S* elements;
  const float* scales;  // of float8
};

// An AttentionSpec: no soft cap is 0, no window is the largest number, no sinks and no slopes are null.
struct Options {
  float scale, soft_cap;
  int64_t window;
  const float *sinks, *slopes;
  bool rounds_slopes;

  // The first token that the query token before `end` sees.
  int64_t begin(int64_t end) const { return end > window ? end - window : 0; }
};

// `count` elements as attention computes with them: exact, as a scale is a power of two.
template <typename T, typename S>
inline void widen_row(T* to, const S* from, int64_t count, float scale) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16> && std::is_same_v<S, fp8>) {
    // On the bits, 32 at a time: the scale is a number to add to the exponent. Below 2^-6 a table has them.
    uint32_t scale_bits;
    std::memcpy(&scale_bits, &scale, sizeof scale_bits);
    const __m512i added = _mm512_set1_epi16(short((int(scale_bits >> 23) - 127) * 128));
    const __m512i shift = _mm512_add_epi16(added, _mm512_set1_epi16(120 * 128));
    const __m512i smalls = _mm512_castsi128_si512(  // 0, 1, ... 7 times 2^-9
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i table = _mm512_mask_add_epi16(smalls, 0xfe, smalls, added);
    const auto wide = [&](__m256i bytes) {
      const __m512i bits = _mm512_cvtepu8_epi16(bytes), size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
      __m512i made = _mm512_add_epi16(_mm512_slli_epi16(size, 4), shift);
      made = _mm512_mask_permutexvar_epi16(made, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8)), size, table);
      made = _mm512_mask_mov_epi16(made, _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f)),
                                   _mm512_set1_epi16(0x7fc0));
      return _mm512_or_si512(made, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), bits), 8));
    };
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(to + i, wide(_mm256_loadu_si256((const __m256i*)(from + i))));
    if (i < count)
      _mm256_storeu_si256((__m256i*)(to + i), _mm512_castsi512_si256(wide(_mm256_castsi128_si256(
                                                  _mm_loadu_si128((const __m128i*)(from + i))))));
    return;
  }
#endif
  for (int64_t i = 0; i < count; i += W) store(to + i, load(from + i) * scale);
}

// 16 keys or values of a KV head from token `first` on, as rows: a pointer into the cache, or to `scratch`. Before
// `begin` and from `end` on the scratch repeats the nearest token between them, whose weight there is zero: other
// places of a block are not read.
template <int64_t V, typename T, typename S>
inline const T* sixteen(const Half<S>& half, const Cache& cache, int64_t table_row, int64_t kv_head, int64_t first,
                        int64_t begin, int64_t end, T* scratch) {
  constexpr int64_t dim = V * W;
  const bool is_whole = first % cache.block_size + W <= cache.block_size && first >= begin && first + W <= end;
  const auto scale_of = [&](int64_t token) {
    return half.scales ? half.scales[cache.block(table_row, token) * cache.scale_stride + kv_head] : 1.0f;
  };
  if (is_whole) {
    const S* rows = half.elements + cache.place(table_row, first, kv_head);
    if constexpr (std::is_same_v<S, T>)
      return rows;
    else
      widen_row(scratch, rows, W * dim, scale_of(first));
    return scratch;
  }
  for (int64_t t = 0; t < W; ++t) {
    // Clamp: a weight of 0 does not protect from a NaN in a foreign block.
    const int64_t token = std::max(begin, std::min(first + t, end - 1));
    const S* row = half.elements + cache.place(table_row, token, kv_head);
    if constexpr (std::is_same_v<S, T>)
      std::memcpy(scratch + t * dim, row, dim * sizeof(T));
    else
      widen_row(scratch + t * dim, row, dim, scale_of(token));
  }
  return scratch;
}

// Asks for a key or value, to be in the second cache when it is read. Blocks lie scattered, which no processor expects,
// and a core has few places for misses: asking for 16 rows at once stalls. So a loop over 16 rows asks for one of the
// next 16 in each of its turns.
template <int64_t V, typename S>
inline void prefetch_row(const S* row) {
  constexpr int64_t line = 64 / sizeof(S);
  for (int64_t i = 0; i < V * W; i += line) __builtin_prefetch(row + i, 0, 2);
}

// Whether none of `count` elements, a multiple of 16, is infinite or NaN.
template <typename T>
inline bool all_finite(const T* elements, int64_t count) {
  Vec zeros = splat(0.0f);
  for (int64_t i = 0; i < count; i += W) zeros += load(elements + i) * 0.0f;
  return sum(zeros) == 0.0f;
}

// Calls part(R, r) for blocks of R rows from row r on.
template <typename Part>
inline void in_blocks(int64_t rows, Part part) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) part(std::integral_constant<int64_t, 6>{}, r);
  if (r + 4 <= rows) part(std::integral_constant<int64_t, 4>{}, r), r += 4;
  if (r + 3 <= rows) part(std::integral_constant<int64_t, 3>{}, r), r += 3;
  for (; r < rows; ++r) part(std::integral_constant<int64_t, 1>{}, r);
}

// total[r] = scores of R query rows against W keys. `product(total, r, lane)` adds to row r what elements of one lane
// give; then lane l and lane l + Width are added, as `sums` does: scores from keys that lie transposed have the same
// bits as those from keys in rows.
template <int64_t R, int64_t Width, typename Product>
inline void lane_sums(Vec* total, int64_t lane, Product product) {
  if constexpr (Width == W) {
    for (int64_t r = 0; r < R; ++r) total[r] = splat(0.0f);
    product(total, lane);
  } else {
    Vec other[R];
    lane_sums<R, 2 * Width>(total, lane, product);
    lane_sums<R, 2 * Width>(other, lane + Width, product);
    for (int64_t r = 0; r < R; ++r) total[r] += other[r];
  }
}

// Arithmetic in float32 on what is widened: of every dtype, on every processor.
template <int64_t V, typename T>
struct WideMath {
  using Element = float;  // of queries, keys and values as they are multiplied
  using Weight = float;
  static constexpr int64_t LENGTH = V * W;  // elements of a query row, and of a row of sums
  static constexpr int64_t TOKENS = W;      // values that `mix` takes at once

  static void take_query(float* to, const T* from) {
    for (int64_t i = 0; i < V; ++i) store(to + i * W, load(from + i * W));
  }

  // Adds in the same order as `score_rows`, for equal bits with any number of rows: change both together.
  // Lane sums of R query rows and each of 16 keys.
  template <int64_t R, typename S>
  static void score_keys(Vec (*total)[W], const float* query, const float* keys, const S* next) {
    for (int64_t r = 0; r < R; ++r) {
      Vec held[V];
      for (int64_t i = 0; i < V; ++i) held[i] = load(query + (r * V + i) * W);
      for (int64_t t = 0; t < W; ++t) {
        if (r == 0) prefetch_row<V>(next + t * V * W);
        total[r][t] = splat(0.0f);
        for (int64_t i = 0; i < V; ++i) total[r][t] += held[i] * load(keys + (t * V + i) * W);
      }
    }
  }
  // (16, LENGTH) as (LENGTH, 16).
  template <typename S>
  static void take_lanes(float* to, const float* keys, const S* next) {
    for (int64_t i = 0; i < V; ++i) {
      Vec part[W];
      for (int64_t t = 0; t < W; ++t) {
        if (i == 0) prefetch_row<V>(next + t * V * W);
        part[t] = load(keys + (t * V + i) * W);
      }
      transpose(part);
      std::memcpy(to + i * W * W, part, sizeof part);
    }
  }
  template <int64_t R>
  static void score_rows(Vec* scores, const float* query, const float* lanes) {
    lane_sums<R, 1>(scores, 0, [=](Vec* total, int64_t lane) {
      for (int64_t i = 0; i < V; ++i) {
        const Vec key = load(lanes + (i * W + lane) * W);
        for (int64_t r = 0; r < R; ++r) total[r] += key * query[(r * V + i) * W + lane];
      }
    });
  }

  static const float* take_keys(float* to, const T* from) {
    if constexpr (std::is_same_v<T, float>) return from;
    for (int64_t i = 0; i < W * V; ++i) store(to + i * W, load(from + i * W));
    return to;
  }
  template <typename S>
  static const float* take_values(float* to, const T* from, const S* next) {
    for (int64_t t = 0; t < W; ++t) prefetch_row<V>(next + t * V * W);
    return take_keys(to, from);
  }
  static Vec take_weights(float* to, Vec weights) {
    store(to, weights);
    return weights;
  }

  // P vectors of totals[r] += sum over t of weights[r][t] * values[t]: R rows, all their totals in registers.
  template <int64_t R, int64_t P>
  static void mix_part(float* totals, const float* weights, int64_t stride, const float* values, int64_t count) {
    Vec total[R][P];
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < P; ++i) total[r][i] = load(totals + r * LENGTH + i * W);
    for (int64_t t = 0; t < count; ++t) {
      Vec value[P];
      for (int64_t i = 0; i < P; ++i) value[i] = load(values + t * LENGTH + i * W);
      for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0; i < P; ++i) total[r][i] += value[i] * weights[r * stride + t];
    }
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < P; ++i) store(totals + r * LENGTH + i * W, total[r][i]);
  }
  template <int64_t R>
  static void mix(float* totals, const float* weights, int64_t stride, const float* values, int64_t count) {
    constexpr int64_t P = 4, rest = V % P;
    for (int64_t i = 0; i + P <= V; i += P) mix_part<R, P>(totals + i * W, weights, stride, values + i * W, count);
    if constexpr (rest != 0)
      mix_part<R, rest>(totals + (V - rest) * W, weights, stride, values + (V - rest) * W, count);
  }

  static void put(T* out, const float* totals, float factor) {
    for (int64_t i = 0; i < V; ++i) store(out + i * W, load(totals + i * W) * factor);
  }
};

#if defined(__AVX512BF16__)
// Products of bfloat16 pairs, added in float32 by one instruction. Weights are rounded to bfloat16, too, and their sum
// is that of the rounded ones. Rows are filled up with zeros to whole vectors of 32.
template <int64_t V>
struct PairMath {
  using Element = bf16;
  using Weight = bf16;
  static constexpr int64_t C = (V + 1) / 2;  // vectors of pairs a row
  static constexpr int64_t LENGTH = C * 2 * W;
  static constexpr int64_t TOKENS = SEGMENT;

  static __m512bh pairs(const bf16* row, int64_t c) {
    if (V % 2 && c == C - 1) return (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(row + c * 32)));
    return (__m512bh)_mm512_loadu_si512(row + c * 32);
  }
  static __m512bh same_pair(const bf16* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static Vec add_products(Vec total, __m512bh a, __m512bh b) { return (Vec)_mm512_dpbf16_ps((__m512)total, a, b); }

  static void take_query(bf16* to, const bf16* from) {
    for (int64_t c = 0; c < C; ++c) _mm512_storeu_si512(to + c * 32, (__m512i)pairs(from, c));
  }
  static const bf16* take_keys(bf16*, const bf16* from) { return from; }

  // Lane sums of R query rows and each of 16 keys.
  template <int64_t R, typename S>
  static void score_keys(Vec (*total)[W], const bf16* query, const bf16* keys, const S* next) {
    for (int64_t t = 0; t < W; ++t) {
      prefetch_row<V>(next + t * V * W);
      for (int64_t r = 0; r < R; ++r) {
        total[r][t] = splat(0.0f);
        for (int64_t c = 0; c < C; ++c)
          total[r][t] = add_products(total[r][t], pairs(query + r * LENGTH, c), pairs(keys + t * V * W, c));
      }
    }
  }
  // (16, LENGTH) as (LENGTH / 2, 16, 2).
  template <typename S>
  static void take_lanes(bf16* to, const bf16* keys, const S* next) {
    for (int64_t c = 0; c < C; ++c) {
      Vec part[W];
      for (int64_t t = 0; t < W; ++t) {
        if (c == 0) prefetch_row<V>(next + t * V * W);
        part[t] = (Vec)pairs(keys + t * V * W, c);
      }
      transpose(part);
      std::memcpy(to + c * W * 2 * W, part, sizeof part);
    }
  }
  template <int64_t R>
  static void score_rows(Vec* scores, const bf16* query, const bf16* lanes) {
    lane_sums<R, 1>(scores, 0, [=](Vec* total, int64_t lane) {
      for (int64_t c = 0; c < C; ++c) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(lanes + (c * W + lane) * 2 * W);
        for (int64_t r = 0; r < R; ++r)
          total[r] = add_products(total[r], key, same_pair(query + r * LENGTH + (c * W + lane) * 2));
      }
    });
  }

  // (16, V * 16) as (8, C, 2, 16, 2): pairs of tokens, whose elements `put` brings into their order.
  template <typename S>
  static const bf16* take_values(bf16* to, const bf16* from, const S* next) {
    for (int64_t t = 0; t < W; t += 2) {
      prefetch_row<V>(next + t * V * W);
      prefetch_row<V>(next + (t + 1) * V * W);
      for (int64_t c = 0; c < C; ++c) {
        const __m512i a = (__m512i)pairs(from + t * V * W, c), b = (__m512i)pairs(from + (t + 1) * V * W, c);
        bf16* pair = to + (t / 2 * C + c) * 4 * W;
        _mm512_storeu_si512(pair, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(pair + 2 * W, _mm512_unpackhi_epi16(a, b));
      }
    }
    return to;
  }
  static Vec take_weights(bf16* to, Vec weights) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
    _mm256_storeu_si256((__m256i*)to, narrow);
    return load(to);
  }

  template <int64_t R, int64_t P>
  static void mix_part(float* totals, const bf16* weights, int64_t stride, const bf16* values, int64_t count) {
    Vec total[R][2 * P];
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < 2 * P; ++i) total[r][i] = load(totals + r * LENGTH + i * W);
    for (int64_t t = 0; t < count; t += 2) {
      __m512bh value[2 * P];
      for (int64_t i = 0; i < 2 * P; ++i) value[i] = (__m512bh)_mm512_loadu_si512(values + t * LENGTH + i * 2 * W);
      for (int64_t r = 0; r < R; ++r) {
        const __m512bh weight = same_pair(weights + r * stride + t);
        for (int64_t i = 0; i < 2 * P; ++i) total[r][i] = add_products(total[r][i], value[i], weight);
      }
    }
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < 2 * P; ++i) store(totals + r * LENGTH + i * W, total[r][i]);
  }
  template <int64_t R>
  static void mix(float* totals, const bf16* weights, int64_t stride, const bf16* values, int64_t count) {
    int64_t c = 0;
    for (; c + 2 <= C; c += 2) mix_part<R, 2>(totals + c * 2 * W, weights, stride, values + c * 4 * W, count);
    if constexpr (C % 2) mix_part<R, 1>(totals + c * 2 * W, weights, stride, values + c * 4 * W, count);
  }

  static void put(bf16* out, const float* totals, float factor) {
    for (int64_t c = 0; c < C; ++c) {
      const Vec low = load(totals + c * 2 * W) * factor, high = load(totals + c * 2 * W + W) * factor;
      store(out + c * 2 * W, SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      if (V % 2 && c == C - 1) break;
      store(out + c * 2 * W + W, SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
  }
};

template <int64_t V, typename T>
using Math = std::conditional_t<std::is_same_v<T, bf16>, PairMath<V>, WideMath<V, T>>;
#else
template <int64_t V, typename T>
using Math = WideMath<V, T>;
#endif

// What some keys give a row before its result is made of it: the largest score, and the sum of weights relative to it.
struct Reduced {
  float largest, sum;
};

// How one row's scores fall with the distance of the keys, the first of which is at `origin`.
struct Fall {
  float slope;  // 0: they don't
  int64_t origin, own;  // positions of the first key, and of the query token
  bool is_rounded;      // by what is counted from position 0, rounded to bfloat16

  void apply(float* scores, int64_t width) const {
    Vec places;
    for (int64_t t = 0; t < W; ++t) places[t] = float(is_rounded ? origin + t : origin + t - own);
    for (int64_t i = 0; i < width; i += W) {
      const Vec share = (places + float(i)) * slope;
      store(scores + i, load(scores + i) + (is_rounded ? rounded<bf16>(share) : share));
    }
  }
};

// Weights of one row's scores, of which [lo, hi) of `width`, a multiple of 16, are visible; the others get none.
// Never inlined, as `fold`: the same instructions must reduce each row.
template <typename M>
__attribute__((noinline)) Reduced soften(float* scores, typename M::Weight* weights, int64_t lo, int64_t hi,
                                         int64_t width, float soft_cap, const Fall& fall) {
  if (soft_cap != 0.0f)
    for (int64_t i = 0; i < width; i += W)
      store(scores + i, hyperbolic_tangent(load(scores + i) / soft_cap) * soft_cap);
  if (fall.slope != 0.0f) fall.apply(scores, width);
  std::fill(scores, scores + lo, -INFINITY);
  std::fill(scores + hi, scores + width, -INFINITY);
  Vec most = load(scores), total = splat(0.0f);
  for (int64_t i = W; i < width; i += W) {
    const Vec score = load(scores + i);
    most = score > most ? score : most;
  }
  float lane[W], largest = -INFINITY;
  store(lane, most);
  for (int64_t i = 0; i < W; ++i) largest = std::max(largest, lane[i]);
  for (int64_t i = 0; i < width; i += W) total += M::take_weights(weights + i, exponential(load(scores + i) - largest));
  return {largest, sum(total)};
}

// Adds a segment to what the segments before it gave.
template <int64_t LENGTH>
__attribute__((noinline)) void fold(Reduced& all, float* totals, const Reduced& part, const float* mixed) {
  if (part.largest == -INFINITY) return;
  const float largest = std::max(all.largest, part.largest);
  const float before = std::exp(all.largest - largest), now = std::exp(part.largest - largest);
  all = {largest, all.sum * before + part.sum * now};
  for (int64_t i = 0; i < LENGTH; i += W) store(totals + i, load(totals + i) * before + load(mixed + i) * now);
}

// Some KV heads of a tile, over some segments.
struct Task {
  const Tile* tile;
  int64_t first_head, num_heads, first_segment, end_segment;
  int64_t partial;  // place of what the segment gives, or -1: the task has all segments, and makes the result
};

template <int64_t V, typename T, typename S>
class Attention {
  using M = Math<V, T>;
  static constexpr int64_t dim = V * W, LENGTH = M::LENGTH;
  static constexpr int64_t FEW_ROWS = 5;  // up to so many, transposing keys costs more than it saves

 public:
  T* out;
  const T* query;
  Half<S> keys, values;
  Cache cache;
  Options options;
  int64_t query_stride;

  void run(const Tile* tiles, int64_t num_tiles, int threads) {
    plan(tiles, num_tiles, threads);
#pragma omp parallel num_threads(threads)
    {
      Scratch scratch;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks.size(); ++i)
        attend(tasks[i], tasks[std::min(i + threads, tasks.size() - 1)], scratch);
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < merges.size(); ++i) merge(merges[i], scratch);
    }
  }

 private:
  struct Scratch {
    std::vector<typename M::Element> query, rows, lanes, values;
    std::vector<T> sixteen;
    std::vector<float> scores, mixed, totals;
    std::vector<typename M::Weight> weights;
    std::vector<Reduced> parts, all;
  };

  std::vector<Task> tasks, merges;
  std::vector<Reduced> partial_parts;  // of each partial and row
  std::vector<float> partial_sums;     // likewise, LENGTH each

  int64_t first_segment(const Tile& tile) const { return options.begin(tile.position + 1) / SEGMENT; }
  static int64_t end_segment(const Tile& tile) { return (tile.position + tile.count - 1) / SEGMENT + 1; }

  // Tasks of about equal work, enough of them for all threads. One of all heads reads whole blocks, which the processor
  // prefetches better; where there are few tiles, segments are tasks of their own, and heads, too, if that's not enough.
  void plan(const Tile* tiles, int64_t num_tiles, int threads) {
    const auto work = [&](const Tile& tile) {
      const int64_t end = tile.position + tile.count;
      return (end - options.begin(tile.position + 1)) * tile.count;
    };
    int64_t total = 0, partials = 0;
    for (int64_t i = 0; i < num_tiles; ++i) total += work(tiles[i]);
    const int64_t share = threads > 1 ? total / (4 * threads) : total;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const Tile& tile = tiles[i];
      const int64_t begin = first_segment(tile), end = end_segment(tile);
      const bool by_segment = end - begin > 1 && work(tile) > share;
      const bool by_head = tile.count > 1 || work(tile) / (by_segment ? end - begin : 1) > share;
      const int64_t heads = by_head ? 1 : cache.kv_heads;
      for (int64_t head = 0; head < cache.kv_heads; head += heads) {
        Task task{&tile, head, heads, begin, end, -1};
        if (!by_segment) {
          tasks.push_back(task);
          continue;
        }
        task.partial = partials;
        merges.push_back(task);
        for (int64_t segment = begin; segment < end; ++segment) {
          tasks.push_back({&tile, head, heads, segment, segment + 1, partials});
          partials += heads * tile.count * cache.group();
        }
      }
    }
    partial_parts.resize(partials);
    partial_sums.resize(partials * LENGTH);
  }

  int64_t rows_of(const Task& task) const { return task.num_heads * task.tile->count * cache.group(); }

  // `after` is what this thread probably attends to next.
  void attend(const Task& task, const Task& after, Scratch& scratch) {
    const int64_t rows = rows_of(task), each = rows / task.num_heads;
    scratch.query.resize(rows * LENGTH);
    scratch.rows.resize(W * std::max(dim, LENGTH));
    scratch.lanes.resize(W * LENGTH);
    scratch.sixteen.resize(W * dim);
    scratch.values.resize(M::TOKENS * LENGTH);
    scratch.scores.resize(rows * SEGMENT);
    scratch.weights.resize(rows * SEGMENT);
    scratch.mixed.resize(rows * LENGTH);
    scratch.parts.resize(rows);
    for (int64_t row = 0; row < rows; ++row)
      M::take_query(scratch.query.data() + row * LENGTH,
                    query + token_of(task, row % each) * query_stride + head_of(task, row) * dim);
    if (task.partial >= 0) {
      reduce(task, task.first_segment, keys_of(after, after.first_segment), scratch);
      std::copy_n(scratch.parts.data(), rows, partial_parts.data() + task.partial);
      std::copy_n(scratch.mixed.data(), rows * LENGTH, partial_sums.data() + task.partial * LENGTH);
      return;
    }
    start(task, scratch);
    for (int64_t segment = task.first_segment; segment < task.end_segment; ++segment) {
      const bool is_last = segment + 1 == task.end_segment;
      reduce(task, segment, is_last ? keys_of(after, after.first_segment) : keys_of(task, segment + 1), scratch);
      add(rows, scratch.parts.data(), scratch.mixed.data(), scratch);
    }
    finish(task, scratch);
  }

  void merge(const Task& task, Scratch& scratch) {
    const int64_t rows = rows_of(task);
    start(task, scratch);
    for (int64_t i = 0; i < task.end_segment - task.first_segment; ++i) {
      const int64_t from = task.partial + i * rows;
      add(rows, partial_parts.data() + from, partial_sums.data() + from * LENGTH, scratch);
    }
    finish(task, scratch);
  }

  // A row is one query head of one token; rows go by KV head, token, head in the group.
  int64_t token_of(const Task& task, int64_t row) const { return task.tile->row + row / cache.group(); }
  int64_t head_of(const Task& task, int64_t row) const {
    const int64_t each = task.tile->count * cache.group();
    return (task.first_head + row / each) * cache.group() + row % each % cache.group();
  }

  void start(const Task& task, Scratch& scratch) {
    const int64_t rows = rows_of(task);
    scratch.all.resize(rows);
    scratch.totals.assign(rows * LENGTH, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      scratch.all[row] = options.sinks ? Reduced{options.sinks[head_of(task, row)], 1.0f} : Reduced{-INFINITY, 0.0f};
  }

  void add(int64_t rows, const Reduced* parts, const float* mixed, Scratch& scratch) {
    for (int64_t row = 0; row < rows; ++row)
      fold<LENGTH>(scratch.all[row], scratch.totals.data() + row * LENGTH, parts[row], mixed + row * LENGTH);
  }

  void finish(const Task& task, Scratch& scratch) {
    const int64_t rows = rows_of(task), each = rows / task.num_heads;
    for (int64_t row = 0; row < rows; ++row)
      M::put(out + (token_of(task, row % each) * cache.heads + head_of(task, row)) * dim,
             scratch.totals.data() + row * LENGTH, 1.0f / scratch.all[row].sum);
  }

  // Where the tokens of a segment begin that a tile's rows see: at a multiple of 16.
  int64_t origin_of(const Tile& tile, int64_t segment) const {
    return std::max(segment * SEGMENT, options.begin(tile.position + 1) / W * W);
  }
  const S* keys_of(const Task& task, int64_t segment) const {
    const Tile& tile = *task.tile;
    return keys.elements + cache.place(tile.table_row, origin_of(tile, segment), task.first_head);
  }

  // One segment of a task's rows: scratch.parts and scratch.mixed. `after` are the keys that are read after it.
  void reduce(const Task& task, int64_t segment, const S* after, Scratch& scratch) {
    const Tile& tile = *task.tile;
    const int64_t rows = rows_of(task), each = rows / task.num_heads, stride = cache.block_size * dim;
    const int64_t begin = options.begin(tile.position + 1), end = tile.position + tile.count;
    const int64_t origin = origin_of(tile, segment);
    const int64_t width = (std::min((segment + 1) * SEGMENT, end) - origin + W - 1) / W * W;
    float* scores = scratch.scores.data();
    typename M::Weight* weights = scratch.weights.data();
    for (int64_t i = 0; i < width; i += W) {
      const S* next = i + W < width ? keys.elements + cache.place(tile.table_row, origin + i + W, task.first_head)
                                    : values.elements + cache.place(tile.table_row, origin, task.first_head);
      for (int64_t head = 0; head < task.num_heads; ++head) {
        const T* found = sixteen<V>(keys, cache, tile.table_row, task.first_head + head, origin + i, begin, end,
                                    scratch.sixteen.data());
        score(scores + head * each * width + i, width, scratch.query.data() + head * each * LENGTH,
              M::take_keys(scratch.rows.data(), found), next + head * stride, each, scratch);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t visible = tile.position + row % each / cache.group() + 1, hidden = options.begin(visible);
      const int64_t hi = std::min(visible - origin, width), lo = std::min(std::max<int64_t>(hidden - origin, 0), width);
      scratch.parts[row] = Reduced{-INFINITY, 0.0f};
      const float slope = options.slopes ? options.slopes[head_of(task, row)] : 0.0f;
      if (lo < hi)
        scratch.parts[row] = soften<M>(scores + row * width, weights + row * width, lo, hi, width, options.soft_cap,
                                       Fall{slope, origin, visible - 1, options.rounds_slopes});
      else
        std::memset((void*)(weights + row * width), 0, width * sizeof *weights);
    }
    std::fill_n(scratch.mixed.data(), rows * LENGTH, 0.0f);
    // Several heads take turns at each block; one head's values are laid out for many rows at once.
    const int64_t tokens = task.num_heads == 1 ? M::TOKENS : W;
    for (int64_t i = 0; i < width; i += tokens)
      for (int64_t head = 0; head < task.num_heads; ++head) {
        const int64_t first = origin + i, count = std::min(tokens, width - i), kv_head = task.first_head + head;
        bool is_safe = true;
        const auto take = [&](int64_t from, int64_t to) {
          const typename M::Element* rows_of_values = nullptr;
          for (int64_t t = 0; t < count; t += W) {
            const T* found =
                sixteen<V>(values, cache, tile.table_row, kv_head, first + t, from, to, scratch.sixteen.data());
            if (hides(tile, first + t) && !all_finite(found, W * dim)) is_safe = false;
            const S* next = i + t + W < width ? values.elements + cache.place(tile.table_row, first + t + W, kv_head)
                                              : after + head * stride;
            const typename M::Element* taken = M::take_values(scratch.values.data() + t * LENGTH, found, next);
            if (t == 0) rows_of_values = taken;
          }
          return rows_of_values;
        };
        const typename M::Element* taken_values = take(begin, end);
        const auto mix = [&](auto R, int64_t r) {
          const int64_t row = head * each + r;
          M::template mix<R>(scratch.mixed.data() + row * LENGTH, weights + row * width + i, width, taken_values, count);
        };
        if (is_safe) {
          in_blocks(each, mix);
          continue;
        }
        // A weight of 0 times an infinite value is no 0: no row may meet a value that it does not see.
        for (int64_t r = 0; r < each; ++r) {
          const int64_t visible = tile.position + r / cache.group() + 1;
          taken_values = take(options.begin(visible), visible);
          mix(std::integral_constant<int64_t, 1>{}, r);
        }
      }
  }

  // Whether some of 16 tokens are hidden from some row of a tile, and visible to another.
  bool hides(const Tile& tile, int64_t first) const {
    return tile.count > 1 && (first + W > tile.position + 1 || first < options.begin(tile.position + tile.count));
  }

  // Scores of a KV head's rows against 16 keys; `next` is read next.
  void score(float* scores, int64_t stride, const typename M::Element* queries, const typename M::Element* keys,
             const S* next, int64_t rows, Scratch& scratch) {
    const float scale = options.scale;
    if (rows <= FEW_ROWS) {
      in_blocks(rows, [&](auto R, int64_t r) {
        Vec total[R][W];
        M::template score_keys<R>(total, queries + r * LENGTH, keys, next);
        for (int64_t i = 0; i < R; ++i) store(scores + (r + i) * stride, sums(total[i]) * scale);
      });
      return;
    }
    M::take_lanes(scratch.lanes.data(), keys, next);
    in_blocks(rows, [&](auto R, int64_t r) {
      Vec total[R];
      M::template score_rows<R>(total, queries + r * LENGTH, scratch.lanes.data());
      for (int64_t i = 0; i < R; ++i) store(scores + (r + i) * stride, total[i] * scale);
    });
  }
};

}  // namespace

// PAGESTREAM_HEAD_DIM comes from the compiler's command line: a multiple of 16. One library serves one head size.
constexpr int64_t VECTORS = PAGESTREAM_HEAD_DIM / W;
static_assert(PAGESTREAM_HEAD_DIM % W == 0, "head_dim must be a multiple of 16");

#define PAGESTREAM_KERNELS(T, NAME)                                                                                    \
  void rms_norm_##NAME(T* out, const T* x, T* residual, const void* weight, bool is_wide, float eps, int64_t outer,    \
                       int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim, int threads) {          \
    const Norm<T> norm{weight, is_wide, eps};                                                                          \
    rms_norm(out, x, residual, norm, outer, inner, outer_stride, inner_stride, dim, threads);                          \
  }                                                                                                                    \
  void layer_norm_##NAME(T* out, const T* x, T* residual, const T* weight, const T* bias, float eps, int64_t outer,    \
                         int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim,                       \
                         int64_t weight_stride, int threads) {                                                         \
    layer_norm(out, x, residual, weight, bias, eps, outer, inner, outer_stride, inner_stride, dim, weight_stride,      \
               threads);                                                                                               \
  }                                                                                                                    \
  void silu_##NAME(T* out, const T* x, int64_t rows, int64_t dim, int threads) {                                       \
    activate<SILU>(out, x, rows, dim, threads);                                                                        \
  }                                                                                                                    \
  void gelu_##NAME(T* out, const T* x, int64_t rows, int64_t dim, int threads) {                                       \
    activate<GELU>(out, x, rows, dim, threads);                                                                        \
  }                                                                                                                    \
  void gelu_tanh_##NAME(T* out, const T* x, int64_t rows, int64_t dim, int threads) {                                  \
    activate<GELU_TANH>(out, x, rows, dim, threads);                                                                   \
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
                             const void* query_weight, const void* key_weight, bool is_wide, float eps,                \
                             const float* cos_sin, int64_t rotary_dim, bool interleaved, Stored<T>* key_cache,         \
                             Stored<T>* value_cache, float* key_scales, float* value_scales, int64_t scale_stride,     \
                             int64_t tokens, int64_t heads, int64_t kv_heads, int64_t block_size,                      \
                             int64_t block_stride, int64_t query_stride, int64_t key_stride, int64_t value_stride,     \
                             int threads) {                                                                            \
    const Rotation rotation{cos_sin, rotary_dim, interleaved};                                                         \
    const Turn<T> query_turn{{query_weight, is_wide, eps}, rotation}, key_turn{{key_weight, is_wide, eps}, rotation};  \
    const Target<Stored<T>> target{key_cache, value_cache, key_scales,  value_scales, scale_stride,                    \
                                   slots,     kv_heads,    VECTORS * W, block_size,   block_stride};                   \
    rope_and_cache(query, key, value, positions, query_turn, key_turn, target, tokens, heads, query_stride,            \
                   key_stride, value_stride, threads);                                                                 \
  }                                                                                                                    \
  void attention_##NAME(T* out, const T* query, const Stored<T>* keys, const Stored<T>* values,                        \
                        const float* key_scales, const float* value_scales, int64_t scale_stride,                      \
                        const int32_t* tables, int64_t table_stride, int64_t heads, int64_t kv_heads, int64_t block_size, \
                        int64_t block_stride, int64_t query_stride, float scale, float soft_cap, int64_t window,       \
                        const float* sinks, const float* slopes, bool rounds_slopes, const int64_t* tiles,             \
                        int64_t num_tiles, int threads) {                                                              \
    Attention<VECTORS, T, Stored<T>> attention;                                                                        \
    attention.keys = {keys, key_scales}, attention.values = {values, value_scales};                                    \
    attention.out = out, attention.query = query, attention.query_stride = query_stride;                               \
    attention.cache = {tables,      table_stride, heads,        kv_heads,                                              \
                       VECTORS * W, block_size,   block_stride, scale_stride};                                         \
    attention.options = {scale, soft_cap, window, sinks, slopes, rounds_slopes};                                       \
    attention.run((const Tile*)tiles, num_tiles, threads);                                                             \
  }

extern "C" {
PAGESTREAM_KERNELS(float, float32)
PAGESTREAM_KERNELS(bf16, bfloat16)
PAGESTREAM_KERNELS(fp16, float16)
}
