// From rows of logits to tokens: the likeliest, or a draw by noise per token; and what forbids
// tokens before. Knows nothing of requests.
//
// A draw is argmax((logit - peak) / temperature + g), the Gumbel-max trick (Gumbel 1954; Maddison,
// Tarlow, Minka, A* Sampling, 2014, section 2), with g = -log(-log1p(-v)) for v from a hash of
// (seed, position, token). The logarithms are taken for the few tokens only that a bound on g
// leaves; the result has the bits of the plain formula.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "numeric.h"

namespace treadle {
namespace {

constexpr int64_t kBlock = 256;          // tokens that are kept or dropped together
constexpr int64_t kSlice = 16 * kBlock;  // tokens of a work item
constexpr int64_t kParallelTokens = 1 << 15;  // below this a second thread costs more than it saves
constexpr float kNever = -std::numeric_limits<float>::infinity();

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio

// One round of splitmix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// In [2^-32, 1]: 31 bits of the token's hash, and a half.
inline float uniform(uint64_t row_hash, int64_t token) {
  const uint64_t mixed = mix(row_hash + static_cast<uint64_t>(token) * kGolden);
  return (static_cast<float>(static_cast<int32_t>(mixed >> 33)) + 0.5f) * 0x1p-31f;
}

inline float gumbel(float v) { return -std::log(-std::log1p(-std::min(v, 1 - 0x1p-24f))); }

// Above gumbel(v): -log1p(-v) >= v, and log2(v) is above its chords between powers of two, which
// are what the bits of a float say. The last term is for rounding, here and in the score: 32 units
// of the integer and two roundings of numbers up to 88 make 2e-5.
inline float gumbel_bound(float v) {
  constexpr float kLn2 = 0.693147181f;
  const auto bits = static_cast<float>(std::bit_cast<int32_t>(v));
  return 127 * kLn2 - bits * (kLn2 * 0x1p-23f) + 1e-4f;
}

// A value and the token that has it as one number: it grows with the value, of equals the lower
// token has the larger. Zero is below them all. Values are never NaN.
uint64_t pack(float value, int64_t token) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // zeros of either sign are one
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(token);
}

float value_of(uint64_t packed) {
  const auto ordered = static_cast<uint32_t>(packed >> 32);
  return std::bit_cast<float>(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

int64_t token_of(uint64_t packed) { return ~static_cast<uint32_t>(packed); }

// In any order of calls the largest stays, so results do not depend on the threads.
void raise(uint64_t& shared, uint64_t packed) {
  const std::atomic_ref<uint64_t> target(shared);
  uint64_t seen = target.load(std::memory_order_relaxed);
  while (packed > seen && !target.compare_exchange_weak(seen, packed, std::memory_order_relaxed)) {
  }
}

// A NaN is never the largest.
float largest(const float* x, int64_t count) {
  float found = kNever;
#pragma omp simd reduction(max : found)
  for (int64_t i = 0; i < count; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

uint64_t likeliest(const float* logits, int64_t begin, int64_t end) {
  float best = kNever;
  int64_t at = begin;
  for (int64_t first = begin; first < end; first += kBlock) {
    const float found = largest(logits + first, std::min(kBlock, end - first));
    if (found > best) best = found, at = first;
  }
  if (best == kNever) return pack(kNever, begin);
  while (!(logits[at] == best)) ++at;
  return pack(best, at);
}

struct Row {
  const float* logits;
  float temperature, peak;  // the peak is finite
  uint64_t hash;            // of seed and position

  float scaled(int64_t token) const { return (logits[token] - peak) / temperature; }

  uint64_t score(int64_t token) const {
    return pack(scaled(token) + gumbel(uniform(hash, token)), token);
  }
};

// The best of the slice's scores and `best`.
uint64_t draw(const Row& row, int64_t begin, int64_t end, uint64_t best) {
  const float highest = gumbel_bound(0x1p-32f);
  float bounds[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    const float* logits = row.logits + first;
    float least = value_of(best);
    if ((largest(logits, count) - row.peak) / row.temperature + highest < least) continue;
    int32_t hits = 0;
#pragma omp simd reduction(+ : hits)
    for (int64_t i = 0; i < count; ++i) {
      const float scaled = (logits[i] - row.peak) / row.temperature;
      bounds[i] = scaled + gumbel_bound(uniform(row.hash, first + i));
      hits += bounds[i] >= least;
    }
    for (int64_t i = 0; hits && i < count; ++i) {
      if (!(bounds[i] >= least)) continue;
      best = std::max(best, row.score(first + i));
      least = value_of(best);
    }
  }
  return best;
}

void sample(const float* logits, const float* temperature, const int64_t* seeds,
            const int64_t* positions, int64_t* out, int64_t rows, int64_t vocab, int64_t stride) {
  std::vector<uint64_t> peaks(static_cast<size_t>(rows)), drawn(static_cast<size_t>(rows));
#pragma omp parallel if (rows * vocab > kParallelTokens)
  {
#pragma omp for collapse(2)
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t begin = 0; begin < vocab; begin += kSlice) {
        raise(peaks[n], likeliest(logits + n * stride, begin, std::min(begin + kSlice, vocab)));
      }
    }
#pragma omp for collapse(2)
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t begin = 0; begin < vocab; begin += kSlice) {
        const float peak = value_of(peaks[n]);
        if (!temperature || !(temperature[n] > 0) || !std::isfinite(peak)) continue;
        const uint64_t key = mix(static_cast<uint64_t>(seeds[n]));
        const Row row{logits + n * stride, temperature[n], peak,
                      mix(key + static_cast<uint64_t>(positions[n]) * kGolden)};
        // a good score at the start leaves fewer candidates
        const uint64_t known = std::atomic_ref(drawn[n]).load(std::memory_order_relaxed);
        const uint64_t start = std::max(known, row.score(token_of(peaks[n])));
        raise(drawn[n], draw(row, begin, std::min(begin + kSlice, vocab), start));
      }
    }
  }
  for (int64_t n = 0; n < rows; ++n) out[n] = token_of(drawn[n] ? drawn[n] : peaks[n]);
}

}  // namespace
}  // namespace treadle

// logits: [rows, vocab], stride between rows. temperature may be null: all rows are greedy, as
// those at 0. Tokens that are not a number are never chosen; nothing possible: token 0.
TREADLE_EXPORT void treadle_sample(const float* logits, const float* temperature,
                                   const int64_t* seeds, const int64_t* positions, int64_t* out,
                                   int64_t rows, int64_t vocab, int64_t stride) {
  treadle::sample(logits, temperature, seeds, positions, out, rows, vocab, stride);
}
TREADLE_RECORDABLE(treadle_sample)

// Where allowed [rows, vocab] is false, logits become -inf; strides between rows.
TREADLE_EXPORT void treadle_mask_logits(float* logits, const bool* allowed, int64_t rows,
                                        int64_t vocab, int64_t logits_stride,
                                        int64_t allowed_stride) {
#pragma omp parallel for if (rows * vocab > treadle::kParallelTokens)
  for (int64_t n = 0; n < rows; ++n) {
    float* x = logits + n * logits_stride;
    const bool* may = allowed + n * allowed_stride;
    for (int64_t i = 0; i < vocab; ++i) x[i] = may[i] ? x[i] : treadle::kNever;
  }
}
TREADLE_RECORDABLE(treadle_mask_logits)

// logits[rows[i], ids[i]] = -inf; a row below 0 is padding.
TREADLE_EXPORT void treadle_ban(float* logits, const int64_t* rows, const int64_t* ids,
                                int64_t count, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0) logits[rows[i] * stride + ids[i]] = treadle::kNever;
  }
}
TREADLE_RECORDABLE(treadle_ban)
