// Vectors and the two dense operations that attention is made of: a small matrix product and a
// transposition. Knows nothing of attention.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

#include "numeric.h"

namespace treadle {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kColumns = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kColumns = 2;
#else
constexpr int kLanes = 4, kColumns = 2;
#endif
constexpr int kRows = 6;  // kRows x kColumns sums fit the register file of each

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef Vec LooseVec __attribute__((aligned(sizeof(float)), may_alias));  // anywhere in memory

inline Vec load(const float* x) { return *reinterpret_cast<const LooseVec*>(x); }

inline Vec load(const Bf16* x) {
#if defined(__AVX512F__)  // gcc widens a general vector of this size in two halves
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const auto words = (Words)_mm512_maskz_cvtepu16_epi32(0xffff, halves);
#else
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  const auto words = __builtin_convertvector(halves, Words);
#endif
  return (Vec)(words << 16);
}

inline void store(float* x, Vec value) { *reinterpret_cast<LooseVec*>(x) = value; }

inline Vec fast_exp(Vec x) { return exp_of<Vec, Words>(x); }

// c[Rows, Columns Vecs] (+)= a[Rows, depth] * b[depth, from column]; sums stay in registers.
// b_row(k) points at row k of b.
template <int Rows, int Columns, class RowOf>
inline void multiply_tile(const float* a, int64_t lda, const RowOf& b_row, int64_t column,
                          float* c, int64_t ldc, int64_t depth, bool accumulate) {
  Vec sums[Rows][Columns];
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) {
      sums[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[Columns];
    for (int j = 0; j < Columns; ++j) row[j] = load(b_row(k) + column + j * kLanes);
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < Columns; ++j) sums[i][j] += a[i * lda + k] * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) store(c + i * ldc + j * kLanes, sums[i][j]);
  }
}

// As multiply_tile, for any number of rows up to Rows.
template <int Rows, int Columns, class RowOf>
inline void multiply_rows(int64_t rows, const float* a, int64_t lda, const RowOf& b_row,
                          int64_t column, float* c, int64_t ldc, int64_t depth, bool accumulate) {
  if (rows == Rows) {
    multiply_tile<Rows, Columns>(a, lda, b_row, column, c, ldc, depth, accumulate);
  } else if constexpr (Rows > 1) {
    multiply_rows<Rows - 1, Columns>(rows, a, lda, b_row, column, c, ldc, depth, accumulate);
  }
}

// c[rows, width] (+)= a[rows, depth] * b[depth, width]; b_row(k) points at row k of b, which is
// fp32 or bf16. width is a multiple of kLanes.
template <class RowOf>
inline void multiply(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t lda,
                     const RowOf& b_row, float* c, int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < rows; i += kRows) {
    const int64_t some = rows - i < kRows ? rows - i : kRows;
    const float* a_rows = a + i * lda;
    float* c_rows = c + i * ldc;
    int64_t j = 0;
    for (; j + kColumns * kLanes <= width; j += kColumns * kLanes) {
      multiply_rows<kRows, kColumns>(some, a_rows, lda, b_row, j, c_rows + j, ldc, depth,
                                     accumulate);
    }
    for (; j < width; j += kLanes) {
      multiply_rows<kRows, 1>(some, a_rows, lda, b_row, j, c_rows + j, ldc, depth, accumulate);
    }
  }
}

#if defined(__clang__)
#define TREADLE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(kLanes * sizeof(int32_t))));
#define TREADLE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Lanes{__VA_ARGS__})
#endif

// Two rows of a matrix of Size x Size blocks, Size apart: their blocks of even and of odd columns.
template <int Size, int... Lane>
inline std::pair<Vec, Vec> pair_blocks(Vec a, Vec b, std::integer_sequence<int, Lane...>) {
  return {TREADLE_SHUFFLE(a, b, ((Lane & Size) ? kLanes + Lane - Size : Lane)...),
          TREADLE_SHUFFLE(a, b, ((Lane & Size) ? kLanes + Lane : Lane + Size)...)};
}

// Transposes a kLanes x kLanes matrix in place (Eklundh 1972: by halves, then quarters ...).
template <int Size = kLanes / 2>
inline void transpose(Vec* rows) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & Size) continue;
    const auto [even, odd] =
        pair_blocks<Size>(rows[i], rows[i + Size], std::make_integer_sequence<int, kLanes>{});
    rows[i] = even;
    rows[i + Size] = odd;
  }
  if constexpr (Size > 1) transpose<Size / 2>(rows);
}

// The sum of each of kLanes rows: a transposition that adds as it goes. Overwrites the rows.
template <int Size = kLanes / 2>
inline Vec sum_rows(Vec* rows) {
  for (int i = 0; i < Size; ++i) {
    const auto [even, odd] =
        pair_blocks<Size>(rows[i], rows[i + Size], std::make_integer_sequence<int, kLanes>{});
    rows[i] = even + odd;
  }
  if constexpr (Size > 1) return sum_rows<Size / 2>(rows);
  return rows[0];
}

// In every lane, the highest of all lanes.
template <int Size = kLanes / 2, int... Lane>
inline Vec spread_highest(Vec x, std::integer_sequence<int, Lane...> lanes) {
  const Vec swapped = TREADLE_SHUFFLE(x, x, (Lane ^ Size)...);
  x = x > swapped ? x : swapped;
  if constexpr (Size > 1) return spread_highest<Size / 2>(x, lanes);
  return x;
}

inline Vec spread_highest(Vec x) {
  return spread_highest(x, std::make_integer_sequence<int, kLanes>{});
}

}  // namespace treadle
