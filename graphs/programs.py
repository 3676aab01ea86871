"""What a step runs on the device, as bodies over buffers at fixed addresses: each can be captured.

Knows slots, tokens and rows; never a plan, a thread or how a body is captured. A body takes no
arguments and returns nothing: what it reads and writes are the buffers below, so that running it,
recording it and replaying the recording do the same.

Axes: T tokens, B rows of a bucket, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.buffers import RowInputs
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.models.decoder import Activations, Decoder
from treadle.kernels.collective import all_reduce_max
from treadle.kernels.paged_attention import AttentionMeta
from treadle.kernels.rows import gather_rows
from treadle.kernels.sampling import best_keys, ids_of, row_peaks, sample
from treadle.kernels.slots import (
    SlotState,
    TokenInputs,
    feed_back,
    prepare_decode,
    sampling_state,
    update_pages,
)

Body = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What rows that sample end in."""

    logits: Tensor  # [B, V] fp32
    tokens: Tensor  # [B] int64

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> Outputs:
        return cls(
            torch.empty(rows, vocab_size, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def first(self, rows: int) -> Outputs:
        return Outputs(self.logits[:rows], self.tokens[:rows])


@dataclass(frozen=True, slots=True)
class Sizes:
    """What programs make room for."""

    depth: int  # steps in flight
    buckets: Buckets
    num_token_ids: int | None = None  # ids that have a meaning; those beyond are never sampled
    sampler: Callable[..., Tensor] = sample  # `treadle.kernels.sampling.sample`'s arguments


class Programs:
    """The bodies of every kind of graph, over buffers for the largest of each.

    More tokens or rows than that run in buffers made for the step.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: KvMemory,
        state: SlotState,
        rows: RowInputs,
        sizes: Sizes,
    ) -> None:
        max_rows = max(sizes.buckets.decode_rows, default=0)
        max_tokens = max(max_rows, *sizes.buckets.prefill_tokens, 0)
        self.decoder = decoder
        self.state = state
        self._memory = memory
        self._rows = rows
        self._num_token_ids = sizes.num_token_ids
        self._sampler = sizes.sampler
        device = decoder.device
        self._activations = Activations.empty(decoder.spec, max_tokens, decoder.embedding)
        self._outputs = Outputs.empty(max_rows, decoder.spec.vocab_size, device)
        self._slices: dict[int, Activations] = {}
        most_rows = len(rows.slots)
        self._seq_lens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._one_each = torch.arange(most_rows + 1, dtype=torch.int32, device=device)

    @property
    def ids(self) -> slice:
        """The token ids whose logits are here."""
        return slice(self.decoder.first_id, self.decoder.first_id + self.decoder.num_ids)

    @property
    def _num_columns(self) -> int:
        """Logits here that may be sampled."""
        first_id, count = self.decoder.first_id, self.decoder.num_ids
        if self._num_token_ids is None:
            return count
        return max(0, min(count, self._num_token_ids - first_id))

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    def activations(self, tokens: int) -> Activations:
        """For so many tokens: the fixed ones as long as they reach."""
        if tokens > len(self._activations.token_ids):
            return Activations.empty(self.decoder.spec, tokens, self.decoder.embedding)
        if tokens not in self._slices:
            self._slices[tokens] = self._activations.first(tokens)
        return self._slices[tokens]

    def pad(self, activations: Activations, tokens: int) -> None:
        """Makes the tokens from here on padding: they write to the scratch page."""
        activations.token_ids[tokens:].zero_()
        activations.positions[tokens:].zero_()
        scratch = self._memory.group.pages * self._memory.group.page_size
        activations.slot_mapping[tokens:].fill_(scratch)

    def pad_all(self) -> None:
        """Makes all tokens padding, before a warm-up."""
        self.pad(self._activations, 0)

    def outputs(self, rows: int) -> Outputs:
        if rows <= len(self._outputs.tokens):
            return self._outputs.first(rows)
        return Outputs.empty(rows, self.decoder.spec.vocab_size, self.decoder.device)

    def token_inputs(self, activations: Activations) -> TokenInputs:
        """Where a step's tokens go."""
        return TokenInputs(
            activations.token_ids,
            activations.positions,
            activations.slot_mapping,
            self._seq_lens,
        )

    def parts(self, key: GraphKey) -> tuple[Body, ...]:
        """The bodies of a key, in the fixed buffers. A prefill has one for each piece."""
        match key.kind:
            case "prefill":
                return self.pieces(self.activations(key.tokens))
            case "decode":
                return (self.decode(key.rows, self.outputs(key.rows), samples=True),)
            case "decode_split":
                return (self.decode(key.rows, self.outputs(key.rows), samples=False),)
            case "head":
                return (self.head(key.rows, self._activations, self.outputs(key.rows)),)
            case "sample":
                return (self.sampling(key.rows, self.outputs(key.rows)),)

    def pieces(self, activations: Activations) -> tuple[Body, ...]:
        """Everything but attention, for the tokens of these activations."""
        decoder, caches = self.decoder, self._memory.layers
        return tuple(
            partial(decoder.piece, index, activations, caches)
            for index in range(decoder.num_pieces)
        )

    def attend(self, index: int, activations: Activations, meta: AttentionMeta) -> None:
        """Attention of one layer: runs between the pieces of a prefill, outside of graphs."""
        self.decoder.attend(index, activations, self._memory.layers[index], meta)

    def meta(
        self, cu_seqlens: Tensor, slots: Tensor, max_q_len: int, max_seq_len: int
    ) -> AttentionMeta:
        """Attention of rows whose lengths `token_inputs` took up."""
        return AttentionMeta(
            cu_seqlens_q=cu_seqlens,
            seq_lens=self._seq_lens[: len(slots)],
            page_table=self.state.page_table,
            req_slot=slots,
            page_size=self.state.page_size,
            max_q_len=max_q_len,
            max_seq_len=max_seq_len,
        )

    def head(self, rows: int, activations: Activations, outputs: Outputs) -> Body:
        """Logits of the tokens that `logit_rows` names."""
        return partial(self._head, rows, activations.residual, outputs)

    def sampling(self, rows: int, outputs: Outputs) -> Body:
        """Tokens from logits, and back into their slots."""
        return partial(self._sample, rows, outputs)

    def decode(self, rows: int, outputs: Outputs, *, samples: bool) -> Body:
        """A whole step of one token a row; without sampling when a mask is still to come."""
        return partial(self._decode, rows, outputs, samples=samples)

    def _head(self, rows: int, residual: Tensor, outputs: Outputs) -> None:
        picked = gather_rows(residual, self._rows.logit_rows[:rows])
        self.decoder.logits(picked, outputs.logits)

    def _decode(self, rows: int, outputs: Outputs, *, samples: bool) -> None:
        inputs, activations = self._rows.first(rows), self.activations(rows)
        update_pages(self.state.page_table, inputs.page_place, inputs.page_id)
        prepare_decode(self.state, inputs.slots, self.token_inputs(activations))
        meta = self.meta(
            self._one_each[: rows + 1], inputs.slots, 1, self.decoder.spec.max_position
        )
        for index, piece in enumerate(self.pieces(activations)):
            piece()
            if index < self.num_layers:
                self.attend(index, activations, meta)
        self.decoder.logits(activations.residual, outputs.logits)
        if samples:
            self._sample(rows, outputs)

    def _sample(self, rows: int, outputs: Outputs) -> None:
        slots, temperature = self._rows.slots[:rows], self._rows.temperature[:rows]
        seeds, positions = sampling_state(self.state, slots)
        group = self.decoder.parallel.group
        if group is None:
            logits = outputs.logits[:, : self._num_token_ids]
            self._sampler(logits, temperature, seeds, positions, outputs.tokens)
        else:  # every rank has some columns, and all end with the same tokens
            logits = outputs.logits[:, : self._num_columns]
            peaks = row_peaks(logits)
            all_reduce_max(peaks, group)
            first_id = self.decoder.first_id
            keys = best_keys(logits, temperature, seeds, positions, first_id, peaks)
            all_reduce_max(keys, group)
            ids_of(keys, outputs.tokens)
        feed_back(self.state, slots, outputs.tokens)
