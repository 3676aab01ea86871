// Scalars of the host kernels: bf16, rounding, exp. Knows nothing of any kernel.
//
// Everything here is free of branches, so that loops over it vectorise.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#define TREADLE_EXPORT extern "C" __attribute__((visibility("default")))

// Beside each kernel the same with its arguments as 64-bit words, which a recorded tape calls.
#define TREADLE_RECORDABLE(kernel)                               \
  TREADLE_EXPORT void kernel##_words(const int64_t* words) {     \
    treadle::call_with(kernel, words);                           \
  }

namespace treadle {

template <class T>
T from_word(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(static_cast<int32_t>(word));
  } else {
    return static_cast<T>(word);
  }
}

template <class... Arguments>
void call_with(void (*kernel)(Arguments...), const int64_t* words) {
  const auto call = [&]<std::size_t... I>(std::index_sequence<I...>) {
    kernel(from_word<Arguments>(words[I])...);
  };
  call(std::index_sequence_for<Arguments...>{});
}

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(Bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

template <class T>
T narrow(float x);

template <>
inline float narrow<float>(float x) {
  return x;
}

// To nearest, ties to even; a NaN stays one.
template <>
inline Bf16 narrow<Bf16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return Bf16{static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

template <class T>
float round_to(float x) {
  return widen(narrow<T>(x));
}

// exp with a relative error below 3e-7; 0 below -87, and constant above 88. A NaN stays one.
// x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series of exp(r) to r^6, times 2^n.
// F is float or a vector of them, Bits the unsigned integers of the same shape.
template <class F, class Bits>
inline F exp_of(F x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const F clamped = x > 88.0f ? F{} + 88.0f : x;
  const F shifted = clamped * 1.44269504f + kRounder;
  const F n = shifted - kRounder;
  const F r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  F series = r * (1.0f / 720) + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const Bits exponent = std::bit_cast<Bits>(shifted) - std::bit_cast<uint32_t>(kRounder);
  const F power = std::bit_cast<F>((exponent + 127u) << 23);
  return x < -87.0f ? F{} : series * power;
}

inline float fast_exp(float x) { return exp_of<float, uint32_t>(x); }

}  // namespace treadle
