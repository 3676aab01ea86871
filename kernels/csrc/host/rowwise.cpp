// Kernels that treat every token by itself: norms, rotary embedding, activation, cache store.
// Knows nothing of attention.
//
// Shapes and strides count elements. A row of D features is contiguous; strides are between rows.
// kind: 0 for fp32, 1 for bf16.

#include <cstdint>
#include <cstring>

#include "numeric.h"

namespace treadle {
namespace {

// Below this many elements a second thread costs more than it saves: it must wake first.
constexpr int64_t kParallelElements = 1 << 16;

template <class T>
void normalize(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < dim; ++d) squares += widen(x[d]) * widen(x[d]);
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(dim) + eps);
  for (int64_t d = 0; d < dim; ++d) {
    out[d] = narrow<T>(round_to<T>(widen(x[d]) * scale) * widen(weight[d]));
  }
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t dim,
              int64_t stride, float eps) {
#pragma omp parallel for if (tokens * heads * dim > kParallelElements)
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      normalize(x + t * stride + h * dim, weight, out + (t * heads + h) * dim, dim, eps);
    }
  }
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t tokens, int64_t dim,
                  float eps) {
#pragma omp parallel for if (tokens * dim > kParallelElements)
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = t * dim;
    for (int64_t d = row; d < row + dim; ++d) {
      residual[d] = narrow<T>(widen(x[d]) + widen(residual[d]));
    }
    normalize(residual + row, weight, out + row, dim, eps);
  }
}

template <class T>
void rotate(const T* x, T* out, const float* cos, const float* sin, int64_t half, int64_t dim,
            bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]);
      out[2 * i] = narrow<T>(a * cos[i] - b * sin[i]);
      out[2 * i + 1] = narrow<T>(b * cos[i] + a * sin[i]);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float a = widen(x[i]), b = widen(x[i + half]);
      out[i] = narrow<T>(a * cos[i] - b * sin[i]);
      out[i + half] = narrow<T>(b * cos[i] + a * sin[i]);
    }
  }
  std::memcpy(out + 2 * half, x + 2 * half, static_cast<size_t>(dim - 2 * half) * sizeof(T));
}

template <class T>
void rope(const T* q, const T* k, const int64_t* positions, const float* cos_sin, T* q_out,
          T* k_out, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim,
          int64_t rotary_dim, int64_t q_stride, int64_t k_stride, bool interleaved) {
  const int64_t half = rotary_dim / 2;
#pragma omp parallel for if (tokens * (q_heads + kv_heads) * dim > kParallelElements)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cos = cos_sin + positions[t] * rotary_dim;
    for (int64_t h = 0; h < q_heads; ++h) {
      rotate(q + t * q_stride + h * dim, q_out + (t * q_heads + h) * dim, cos, cos + half, half,
             dim, interleaved);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      rotate(k + t * k_stride + h * dim, k_out + (t * kv_heads + h) * dim, cos, cos + half, half,
             dim, interleaved);
    }
  }
}

float silu(float x) { return x / (1.0f + fast_exp(-x)); }

// (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)), with z = sqrt(2 / pi) (x + 0.044715 x^3).
float gelu_tanh(float x) {
  return x / (1.0f + fast_exp(-1.59576912f * (x + 0.044715f * x * x * x)));
}

// The activated gate is rounded to T before the product, as torch's own operators do.
template <float (*activate)(float), class T>
void gate_and_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int64_t stride) {
#pragma omp parallel for if (tokens * size > kParallelElements)
  for (int64_t t = 0; t < tokens; ++t) {
    const T* gate = gate_up + t * stride;
    const T* up = gate + size;
    for (int64_t i = 0; i < size; ++i) {
      out[t * size + i] = narrow<T>(round_to<T>(activate(widen(gate[i]))) * widen(up[i]));
    }
  }
}

void store_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots,
              int64_t tokens, int64_t row_bytes, int64_t k_stride, int64_t v_stride) {
  const auto bytes = static_cast<size_t>(row_bytes);
#pragma omp parallel for if (tokens * row_bytes > kParallelElements * 4)
  for (int64_t t = 0; t < tokens; ++t) {
    std::memcpy(k_cache + slots[t] * row_bytes, k + t * k_stride, bytes);
    std::memcpy(v_cache + slots[t] * row_bytes, v + t * v_stride, bytes);
  }
}

template <class T>
const T* in(const void* data) {
  return static_cast<const T*>(data);
}

template <class T>
T* out(void* data) {
  return static_cast<T*>(data);
}

}  // namespace
}  // namespace treadle

using treadle::Bf16;
using treadle::in;
using treadle::out;

// x, y: [tokens, heads, dim]; stride between tokens of x; y is contiguous.
TREADLE_EXPORT void treadle_rms_norm(int kind, const void* x, const void* weight, void* y,
                                     int64_t tokens, int64_t heads, int64_t dim, int64_t stride,
                                     float eps) {
  const auto run = [&]<class T>(T) {
    treadle::rms_norm(in<T>(x), in<T>(weight), out<T>(y), tokens, heads, dim, stride, eps);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_rms_norm)

// All [tokens, dim], contiguous; residual += x, y = norm(residual).
TREADLE_EXPORT void treadle_add_rms_norm(int kind, const void* x, void* residual,
                                         const void* weight, void* y, int64_t tokens, int64_t dim,
                                         float eps) {
  const auto run = [&]<class T>(T) {
    treadle::add_rms_norm(in<T>(x), out<T>(residual), in<T>(weight), out<T>(y), tokens, dim, eps);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_add_rms_norm)

// q: [tokens, q_heads, dim], k: [tokens, kv_heads, dim]; strides between tokens, outputs dense.
TREADLE_EXPORT void treadle_rope(int kind, const void* q, const void* k, const int64_t* positions,
                                 const float* cos_sin, void* q_out, void* k_out, int64_t tokens,
                                 int64_t q_heads, int64_t kv_heads, int64_t dim,
                                 int64_t rotary_dim, int64_t q_stride, int64_t k_stride,
                                 int interleaved) {
  const auto run = [&]<class T>(T) {
    treadle::rope(in<T>(q), in<T>(k), positions, cos_sin, out<T>(q_out), out<T>(k_out), tokens,
                  q_heads, kv_heads, dim, rotary_dim, q_stride, k_stride, interleaved != 0);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_rope)

// gate_up: [tokens, 2 size] with a stride between tokens, y: [tokens, size], contiguous.
TREADLE_EXPORT void treadle_silu_and_mul(int kind, const void* gate_up, void* y, int64_t tokens,
                                         int64_t size, int64_t stride) {
  const auto run = [&]<class T>(T) {
    treadle::gate_and_mul<treadle::silu>(in<T>(gate_up), out<T>(y), tokens, size, stride);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_silu_and_mul)

// As treadle_silu_and_mul, with the tanh approximation of gelu.
TREADLE_EXPORT void treadle_gelu_tanh_and_mul(int kind, const void* gate_up, void* y,
                                              int64_t tokens, int64_t size, int64_t stride) {
  const auto run = [&]<class T>(T) {
    treadle::gate_and_mul<treadle::gelu_tanh>(in<T>(gate_up), out<T>(y), tokens, size, stride);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_gelu_tanh_and_mul)

// k, v: [tokens, row]; caches: [slots, row]; all sizes and strides in bytes.
TREADLE_EXPORT void treadle_store_kv(const void* k, const void* v, void* k_cache, void* v_cache,
                                     const int64_t* slots, int64_t tokens, int64_t row_bytes,
                                     int64_t k_stride, int64_t v_stride) {
  treadle::store_kv(in<char>(k), in<char>(v), out<char>(k_cache), out<char>(v_cache), slots,
                    tokens, row_bytes, k_stride, v_stride);
}
TREADLE_RECORDABLE(treadle_store_kv)
