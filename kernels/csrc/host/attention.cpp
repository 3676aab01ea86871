// Causal attention over a paged cache: decode and prefill rows in one call, softmax in fp32.
// Knows slots and lengths, never a request.
//
// A work item is one kv head of one tile of queries, over one part of the keys. The query heads
// that share the kv head stand in the tile as separate rows, so that a key is read once for all.
// The softmax is computed block by block of keys (Milakov and Gimelshein, Online normalizer
// calculation for softmax, 2018). Few items: the keys are split, and the parts merged.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "numeric.h"
#include "tile.h"

namespace treadle {
namespace {

constexpr int64_t kMaxDim = 256;
constexpr int64_t kTileRows = 96;   // (query, head of the group) pairs of a tile
constexpr int64_t kBlockKeys = 64;  // a block's keys and values stay in the L1 or L2 cache
constexpr int kFewRows = 6;         // up to here, transposing the keys costs more than it saves
constexpr int64_t kMinSplitKeys = 256;
constexpr int64_t kItemsPerThread = 4;  // wanted, to balance items of different lengths
constexpr float kLowest = -1e30f;       // below every score, yet finite: differences are numbers

struct Shape {
  int64_t rows, q_heads, kv_heads, dim, page_size, table_stride, q_stride, window;
  float scale;
  int64_t group() const { return q_heads / kv_heads; }
};

template <class T>
struct Tensors {
  const T *q, *k_cache, *v_cache;
  T* out;
  const int32_t *cu_seqlens_q, *seq_lens;
  const int64_t* req_slot;
  const int32_t* page_table;
};

struct Tile {
  int64_t row;
  int64_t first_token;     // of the row, in q
  int64_t first_position;  // of the row's first query
  int64_t begin, end;      // among the row's (query, head of the group) pairs
};

struct Range {
  int64_t begin, end;
};

// Sums of a tile over one part of its keys: its output is values / total over all parts.
struct Sums {
  float *values, *total, *maximum;  // [tile rows, dim], [tile rows, kLanes], [tile rows]

  Sums(float* memory, int64_t tile_rows, int64_t dim)
      : values(memory), total(values + tile_rows * dim), maximum(total + tile_rows * kLanes) {}

  static int64_t size(int64_t tile_rows, int64_t dim) { return tile_rows * (dim + kLanes + 1); }
};

struct Scratch {
  alignas(64) float queries[kTileRows * kMaxDim];    // [tile rows, dim]
  alignas(64) float keys[kMaxDim * kBlockKeys];      // [dim, keys]
  alignas(64) float values[kBlockKeys * kMaxDim];    // [keys, dim]
  alignas(64) float scores[kTileRows * kBlockKeys];  // [tile rows, keys]
  alignas(64) float sums[kTileRows * (kMaxDim + kLanes + 1)];
};

std::vector<Tile> make_tiles(const Shape& shape, const int32_t* cu_seqlens_q,
                             const int32_t* seq_lens) {
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const int64_t first = cu_seqlens_q[row], q_len = cu_seqlens_q[row + 1] - first;
    for (int64_t begin = 0; begin < q_len * shape.group(); begin += kTileRows) {
      const int64_t end = std::min(begin + kTileRows, q_len * shape.group());
      tiles.push_back({row, first, seq_lens[row] - q_len, begin, end});
    }
  }
  return tiles;
}

// Where the block's keys lie, as element offsets into a cache.
void find_slots(const Shape& shape, const int32_t* pages, int64_t first, int64_t count,
                int64_t head, int64_t* offsets) {
  int64_t page = first / shape.page_size, within = first % shape.page_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = pages[page] * shape.page_size + within;
    offsets[i] = (slot * shape.kv_heads + head) * shape.dim;
    if (++within == shape.page_size) {
      within = 0;
      ++page;
    }
  }
}

// The keys and values of a block: where they lie in the caches, and where the next block's lie.
// Those are fetched meanwhile: they are scattered, where the hardware does not foresee them.
template <class T>
struct Block {
  const T *k_cache, *v_cache;
  int64_t offsets[kBlockKeys], next_offsets[kBlockKeys];
  int64_t count;

  Vec key(int64_t i, int64_t d) const {
    __builtin_prefetch(k_cache + next_offsets[i] + d);
    __builtin_prefetch(v_cache + next_offsets[i] + d);
    return load(k_cache + offsets[i] + d);
  }

  const T* value(int64_t i) const { return v_cache + offsets[i]; }
};

// out[dim, keys] in fp32; keys beyond count, up to a multiple of kLanes, become zero.
template <class T>
void load_keys(const Block<T>& block, int64_t dim, float* out) {
  for (int64_t first = 0; first < block.count; first += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      Vec tile[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        tile[i] = first + i < block.count ? block.key(first + i, d) : Vec{};
      }
      transpose(tile);
      for (int64_t i = 0; i < kLanes; ++i) store(out + (d + i) * kBlockKeys + first, tile[i]);
    }
  }
}

// out[Rows, keys] = queries[Rows, dim] * keys, without transposing the keys: pays for few rows.
template <int Rows, class T>
void score_few(const Block<T>& block, int64_t dim, const float* queries, float* out) {
  for (int64_t first = 0; first < block.count; first += kLanes) {
    Vec products[Rows][kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      Vec sums[Rows] = {};
      for (int64_t d = 0; first + i < block.count && d < dim; d += kLanes) {
        const Vec key = block.key(first + i, d);
        for (int m = 0; m < Rows; ++m) sums[m] += key * load(queries + m * dim + d);
      }
      for (int m = 0; m < Rows; ++m) products[m][i] = sums[m];
    }
    for (int m = 0; m < Rows; ++m) store(out + m * kBlockKeys + first, sum_rows(products[m]));
  }
}

template <int Rows, class T>
void score_up_to(int64_t rows, const Block<T>& block, int64_t dim, const float* queries,
                 float* out) {
  if (rows == Rows) {
    score_few<Rows>(block, dim, queries, out);
  } else if constexpr (Rows > 1) {
    score_up_to<Rows - 1>(rows, block, dim, queries, out);
  }
}

// out[keys, dim] in fp32.
template <class T>
void load_values(const Block<T>& block, int64_t dim, float* out) {
  for (int64_t i = 0; i < block.count; ++i) {
    for (int64_t d = 0; d < dim; d += kLanes) store(out + i * dim + d, load(block.value(i) + d));
  }
}

// Turns a row of scores into weights relative to the new maximum; returns what to scale the
// earlier sums by. Keys outside [low, high) are not visible. total: [kLanes], one sum by lane.
float weigh(float* scores, int64_t width, int64_t low, int64_t high, float& maximum,
            float* total) {
  std::fill(scores, scores + low, 2 * kLowest);
  std::fill(scores + high, scores + width, 2 * kLowest);
  Vec highest = Vec{} + maximum;
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec some = load(scores + j);
    highest = some > highest ? some : highest;
  }
  highest = spread_highest(highest);
  const float rescale = fast_exp(maximum - highest[0]);
  Vec sum = load(total) * rescale;
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec weights = fast_exp(load(scores + j) - highest);
    store(scores + j, weights);
    sum += weights;
  }
  store(total, sum);
  maximum = highest[0];
  return rescale;
}

template <class T>
void attend(const Shape& shape, const Tensors<T>& tensors, const Tile& tile, int64_t head,
            Range keys, Scratch& scratch, Sums result) {
  const int64_t rows = tile.end - tile.begin, group = shape.group(), dim = shape.dim;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t query = (tile.begin + m) / group, member = (tile.begin + m) % group;
    const T* q = tensors.q + (tile.first_token + query) * shape.q_stride +
                 (head * group + member) * dim;
    for (int64_t d = 0; d < dim; ++d) scratch.queries[m * dim + d] = widen(q[d]) * shape.scale;
  }
  std::fill_n(result.maximum, rows, kLowest);
  std::fill_n(result.total, rows * kLanes, 0.0f);
  std::fill_n(result.values, rows * dim, 0.0f);
  const int32_t* pages = tensors.page_table + tensors.req_slot[tile.row] * shape.table_stride;
  Block<T> block{tensors.k_cache, tensors.v_cache, {}, {}, 0};
  const auto find_next = [&](int64_t first) {
    const int64_t count = std::min(kBlockKeys, keys.end - first);
    find_slots(shape, pages, first, count, head, block.next_offsets);
  };
  find_next(keys.begin);
  for (int64_t key = keys.begin; key < keys.end; key += block.count) {
    block.count = std::min(kBlockKeys, keys.end - key);
    std::copy_n(block.next_offsets, kBlockKeys, block.offsets);
    find_next(key + block.count);
    const int64_t width = (block.count + kLanes - 1) / kLanes * kLanes;
    if (rows <= kFewRows) {
      score_up_to<kFewRows>(rows, block, dim, scratch.queries, scratch.scores);
    } else {
      load_keys(block, dim, scratch.keys);
      load_values(block, dim, scratch.values);
      multiply(rows, width, dim, scratch.queries, dim,
               [&](int64_t k) { return scratch.keys + k * kBlockKeys; }, scratch.scores,
               kBlockKeys, false);
    }
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t position = tile.first_position + (tile.begin + m) / group;
      const int64_t low = std::clamp<int64_t>(position - shape.window + 1 - key, 0, block.count);
      const int64_t high = std::clamp<int64_t>(position + 1 - key, low, block.count);
      const float rescale = weigh(scratch.scores + m * kBlockKeys, width, low, high,
                                  result.maximum[m], result.total + m * kLanes);
      if (rescale == 1.0f) continue;
      for (int64_t d = 0; d < dim; ++d) result.values[m * dim + d] *= rescale;
    }
    const auto accumulate = [&](const auto& value_row) {
      multiply(rows, dim, block.count, scratch.scores, kBlockKeys, value_row, result.values, dim,
               true);
    };
    if (rows <= kFewRows) {
      accumulate([&](int64_t k) { return block.value(k); });
    } else {
      accumulate([&](int64_t k) { return scratch.values + k * dim; });
    }
  }
}

// Writes a tile's output from the sums over all parts of its keys, which follow one another.
template <class T>
void finish(const Shape& shape, const Tensors<T>& tensors, const Tile& tile, int64_t head,
            float* memory, int64_t tile_rows, int64_t splits) {
  const int64_t group = shape.group(), dim = shape.dim;
  const auto part = [&](int64_t s) {
    return Sums(memory + s * Sums::size(tile_rows, dim), tile_rows, dim);
  };
  for (int64_t m = 0; m < tile.end - tile.begin; ++m) {
    float maximum = kLowest, total = 0;
    for (int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, part(s).maximum[m]);
    float values[kMaxDim] = {};
    for (int64_t s = 0; s < splits; ++s) {
      const Sums sums = part(s);
      const float weight = fast_exp(sums.maximum[m] - maximum);
      for (int64_t i = 0; i < kLanes; ++i) total += sums.total[m * kLanes + i] * weight;
      for (int64_t d = 0; d < dim; ++d) values[d] += sums.values[m * dim + d] * weight;
    }
    const int64_t token = tile.first_token + (tile.begin + m) / group;
    const int64_t member = (tile.begin + m) % group;
    T* out = tensors.out + (token * shape.q_heads + head * group + member) * dim;
    const float inverse = 1.0f / total;
    for (int64_t d = 0; d < dim; ++d) out[d] = narrow<T>(values[d] * inverse);
  }
}

// The keys that part `split` of a tile covers. May be empty.
Range split_keys(const Shape& shape, const Tile& tile, int64_t split, int64_t splits) {
  const int64_t last = tile.first_position + (tile.end - 1) / shape.group();
  const int64_t first = tile.first_position + tile.begin / shape.group() - shape.window + 1;
  const int64_t begin = std::max<int64_t>(0, first);
  const int64_t even = (last + 1 - begin + splits - 1) / splits;
  const int64_t part = (even + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  const int64_t from = std::min(begin + split * part, last + 1);
  return {from, std::min(from + part, last + 1)};
}

template <class T>
void paged_attention(const Shape& shape, const Tensors<T>& tensors) {
  const std::vector<Tile> tiles = make_tiles(shape, tensors.cu_seqlens_q, tensors.seq_lens);
  if (tiles.empty()) return;
  int64_t tile_rows = 0, longest = 0;
  for (const Tile& tile : tiles) {
    tile_rows = std::max(tile_rows, tile.end - tile.begin);
    longest = std::max<int64_t>(longest, tensors.seq_lens[tile.row]);
  }
  const auto items = static_cast<int64_t>(tiles.size()) * shape.kv_heads;
  const int64_t wanted = kItemsPerThread * omp_get_max_threads() / items;
  const int64_t splits = std::clamp<int64_t>(wanted, 1, longest / kMinSplitKeys + 1);
  const int64_t size = Sums::size(tile_rows, shape.dim);
  const auto shared = std::make_unique_for_overwrite<float[]>(
      static_cast<size_t>(splits > 1 ? items * splits * size : 0));
  const auto tile_of = [&](int64_t item) {
    return tiles[static_cast<size_t>(item / shape.kv_heads)];
  };
#pragma omp parallel
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t n = items * splits - 1; n >= 0; --n) {  // a prompt's longest tile is its last
      const int64_t item = n / splits, head = item % shape.kv_heads;
      const Tile tile = tile_of(item);
      const Range keys = split_keys(shape, tile, n % splits, splits);
      float* memory = splits > 1 ? shared.get() + n * size : scratch.sums;
      attend(shape, tensors, tile, head, keys, scratch, Sums(memory, tile_rows, shape.dim));
      if (splits == 1) finish(shape, tensors, tile, head, memory, tile_rows, 1);
    }
    if (splits > 1) {
#pragma omp for
      for (int64_t item = 0; item < items; ++item) {
        finish(shape, tensors, tile_of(item), item % shape.kv_heads,
               shared.get() + item * splits * size, tile_rows, splits);
      }
    }
  }
}

}  // namespace
}  // namespace treadle

// q, out: [tokens, q_heads, dim], out contiguous; caches: [slots, kv_heads, dim], contiguous.
// Row r: queries cu_seqlens_q[r] to cu_seqlens_q[r + 1], or none; seq_lens[r] cached tokens, pages
// page_table[req_slot[r] * table_stride ...]. Other tokens' out stays as it is. dim is a multiple of 16, at most 256. A query sees `window`
// keys. kind: 0 for fp32, 1 for bf16. Strides count elements.
TREADLE_EXPORT void treadle_paged_attention(int kind, const void* q, const void* k_cache,
                                        const void* v_cache, void* out,
                                        const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                                        const int64_t* req_slot,
                                        const int32_t* page_table, int64_t rows, int64_t q_heads,
                                        int64_t kv_heads, int64_t dim, int64_t page_size,
                                        int64_t table_stride, int64_t q_stride, int64_t window,
                                        float scale) {
  const treadle::Shape shape{rows,         q_heads,  kv_heads, dim,  page_size,
                             table_stride, q_stride, window,   scale};
  const auto run = [&]<class T>(T) {
    treadle::paged_attention<T>(
        shape, {static_cast<const T*>(q), static_cast<const T*>(k_cache),
                static_cast<const T*>(v_cache), static_cast<T*>(out), cu_seqlens_q, seq_lens,
                req_slot, page_table});
  };
  kind == 0 ? run(float{}) : run(treadle::Bf16{});
}
TREADLE_RECORDABLE(treadle_paged_attention)
