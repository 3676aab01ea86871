// Linear layers: x W^T + b, with W as checkpoints store it, never packed and read once for as many
// tokens as fit the cache. Knows nothing of what is projected.
//
// Both operands are contiguous along the summed dimension, so a tile multiplies vectors along it
// and adds up lanes only at the end: kLanes dot products, whose sums make one vector. A token's
// result has the same bits whatever tokens stand beside it.

#include <algorithm>
#include <cstdint>

#include "numeric.h"
#include "tile.h"

namespace treadle {
namespace {

constexpr int64_t kBlockBytes = 1 << 19;  // of x, which stays in the L2 cache while W passes
constexpr int kRowsOfTile = 4;
constexpr int kAheadFeatures = 32;  // how far ahead weights are fetched from memory

// One vector of each operand: how to load it, and how to add a product of two of them.
template <class T>
struct Operand {
  using Values = Vec;
  static constexpr int64_t kSize = kLanes;
  static Values load(const T* x) { return treadle::load(x); }
  static Vec multiply_add(Vec sum, Values a, Values b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Operand<Bf16> {
  using Values = __m512bh;
  static constexpr int64_t kSize = 2 * kLanes;
  static Values load(const Bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static Vec multiply_add(Vec sum, Values a, Values b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};
#endif

template <class T>
struct Layer {
  const T *x, *weight, *bias;  // bias may be null
  T* out;
  int64_t tokens, inputs, outputs, x_stride;
};

// out[Rows tokens, kLanes / Rows features]. Fetch: for the first tokens that meet these weights.
template <int Rows, bool Fetch, class T>
void multiply_tile(const Layer<T>& layer, int64_t token, int64_t feature) {
  constexpr int kFeatures = kLanes / Rows;
  using Op = Operand<T>;
  const T* x = layer.x + token * layer.x_stride;
  const T* weight = layer.weight + feature * layer.inputs;
  Vec sums[kLanes] = {};
  for (int64_t d = 0; d < layer.inputs; d += Op::kSize) {
    typename Op::Values w[kFeatures];
    for (int j = 0; j < kFeatures; ++j) {
      w[j] = Op::load(weight + j * layer.inputs + d);
      if constexpr (Fetch) __builtin_prefetch(weight + (j + kAheadFeatures) * layer.inputs + d);
    }
    for (int i = 0; i < Rows; ++i) {
      const auto values = Op::load(x + i * layer.x_stride + d);
      for (int j = 0; j < kFeatures; ++j) {
        sums[i * kFeatures + j] = Op::multiply_add(sums[i * kFeatures + j], values, w[j]);
      }
    }
  }
  float totals[kLanes];
  store(totals, sum_rows(sums));
  if (layer.bias) {
    for (int n = 0; n < kLanes; ++n) totals[n] += widen(layer.bias[feature + n % kFeatures]);
  }
  T rounded[kLanes];
  for (int n = 0; n < kLanes; ++n) rounded[n] = narrow<T>(totals[n]);
  for (int i = 0; i < Rows; ++i) {
    std::copy_n(rounded + i * kFeatures, kFeatures,
                layer.out + (token + i) * layer.outputs + feature);
  }
}

// Tokens [token, end) of kLanes features: in tiles of Rows tokens, the rest in tiles of fewer.
template <int Rows, class T>
void multiply_features(const Layer<T>& layer, int64_t token, int64_t end, int64_t feature) {
  const int64_t whole = end - (end - token) % Rows;
  for (int64_t f = feature; f < feature + kLanes && token < whole; f += kLanes / Rows) {
    multiply_tile<Rows, true>(layer, token, f);
    for (int64_t t = token + Rows; t < whole; t += Rows) multiply_tile<Rows, false>(layer, t, f);
  }
  if constexpr (Rows > 1) multiply_features<Rows / 2>(layer, whole, end, feature);
}

template <class T>
void linear(const Layer<T>& layer) {
  const int64_t fitting = kBlockBytes / (layer.inputs * static_cast<int64_t>(sizeof(T)));
  const int64_t block = std::max<int64_t>(fitting / kRowsOfTile, 4) * kRowsOfTile;
#pragma omp parallel
  for (int64_t token = 0; token < layer.tokens; token += block) {
    const int64_t end = std::min(token + block, layer.tokens);
#pragma omp for schedule(static) nowait
    for (int64_t feature = 0; feature < layer.outputs; feature += kLanes) {
      multiply_features<kRowsOfTile>(layer, token, end, feature);
    }
  }
}

}  // namespace
}  // namespace treadle

// x: [tokens, inputs], x_stride between tokens; weight: [outputs, inputs]; bias: [outputs] or null;
// out: [tokens, outputs]. inputs is a multiple of 32, outputs of 16. kind: 0 for fp32, 1 for bf16.
TREADLE_EXPORT void treadle_linear(int kind, const void* x, const void* weight, const void* bias,
                                   void* out, int64_t tokens, int64_t inputs, int64_t outputs,
                                   int64_t x_stride) {
  const auto run = [&]<class T>(T) {
    treadle::linear<T>({static_cast<const T*>(x), static_cast<const T*>(weight),
                        static_cast<const T*>(bias), static_cast<T*>(out), tokens, inputs, outputs,
                        x_stride});
  };
  kind == 0 ? run(float{}) : run(treadle::Bf16{});
}
TREADLE_RECORDABLE(treadle_linear)
