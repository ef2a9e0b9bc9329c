// Draws a token for each row of logits on a CPU: what sampler/draw.py does by torch's operations, without temporaries.
//
// A row is one thread's, from its first token to its last, in float32 on vectors of 16 and without contraction: a row's
// outcome depends neither on the rows beside it, nor on threads, nor on the level of instructions.
//
//   scale      logits / temperature in place, and the largest of them
//   threshold  min-p, top-k and top-p by a histogram of the distance to the largest, and a sort of one or two bins
//   draw       the largest of logit and noise among the tokens that stay. A token can only win if its uniform number is
//              below exp(logit - best so far), whence few logarithms are computed: about one for each row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int64_t W = 16, BLOCK = 64;
typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));
typedef uint64_t LVec __attribute__((vector_size(64)));        // half as many
typedef int32_t HalfIVec __attribute__((vector_size(W * 2)));  // likewise
typedef float HalfVec __attribute__((vector_size(W * 2)));

constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return (Vec){} + x; }
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
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
inline bool any(IVec lanes) {
  uint64_t parts[W / 2], all = 0;
  std::memcpy(parts, &lanes, sizeof parts);
  for (uint64_t part : parts) all |= part;
  return all != 0;
}

// exp by 2^n * 2^f, |f| <= 1/2, a polynomial for 2^f (relative error about 1e-7), between exp(-87) and exp(88).
inline Vec exponential(Vec x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : (x > splat(88.0f) ? splat(88.0f) : x);
  const Vec scaled = x * 1.44269504088896341f, shifted = scaled + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
  const Vec f = scaled - (shifted - 12582912.0f);
  Vec p = splat(1.5403530393381608e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910071e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  return p * (Vec)(((IVec)shifted - 0x4b400000 + 127) << 23);
}
inline float exponential(float x) { return exponential(splat(x))[0]; }

// A row's largest element; NaN where there is one.
template <typename T>
float largest_of(const T* row, int64_t size) {
  Vec most = splat(-INF), odd = splat(0.0f);
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const Vec x = load(row + i);
    most = x > most ? x : most;
    odd = x == x ? odd : x;
  }
  float lanes[2 * W];
  store(lanes, most), store(lanes + W, odd);
  float found = -INF;
  const auto take = [&](float x) { found = x != x || x > found ? x : found; };
  for (int64_t lane = 0; lane < W; ++lane) take(lanes[lane]);
  for (; i < size && found == found; ++i) take(widen(row[i]));
  for (int64_t lane = 0; lane < W; ++lane)
    if (lanes[W + lane] != lanes[W + lane]) return lanes[W + lane];
  return found;
}

// The first token whose logit is the largest; 0 where that is NaN.
template <typename T>
void largest(const T* logits, int64_t rows, int64_t size, float* values, int64_t* token_ids, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = logits + r * size;
    const float found = values[r] = largest_of(row, size);
    int64_t id = 0;
    if (found == found) {
      while (id + W <= size && !any(load(row + id) == splat(found))) id += W;
      while (widen(row[id]) != found) ++id;
    }
    token_ids[r] = id;
  }
}

// -- noise, as sampler/noise.py has it --

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

template <typename Bits>
inline Bits mix(Bits z) {
  z = (z ^ z >> 30) * MIX_1;
  z = (z ^ z >> 27) * MIX_2;
  return z ^ z >> 31;
}

struct Noise {
  uint64_t state;

  Noise(int64_t seed, int64_t position) : state(mix(mix(uint64_t(seed) + GAMMA) ^ (uint64_t(position) * GAMMA))) {}

  float gumbel(int64_t id) const {
    const uint64_t bits = mix(state + uint64_t(id + 1) * GAMMA);
    const float number = (float(int64_t(bits >> 11)) + 0.5f) * 0x1p-53f;
    const float uniform = std::min(number, 1.0f - 0x1p-24f);
    const float exponential = -float(std::log1p(-double(uniform)));
    return -float(std::log(double(exponential)));
  }

  // The uniform numbers of 16 tokens, cut off after 24 bits.
  Vec uniforms(int64_t first) const {
    float numbers[W];
    for (int64_t half = 0; half < W; half += W / 2) {
      const LVec counters = LVec{1, 2, 3, 4, 5, 6, 7, 8} + uint64_t(first + half);
      const HalfIVec bits = __builtin_convertvector(mix(counters * GAMMA + state) >> 40, HalfIVec);
      const HalfVec found = __builtin_convertvector(bits, HalfVec) * 0x1p-24f;
      std::memcpy(numbers + half, &found, sizeof found);
    }
    return load(numbers);
  }
};

// -- thresholds --

// Tokens by their distance to the largest logit: a bin has all distances with the same leading bits of a float.
class Histogram {
  static constexpr int SHIFT = 18;  // five bits of the mantissa stay: bins of 1/32 of the distance
  static constexpr int64_t NUM_BINS = (0x7f800000 >> SHIFT) + 1;

 public:
  Histogram() : counts(NUM_BINS), masses(NUM_BINS) {}

  // The smallest of a row's logits that stay. Those below `floor` do not; `largest` is finite.
  float threshold(const float* row, int64_t size, float largest, float floor, int64_t top_k, float top_p) {
    this->row = row, this->size = size, this->largest = largest;
    lowest = std::max(floor, -std::numeric_limits<float>::max());
    fill();
    double total = 0.0;
    int64_t count = 0;
    for (int64_t bin = 0; bin < NUM_BINS; ++bin) total += masses[bin], count += counts[bin];
    if (top_k < count) {
      int64_t bin = 0;
      for (count = counts[0], total = masses[0]; count < top_k; count += counts[bin], total += masses[bin]) ++bin;
      take(bin);
      lowest = sorted[top_k - (count - counts[bin]) - 1];
      total -= masses[bin];
      for (float logit : sorted)
        if (logit >= lowest) total += exponential(logit - largest);
    }
    if (top_p < 1.0f) lowest = std::max(lowest, nucleus(double(top_p) * total));
    return lowest;
  }

 private:
  std::vector<int32_t> counts;
  std::vector<double> masses;  // relative to the largest's
  std::vector<float> sorted;   // of a bin, the largest first
  const float* row;
  int64_t size;
  float largest, lowest;

  static int64_t bin_of(float distance) {
    uint32_t bits;
    std::memcpy(&bits, &distance, sizeof bits);
    return bits >> SHIFT;
  }

  void fill() {
    std::fill(counts.begin(), counts.end(), 0);
    std::fill(masses.begin(), masses.end(), 0.0);
    for (int64_t i = 0; i < size; i += W) {
      float logits[W], weights[W];
      const int64_t count = std::min(W, size - i);
      std::fill(std::copy_n(row + i, count, logits), logits + W, -INF);
      store(weights, exponential(load(logits) - largest));
      for (int64_t lane = 0; lane < W; ++lane) {
        if (!(logits[lane] >= lowest)) continue;
        const int64_t bin = bin_of(largest - logits[lane]);
        ++counts[bin];
        masses[bin] += weights[lane];
      }
    }
  }

  void take(int64_t bin) {
    sorted.clear();
    for (int64_t i = 0; i < size; ++i)
      if (row[i] >= lowest && bin_of(largest - row[i]) == bin) sorted.push_back(row[i]);
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
  }

  // The last logit that has less than `mass` before it.
  float nucleus(double mass) {
    double before = 0.0;
    int64_t bin = 0;
    while (bin < NUM_BINS && before + masses[bin] < mass) before += masses[bin++];
    if (bin == NUM_BINS) return lowest;
    take(bin);
    float last = lowest;
    for (float logit : sorted) {
      if (before >= mass) break;
      before += exponential(logit - largest);
      last = logit;
    }
    return last;
  }
};

// -- the draw --

struct Draw {
  float* logits;              // (rows, size), become logits / temperature
  const float* temperatures;  // (rows,), as all below
  const int64_t* seeds;
  const int64_t* positions;
  const int64_t* top_k;  // null where no row filters, as the two below
  const float* top_p;
  const float* min_p;
  int64_t rows, size;
  float* values;
  int64_t* token_ids;

  void run(int threads) const {
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
      Histogram histogram;
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; ++r) draw(r, histogram);
    }
  }

  void draw(int64_t r, Histogram& histogram) const {
    float* row = logits + r * size;
    for (int64_t i = 0; i < size; ++i) row[i] /= temperatures[r];
    const float most = largest_of(row, size);
    values[r] = most, token_ids[r] = 0;
    if (!std::isfinite(most)) return;
    float lowest = -std::numeric_limits<float>::max();
    if (min_p && min_p[r] > 0.0f) lowest = most + float(std::log(double(min_p[r])));
    const int64_t k = top_k ? top_k[r] : size;
    const float p = top_p ? top_p[r] : 1.0f;
    if (k < size || p < 1.0f) lowest = histogram.threshold(row, size, most, lowest, k, p);
    choose(r, row, std::min(lowest, most));
  }

  void choose(int64_t r, const float* row, float lowest) const {
    const Noise noise(seeds[r], positions[r]);
    float best = -INF, limit = -INF;
    for (int64_t first = 0; first < size; first += BLOCK) {
      float rest[BLOCK];
      const float* block = row + first;
      const int64_t count = std::min(BLOCK, size - first);
      if (count < BLOCK) {
        std::fill(std::copy_n(block, count, rest), rest + BLOCK, -INF);
        block = rest;
      }
      IVec stays = {}, may_win = {};
      for (int64_t i = 0; i < BLOCK; i += W) stays |= load(block + i) >= lowest;
      if (!any(stays)) continue;
      for (int64_t i = 0; i < BLOCK; i += W) {
        const Vec x = load(block + i);
        may_win |= (x >= lowest) & (noise.uniforms(first + i) <= exponential(x - limit));
      }
      if (!any(may_win)) continue;
      for (int64_t i = 0; i < count; ++i) {
        if (!(block[i] >= lowest)) continue;
        const float value = block[i] + noise.gumbel(first + i);
        if (!(value > best)) continue;
        best = value, token_ids[r] = first + i;
        limit = best - 1e-3f - std::fabs(best) * 0x1p-22f;  // what rounding may add to a sum of logit and noise
      }
    }
    values[r] = best;
  }
};

}  // namespace

// Memory is contiguous. `values` is what each token was chosen by: not finite where none can be.
extern "C" {
void largest_float32(const float* logits, int64_t rows, int64_t size, float* values, int64_t* token_ids, int threads) {
  largest(logits, rows, size, values, token_ids, threads);
}
void largest_bfloat16(const bf16* logits, int64_t rows, int64_t size, float* values, int64_t* token_ids, int threads) {
  largest(logits, rows, size, values, token_ids, threads);
}
void draw(float* logits, const float* temperatures, const int64_t* seeds, const int64_t* positions,
          const int64_t* top_k, const float* top_p, const float* min_p, int64_t rows, int64_t size, float* values,
          int64_t* token_ids, int threads) {
  Draw{logits, temperatures, seeds, positions, top_k, top_p, min_p, rows, size, values, token_ids}.run(threads);
}
}
