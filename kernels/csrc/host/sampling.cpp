// From rows of logits to tokens: the likeliest, or a draw by noise per token; and what forbids
// tokens before. Knows nothing of requests.
//
// A draw is argmax((logit - peak) / temperature + g), the Gumbel-max trick (Gumbel 1954; Maddison,
// Tarlow, Minka, A* Sampling, 2014, section 2), with g = -log(-log1p(-v)) for v from a hash of
// (seed, position, token). The logarithms are taken for the few tokens only that a bound on g
// leaves; the result has the bits of the plain formula. Where a vocabulary lies in several parts,
// each is asked for its peak, then, knowing the row's, for its best score.

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
  uint64_t hash;            // of seed, position and the id of the first token here

  float scaled(int64_t token) const { return (logits[token] - peak) / temperature; }

  uint64_t score(int64_t token) const {
    const float sum = scaled(token) + gumbel(uniform(hash, token));
    return pack(sum == sum ? sum : kNever, token);  // -inf / inf is not a number
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

// The columns of a vocabulary that are here, [rows, columns].
struct Part {
  const float* logits;
  int64_t rows, columns, stride;

  bool is_large() const { return rows * columns > kParallelTokens; }
};

struct Choice {
  const float* temperature;  // null: every row is greedy
  const int64_t* seeds;
  const int64_t* positions;
  const float* peaks;  // of the whole rows; null: the part is all of them
  int64_t first_id;    // of the first column
};

// Shared by the team that calls it. best [rows] is zero before, and stays so without columns.
void find_likeliest(const Part& part, uint64_t* best) {
#pragma omp for collapse(2)
  for (int64_t n = 0; n < part.rows; ++n) {
    for (int64_t begin = 0; begin < part.columns; begin += kSlice) {
      const int64_t end = std::min(begin + kSlice, part.columns);
      raise(best[n], likeliest(part.logits + n * part.stride, begin, end));
    }
  }
}

void find_drawn(const Part& part, const Choice& choice, const uint64_t* peaks, uint64_t* drawn) {
#pragma omp for collapse(2)
  for (int64_t n = 0; n < part.rows; ++n) {
    for (int64_t begin = 0; begin < part.columns; begin += kSlice) {
      const float own = value_of(peaks[n]), peak = choice.peaks ? choice.peaks[n] : own;
      const float temperature = choice.temperature[n];
      if (!(temperature > 0) || !std::isfinite(peak) || own == kNever) continue;
      const uint64_t key = mix(static_cast<uint64_t>(choice.seeds[n]));
      const uint64_t hash = mix(key + static_cast<uint64_t>(choice.positions[n]) * kGolden);
      const Row row{part.logits + n * part.stride, temperature, peak,
                    hash + static_cast<uint64_t>(choice.first_id) * kGolden};
      // a good score at the start leaves fewer candidates
      const uint64_t known = std::atomic_ref(drawn[n]).load(std::memory_order_relaxed);
      const uint64_t start = std::max(known, row.score(token_of(peaks[n])));
      raise(drawn[n], draw(row, begin, std::min(begin + kSlice, part.columns), start));
    }
  }
}

// A packed number with the part's ids as one that signed comparison orders the same way.
int64_t to_key(uint64_t packed, int64_t first_id) {
  const uint64_t shifted = packed ? packed - static_cast<uint64_t>(first_id) : 0;
  return static_cast<int64_t>(shifted ^ uint64_t{1} << 63);
}

void best_keys(const Part& part, const Choice& choice, int64_t* keys) {
  const auto rows = static_cast<size_t>(part.rows);
  std::vector<uint64_t> peaks(rows), drawn(rows);
#pragma omp parallel if (part.is_large())
  {
    find_likeliest(part, peaks.data());
    if (choice.temperature) find_drawn(part, choice, peaks.data(), drawn.data());
  }
  for (size_t n = 0; n < rows; ++n) {
    keys[n] = to_key(drawn[n] ? drawn[n] : peaks[n], choice.first_id);
  }
}

void ids_of(const int64_t* keys, int64_t* out, int64_t count) {
  for (int64_t n = 0; n < count; ++n) out[n] = token_of(static_cast<uint64_t>(keys[n]));
}

}  // namespace
}  // namespace treadle

// logits: [rows, vocab], stride between rows. temperature may be null: all rows are greedy, as
// those at 0. Tokens that are not a number are never chosen; nothing possible: token 0.
TREADLE_EXPORT void treadle_sample(const float* logits, const float* temperature,
                                   const int64_t* seeds, const int64_t* positions, int64_t* out,
                                   int64_t rows, int64_t vocab, int64_t stride) {
  treadle::best_keys({logits, rows, vocab, stride},
                     {temperature, seeds, positions, nullptr, 0}, out);
  treadle::ids_of(out, out, rows);
}
TREADLE_RECORDABLE(treadle_sample)

// out [rows]: the largest logit of each row, -inf where no number is.
TREADLE_EXPORT void treadle_row_peaks(const float* logits, float* out, int64_t rows,
                                      int64_t columns, int64_t stride) {
  const treadle::Part part{logits, rows, columns, stride};
  std::vector<uint64_t> best(static_cast<size_t>(rows));
#pragma omp parallel if (part.is_large())
  treadle::find_likeliest(part, best.data());
  for (int64_t n = 0; n < rows; ++n) {
    out[n] = best[n] ? treadle::value_of(best[n]) : treadle::kNever;
  }
}
TREADLE_RECORDABLE(treadle_row_peaks)

// keys [rows]: each row's best score in this part and its token, in one number that grows with the
// score; of equals the lower id has the larger. Without columns the least number. Without peaks
// (of the whole rows) the part's own count.
TREADLE_EXPORT void treadle_best_keys(const float* logits, const float* temperature,
                                      const int64_t* seeds, const int64_t* positions,
                                      const float* peaks, int64_t* keys, int64_t first_id,
                                      int64_t rows, int64_t columns, int64_t stride) {
  treadle::best_keys({logits, rows, columns, stride},
                     {temperature, seeds, positions, peaks, first_id}, keys);
}
TREADLE_RECORDABLE(treadle_best_keys)

// The tokens of keys.
TREADLE_EXPORT void treadle_ids_of(const int64_t* keys, int64_t* out, int64_t count) {
  treadle::ids_of(keys, out, count);
}
TREADLE_RECORDABLE(treadle_ids_of)

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

// logits[rows[i], ids[i] - first_id] = -inf; a row below 0 is padding, other parts' ids do nothing.
TREADLE_EXPORT void treadle_ban(float* logits, const int64_t* rows, const int64_t* ids,
                                int64_t count, int64_t first_id, int64_t columns, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t column = ids[i] - first_id;
    const bool is_here = rows[i] >= 0 && column >= 0 && column < columns;
    if (is_here) logits[rows[i] * stride + column] = treadle::kNever;
  }
}
TREADLE_RECORDABLE(treadle_ban)
