// Activations of gated MLPs, and the exponential of a softmax, on vectors of float32 of any length.

#pragma once

#include <cmath>
#include <cstdint>

namespace {

enum Activation { SILU, GELU, GELU_TANH };

// exp by 2^n * 2^f, |f| <= 1/2, a polynomial for 2^f (relative error about 1e-7); below -87 it is 0.
template <class Vec>
inline Vec exponential(Vec x) {
  using IVec = decltype(x < x);  // int32_t, as many
  const Vec least = Vec{} - 87.0f, most = Vec{} + 88.0f;
  Vec clamped = x < least ? least : (x > most ? most : x);
  Vec scaled = clamped * 1.44269504088896341f;
  Vec shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest whole number
  IVec whole = (IVec)shifted - 0x4b400000;
  Vec f = scaled - (shifted - 12582912.0f);
  Vec p = Vec{} + 1.5403530393381608e-4f;
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910071e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  Vec power = (Vec)((whole + 127) << 23);
  return x < least ? Vec{} : p * power;
}

template <class Vec>
inline Vec hyperbolic_tangent(Vec x) {
  return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}

// Absolute error below 5e-7 (Abramowitz and Stegun 1964, 7.1.26).
template <class Vec>
inline Vec error_function(Vec x) {
  const Vec size = x < 0.0f ? -x : x, place = 1.0f / (size * 0.3275911f + 1.0f);
  Vec p = Vec{} + 1.061405429f;
  p = p * place - 1.453152027f;
  p = p * place + 1.421413741f;
  p = p * place - 0.284496736f;
  p = p * place + 0.254829592f;
  const Vec rest = 1.0f - p * place * exponential(-(size * size));
  return x < 0.0f ? -rest : rest;
}

template <Activation A, class Vec>
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

}  // namespace
