// What a step reads and writes by slot: positions, cache slots, lengths, last tokens; and rows
// picked out of a table. Knows no model.
//
// Slot arrays have one entry more than there are slots: the last one is scratch, for padding.

#include <cstdint>
#include <cstring>

#include "numeric.h"

namespace treadle {
namespace {

constexpr int64_t kParallelBytes = 1 << 18;  // below this a second thread costs more than it saves

int64_t cache_slot(const int32_t* page_table, int64_t table_stride, int64_t page_size,
                   int64_t slot, int64_t position) {
  const int64_t page = page_table[slot * table_stride + position / page_size];
  return page * page_size + position % page_size;
}

template <class T>
void add(T* sum, const T* x, int64_t count) {
#pragma omp parallel for if (count > kParallelBytes)
  for (int64_t i = 0; i < count; ++i) sum[i] = narrow<T>(widen(sum[i]) + widen(x[i]));
}

}  // namespace
}  // namespace treadle

using treadle::Bf16;

// One token for each row of `slots`: its id, its position and where its KV goes. The rows' lengths
// move on, but for the scratch slot's.
TREADLE_EXPORT void treadle_prepare_decode(const int64_t* slots, int64_t* length,
                                           const int64_t* last_token, const int32_t* page_table,
                                           int64_t* token_ids, int64_t* positions,
                                           int64_t* slot_mapping, int32_t* seq_lens, int64_t rows,
                                           int64_t table_stride, int64_t page_size,
                                           int64_t scratch_slot) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots[row], position = length[slot];
    token_ids[row] = last_token[slot];
    positions[row] = position;
    slot_mapping[row] = treadle::cache_slot(page_table, table_stride, page_size, slot, position);
    seq_lens[row] = static_cast<int32_t>(position + 1);
    if (slot != scratch_slot) length[slot] = position + 1;
  }
}
TREADLE_RECORDABLE(treadle_prepare_decode)

// Tokens [cu_seqlens[r], cu_seqlens[r + 1]) belong to row r and follow what its slot holds.
// from_host: the ids stand in host_ids; else the row's one token is its slot's last.
TREADLE_EXPORT void treadle_prepare_tokens(
    const int64_t* slots, const int32_t* cu_seqlens, const bool* from_host,
    const int64_t* host_ids, int64_t* length, const int64_t* last_token,
    const int32_t* page_table, int64_t* token_ids, int64_t* positions, int64_t* slot_mapping,
    int32_t* seq_lens, int64_t rows, int64_t table_stride, int64_t page_size) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots[row], start = length[slot], first = cu_seqlens[row];
    for (int64_t token = first; token < cu_seqlens[row + 1]; ++token) {
      const int64_t position = start + token - first;
      token_ids[token] = from_host[row] ? host_ids[token] : last_token[slot];
      positions[token] = position;
      slot_mapping[token] = treadle::cache_slot(page_table, table_stride, page_size, slot, position);
    }
    length[slot] = start + cu_seqlens[row + 1] - first;
    seq_lens[row] = static_cast<int32_t>(length[slot]);
  }
}
TREADLE_RECORDABLE(treadle_prepare_tokens)

// table[places[i]] = values[i].
TREADLE_EXPORT void treadle_update_pages(int32_t* table, const int64_t* places,
                                         const int32_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) table[places[i]] = values[i];
}
TREADLE_RECORDABLE(treadle_update_pages)

// The seed and the length of each row's slot.
TREADLE_EXPORT void treadle_sampling_state(const int64_t* slots, const int64_t* seed,
                                           const int64_t* length, int64_t* seeds,
                                           int64_t* positions, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    seeds[row] = seed[slots[row]];
    positions[row] = length[slots[row]];
  }
}
TREADLE_RECORDABLE(treadle_sampling_state)

// last_token[slots[row]] = tokens[row].
TREADLE_EXPORT void treadle_feed_back(const int64_t* slots, const int64_t* tokens,
                                      int64_t* last_token, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) last_token[slots[row]] = tokens[row];
}
TREADLE_RECORDABLE(treadle_feed_back)

// out[i] = table[indices[i]]; rows of row_bytes.
TREADLE_EXPORT void treadle_gather_rows(const void* table, const int64_t* indices, void* out,
                                        int64_t count, int64_t row_bytes) {
  const auto* from = static_cast<const char*>(table);
  auto* to = static_cast<char*>(out);
#pragma omp parallel for if (count * row_bytes > treadle::kParallelBytes)
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * row_bytes, from + indices[i] * row_bytes, static_cast<size_t>(row_bytes));
  }
}
TREADLE_RECORDABLE(treadle_gather_rows)

// out[i] = table[indices[i] - first] where the table has the row, else zeros.
TREADLE_EXPORT void treadle_gather_part(const void* table, const int64_t* indices, void* out,
                                        int64_t count, int64_t row_bytes, int64_t first,
                                        int64_t table_rows) {
  const auto* from = static_cast<const char*>(table);
  auto* to = static_cast<char*>(out);
  const auto size = static_cast<size_t>(row_bytes);
#pragma omp parallel for if (count * row_bytes > treadle::kParallelBytes)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = indices[i] - first;
    if (row >= 0 && row < table_rows) {
      std::memcpy(to + i * row_bytes, from + row * row_bytes, size);
    } else {
      std::memset(to + i * row_bytes, 0, size);
    }
  }
}
TREADLE_RECORDABLE(treadle_gather_part)

// sum += x; both contiguous. kind: 0 for fp32, 1 for bf16.
TREADLE_EXPORT void treadle_add(int kind, void* sum, const void* x, int64_t count) {
  const auto run = [&]<class T>(T) {
    treadle::add(static_cast<T*>(sum), static_cast<const T*>(x), count);
  };
  kind == 0 ? run(float{}) : run(Bf16{});
}
TREADLE_RECORDABLE(treadle_add)

// bf16 to fp32.
TREADLE_EXPORT void treadle_widen(const void* x, float* out, int64_t count) {
  const auto* from = static_cast<const Bf16*>(x);
#pragma omp parallel for if (count > treadle::kParallelBytes)
  for (int64_t i = 0; i < count; ++i) out[i] = treadle::widen(from[i]);
}
TREADLE_RECORDABLE(treadle_widen)
