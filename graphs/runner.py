"""What a step does on the device: inputs to their places, forward, sampling, results on their way.

Knows plans, buffers and graphs; never threads or the event loop. Last tokens, lengths and seeds
live on the device, per slot; positions and cache slots follow from them, so the host need not know
how many tokens an earlier step accepted.

Axes: R rows, T tokens, N rows that sample, U page-table updates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.graphs.backends import GraphBackend
from treadle.graphs.buckets import GraphKey
from treadle.graphs.buffers import InputBuffers, Padding, RaggedRing, ResultRing
from treadle.graphs.capture import GraphTable, is_split, keys_of
from treadle.graphs.device import Device, Event
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.models.decoder import Activations, Decoder
from treadle.graphs.programs import Outputs, Programs, Sizes
from treadle.graphs.step import Bools, Capacity, GraphChoice, Int64s, Step, StepPlan
from treadle.kernels.paged_attention import AttentionMeta
from treadle.kernels.sampling import ban, mask_logits
from treadle.kernels.slots import HostRows, SlotState, prepare_tokens, update_pages


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step between its forward and the copy of its tokens."""

    outputs: Outputs  # of the padded rows
    sampling_rows: Int64s  # [N] rows of the plan
    is_sampled: bool


class Runner:
    """Runs steps in their order, on one thread."""

    def __init__(
        self,
        decoder: Decoder,
        memory: KvMemory,
        capacity: Capacity,
        device: Device,
        backend: GraphBackend,
        sizes: Sizes,
    ) -> None:
        self.capacity = capacity
        self._memory = memory
        self._depth = sizes.depth
        table = memory.page_table
        padding = Padding(
            memory.scratch_slot, memory.scratch_slot * table.shape[1], memory.group.pages
        )
        slots = capacity.slots
        rows = max((slots, *sizes.buckets.decode_rows))
        self._inputs = InputBuffers(device, sizes.depth + 1, rows, padding)
        self._masks = RaggedRing(device, sizes.depth + 1, 0)
        self._results = ResultRing(device, sizes.depth + 1, slots)
        length, last_token, seed = (
            torch.zeros(slots + 1, dtype=torch.int64, device=table.device) for _ in range(3)
        )
        self._state = SlotState(length, last_token, seed, table, memory.group.page_size)
        self._programs = Programs(decoder, memory, self._state, self._inputs.rows, sizes)
        self.graphs = GraphTable(backend, sizes.buckets, self._programs.parts, self._pad)

    @torch.inference_mode()
    def forward(self, step: Step) -> Forwarded:
        """Runs the model over the step's tokens and moves the slots' lengths on.

        A decode whose logits nobody touches samples as well: all of it is one graph.
        """
        plan = step.plan
        choice = step.choice or self.graphs.choose(plan)
        outputs = self._programs.outputs(choice.rows)
        is_decode = plan.mode == "decode"
        forwarded = Forwarded(
            outputs, np.flatnonzero(plan.samples), is_decode and not is_split(plan)
        )
        prepare = self._decode if is_decode else self._prefill
        ragged = prepare(step.seq, plan, choice, forwarded)
        if "banned_row" in ragged:
            first_id = self._programs.decoder.first_id
            ban(outputs.logits, ragged["banned_row"], ragged["banned_id"], first_id)
        return forwarded

    @torch.inference_mode()
    def sample(self, step: Step, forwarded: Forwarded, mask: Bools | None) -> Event:
        """Picks a token per sampling row, feeds it back into the slots and sends it out.

        mask: [R, V] over the plan's rows, True where allowed. Returns when the tokens have arrived.
        """
        outputs, count = forwarded.outputs, len(forwarded.sampling_rows)
        if not forwarded.is_sampled and count:
            if mask is not None:
                slot, ids = step.seq % (self._depth + 1), self._programs.ids
                allowed = np.ascontiguousarray(mask[forwarded.sampling_rows][:, ids])
                arrived = self._masks.fill(slot, {"allowed": allowed})["allowed"]
                mask_logits(outputs.logits[:count, : allowed.shape[1]], arrived)
            choice = step.choice or self.graphs.choose(step.plan)
            if choice.replays:
                self.graphs.replay(GraphKey("sample", choice.rows, choice.rows))
            else:
                self._programs.sampling(len(outputs.tokens), outputs)()
        return self._results.put(step.seq, outputs.tokens[:count])

    def take(self, seq: int, forwarded: Forwarded) -> Int64s:
        """The sampled tokens [N], once the event of `sample` has passed. Any thread."""
        return self._results.take(seq, len(forwarded.sampling_rows))

    def reset(self) -> None:
        """Forgets all slots and KV, after their memory was taken away."""
        self._memory.reset()
        self._memory.clear_scratch()
        self._state.length.zero_()

    def _decode(
        self, seq: int, plan: StepPlan, choice: GraphChoice, forwarded: Forwarded
    ) -> dict[str, Tensor]:
        """One token a row. Returns the step's ragged arrays on the device."""
        arrays = {"slots": plan.req_slot, "temperature": plan.sampling.temperature}
        places = self._page_updates(plan)
        fits = len(places.get("page_place", ())) <= choice.rows
        ragged = _slot_init(plan) | _banned(plan, forwarded) | ({} if fits else places)
        arrived = self._inputs.fill(seq, choice.rows, arrays | (places if fits else {}), ragged)
        self._apply(arrived)
        if choice.replays:
            self.graphs.replay(keys_of(plan, choice)[0])
        else:
            outputs, samples = forwarded.outputs, forwarded.is_sampled
            self._programs.decode(choice.rows, outputs, samples=samples)()
        return arrived

    def _prefill(
        self, seq: int, plan: StepPlan, choice: GraphChoice, forwarded: Forwarded
    ) -> dict[str, Tensor]:
        """Rows of any length. Returns the step's ragged arrays on the device."""
        if len(plan.token_ids) and not 0 <= plan.token_ids.min() <= plan.token_ids.max() < (
            self.capacity.vocab_size
        ):
            raise IndexError(f"a token id is not within 0 to {self.capacity.vocab_size - 1}")
        ends = np.cumsum(plan.q_len, dtype=np.int32)
        sampling_rows = forwarded.sampling_rows
        arrays = {
            "slots": plan.req_slot[sampling_rows],
            "temperature": plan.sampling.temperature[sampling_rows],
            "logit_rows": ends[sampling_rows] - 1,
        }
        ragged = self._page_updates(plan) | _slot_init(plan) | _token_arrays(plan, ends)
        arrived = self._inputs.fill(seq, choice.rows, arrays, ragged | _banned(plan, forwarded))
        self._apply(arrived)
        rows = HostRows(*(arrived[name] for name in _HOST_ROWS))
        activations = self._programs.activations(choice.tokens)
        prepare_tokens(self._state, rows, self._programs.token_inputs(activations))
        if plan.num_tokens < choice.tokens:
            self._programs.pad(activations, plan.num_tokens)
        longest = int(plan.q_len.max()), int(plan.max_len.max())
        meta = self._programs.meta(rows.cu_seqlens, rows.slots, *longest)
        self._run_pieces(choice, activations, meta)
        if choice.rows and choice.replays:
            self.graphs.replay(GraphKey("head", choice.rows, choice.rows))
        elif choice.rows:
            self._programs.head(choice.rows, activations, forwarded.outputs)()
        return arrived

    def _run_pieces(
        self, choice: GraphChoice, activations: Activations, meta: AttentionMeta
    ) -> None:
        key = GraphKey("prefill", choice.tokens, 0)
        pieces = () if choice.replays else self._programs.pieces(activations)
        for index in range(self._programs.num_layers + 1):
            if choice.replays:
                self.graphs.replay(key, index)
            else:
                pieces[index]()
            if index < self._programs.num_layers:
                self._programs.attend(index, activations, meta)

    def _apply(self, arrays: dict[str, Tensor]) -> None:
        """What a step changes outside of graphs, before anything else."""
        if "page_place" in arrays:
            update_pages(self._state.page_table, arrays["page_place"], arrays["page_id"])
        if "init_slot" in arrays:
            slots = arrays["init_slot"]
            self._state.length[slots] = arrays["init_length"]
            self._state.seed[slots] = arrays["init_seed"]

    def _page_updates(self, plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
        update = plan.page_updates.get(self._memory.group.name)
        if update is None:
            return {}
        width = self._memory.page_table.shape[1]
        return {
            "page_place": update.req_slot.astype(np.int64) * width + update.index,
            "page_id": np.ascontiguousarray(update.page_id),
        }

    def _pad(self) -> None:
        """All rows and tokens become padding: what a warm-up runs on."""
        self._inputs.pad_all()
        self._programs.pad_all()


_HOST_ROWS = ("row_slots", "cu_seqlens", "from_host", "host_ids", "row")


def _token_arrays(plan: StepPlan, ends: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
    """A plan's rows and tokens as the arrays that travel."""
    row = np.repeat(np.arange(plan.num_rows), plan.q_len)
    host_ids = np.zeros(len(row), dtype=np.int64)
    host_ids[plan.from_host[row]] = plan.token_ids
    return {
        "row_slots": plan.req_slot.astype(np.int64),
        "cu_seqlens": np.concatenate([np.zeros(1, np.int32), ends]),
        "from_host": plan.from_host,
        "host_ids": host_ids,
        "row": row,
    }


def _banned(plan: StepPlan, forwarded: Forwarded) -> dict[str, npt.NDArray[Any]]:
    """Pairs of a row of the logits and a token id."""
    if plan.sampling.banned is None:
        return {}
    rows, ids = plan.sampling.banned
    return {
        "banned_row": np.searchsorted(forwarded.sampling_rows, rows),
        "banned_id": np.ascontiguousarray(ids),
    }


def _slot_init(plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
    if plan.slot_init is None:
        return {}
    return {
        "init_slot": plan.slot_init.req_slot.astype(np.int64),
        "init_length": plan.slot_init.length.astype(np.int64),
        "init_seed": plan.slot_init.seed.view(np.int64),
    }
