"""What a step does on the device: slot state, the model's forward, sampling, feeding back.

Knows plans and tensors; never threads or the event loop. Last tokens, lengths and seeds live here,
per slot; positions and cache slots follow from them, so the host need not know how many tokens an
earlier step accepted.

Axes: R rows, T tokens, N rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treadle.graphs.buffers import InputRing, ResultRing
from treadle.graphs.device import Device
from treadle.graphs.kv_memory import KvMemory
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.sampler import sample
from treadle.graphs.step import Bools, Capacity, Int64s, Step, StepPlan
from treadle.kernels.paged_attention import AttentionMeta


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step between its forward and its sampling."""

    logits: torch.Tensor  # [N, V] float32
    slots: torch.Tensor  # [N] slots of the rows that sample
    temperature: torch.Tensor | None  # [N]
    sampling_rows: npt.NDArray[np.int64]  # [N] rows of the plan


class Runner:
    """Eager execution of steps. Called on one thread, in launch order."""

    def __init__(
        self,
        decoder: Decoder,
        memory: KvMemory,
        capacity: Capacity,
        device: Device,
        depth: int,
        num_token_ids: int | None = None,
    ) -> None:
        """num_token_ids: ids that have a meaning; the head's rows beyond them are never sampled."""
        self.capacity = capacity
        self._decoder = decoder
        self._num_token_ids = num_token_ids
        self._memory = memory
        self._inputs = InputRing(device, depth + 1)
        self._results = ResultRing(device, depth + 1, capacity.slots)
        at = device.torch_device
        self._length = torch.zeros(capacity.slots, dtype=torch.int64, device=at)
        self._last_token = torch.zeros(capacity.slots, dtype=torch.int64, device=at)
        self._seed = torch.zeros(capacity.slots, dtype=torch.int64, device=at)

    @torch.inference_mode()
    def forward(self, step: Step) -> Forwarded:
        """Runs the model over the step's tokens and moves the slots' lengths on."""
        plan = step.plan
        sampling_rows = np.flatnonzero(plan.samples)
        inputs = self._inputs.fill(step.seq, _arrays(plan, sampling_rows, self._memory.group.name))
        self._apply_updates(inputs)
        slots, row = inputs["req_slot"], inputs["row"]
        start = self._length[slots]
        cu_seqlens = inputs["cu_seqlens"]
        positions = start[row] + inputs["offset"]
        tokens = torch.where(
            inputs["from_host"][row], inputs["token_ids"], self._last_token[slots][row]
        )
        seq_lens = start + inputs["q_len"]
        hidden = self._decoder.forward(
            tokens,
            positions,
            self._memory.layers,
            self._slot_mapping(slots[row], positions),
            self._attention_meta(plan, slots, cu_seqlens, seq_lens),
        )
        self._length[slots] = seq_lens
        sampling = inputs["sampling_rows"]
        logits = self._decoder.logits(hidden[cu_seqlens[1:][sampling] - 1])
        if "banned_row" in inputs:
            logits[inputs["banned_row"], inputs["banned_id"]] = -torch.inf
        if self._num_token_ids is not None and self._num_token_ids < logits.shape[1]:
            logits = logits[:, : self._num_token_ids].contiguous()
        temperature = None if plan.sampling.all_greedy else inputs["temperature"][sampling]
        return Forwarded(logits, slots[sampling], temperature, sampling_rows)

    @torch.inference_mode()
    def sample(self, seq: int, forwarded: Forwarded, mask: Bools | None) -> None:
        """Picks a token per sampling row, feeds it back into the slots and sends it out.

        mask: [R, V] over the plan's rows, True where allowed.
        """
        slots = forwarded.slots
        allowed = None
        if mask is not None:
            width = forwarded.logits.shape[1]
            allowed = torch.from_numpy(mask[forwarded.sampling_rows, :width]).to(slots.device)
        tokens = sample(
            forwarded.logits,
            forwarded.temperature,
            self._seed[slots],
            self._length[slots],
            allowed,
        )
        self._last_token[slots] = tokens
        self._results.put(seq, tokens)

    def take(self, seq: int, forwarded: Forwarded) -> Int64s:
        """The sampled tokens [N], once the step's event has passed. Any thread."""
        return self._results.take(seq, len(forwarded.sampling_rows))

    def _apply_updates(self, inputs: Mapping[str, torch.Tensor]) -> None:
        if "page_slot" in inputs:
            place = (inputs["page_slot"], inputs["page_index"])
            self._memory.page_table[place] = inputs["page_id"]
        if "init_slot" in inputs:
            slots = inputs["init_slot"]
            self._length[slots] = inputs["init_length"]
            self._seed[slots] = inputs["init_seed"]

    def _slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size = self._memory.group.page_size
        pages = self._memory.page_table[slots, positions // size]
        return pages.long() * size + positions % size

    def _attention_meta(
        self,
        plan: StepPlan,
        slots: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> AttentionMeta:
        size = self._memory.group.page_size
        longest = int(plan.max_len.max())
        width = -(-longest // size)
        return AttentionMeta(
            cu_seqlens_q=cu_seqlens.int(),
            seq_lens=seq_lens.int(),
            page_table=self._memory.page_table[:, :width][slots],
            page_size=size,
            max_q_len=int(plan.q_len.max()),
            max_seq_len=longest,
        )


def _arrays(plan: StepPlan, sampling_rows: Int64s, group: str) -> dict[str, npt.NDArray[Any]]:
    """A plan as the arrays that travel. Index arrays are int64, as torch wants them."""
    row = np.repeat(np.arange(plan.num_rows), plan.q_len)
    cu_seqlens = np.zeros(plan.num_rows + 1, dtype=np.int64)
    np.cumsum(plan.q_len, out=cu_seqlens[1:])
    token_ids = np.zeros(len(row), dtype=np.int64)
    token_ids[plan.from_host[row]] = plan.token_ids
    arrays: dict[str, npt.NDArray[Any]] = {
        "req_slot": plan.req_slot.astype(np.int64),
        "q_len": plan.q_len,
        "from_host": plan.from_host,
        "temperature": plan.sampling.temperature,
        "row": row,
        "offset": np.arange(len(row)) - cu_seqlens[row],
        "cu_seqlens": cu_seqlens,
        "token_ids": token_ids,
        "sampling_rows": sampling_rows,
    }
    if plan.sampling.banned is not None:
        rows, ids = plan.sampling.banned
        arrays["banned_row"] = np.searchsorted(sampling_rows, rows)  # rows of the logits
        arrays["banned_id"] = np.ascontiguousarray(ids)
    if group in plan.page_updates:
        update = plan.page_updates[group]
        arrays["page_slot"] = update.req_slot.astype(np.int64)
        arrays["page_index"] = update.index.astype(np.int64)
        arrays["page_id"] = np.ascontiguousarray(update.page_id)
    if plan.slot_init is not None:
        arrays["init_slot"] = plan.slot_init.req_slot.astype(np.int64)
        arrays["init_length"] = plan.slot_init.length.astype(np.int64)
        arrays["init_seed"] = plan.slot_init.seed.view(np.int64)
    return arrays
