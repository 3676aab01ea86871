"""Runs a decoder over prompts on a plain paged cache, and transformers on the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from treadle.graphs.models.decoder import Decoder
from treadle.graphs.weights.load import load_decoder, read_spec
from treadle.kernels.paged_attention import AttentionMeta


class DecoderRunner:
    """A decoder with the cache of a fixed batch of rows.

    Pages lie in the cache in random order, and what is not written yet is NaN.
    """

    def __init__(self, decoder: Decoder, rows: int, page_size: int) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.page_size = page_size
        self.lengths = [0] * rows  # tokens
        pages = -(-spec.max_position // page_size)
        self.page_table = torch.randperm(rows * pages).view(rows, pages).int()
        shape = (rows * pages * page_size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = [
            (
                torch.full(shape, torch.nan, dtype=decoder.dtype),
                torch.full(shape, torch.nan, dtype=decoder.dtype),
            )
            for _ in range(spec.num_layers)
        ]

    @torch.inference_mode()
    def step(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Appends tokens to every row; returns each row's logits, [tokens, V]."""
        counts = [len(row) for row in tokens]
        starts, self.lengths = (
            self.lengths,
            [old + n for old, n in zip(self.lengths, counts, strict=True)],
        )
        positions = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, self.lengths, strict=True)]
        )
        rows = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(counts))
        pages = self.page_table[rows, positions // self.page_size].long()
        meta = AttentionMeta(
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(self.lengths).int(),
            page_table=self.page_table,
            req_slot=torch.arange(len(tokens)),
            page_size=self.page_size,
            max_q_len=max(counts),
            max_seq_len=max(self.lengths),
        )
        hidden = self.decoder.forward(
            torch.tensor([token for row in tokens for token in row]).int(),
            positions,
            self.kv_cache,
            pages * self.page_size + positions % self.page_size,
            meta,
        )
        return list(torch.split(self.decoder.logits(hidden), counts))


MakeRunner = Callable[..., DecoderRunner]
LoadDecoder = Callable[..., Decoder]
ReferenceLogits = Callable[[Path, Sequence[Sequence[int]]], list[Tensor]]
AssertClose = Callable[[Tensor, Tensor], None]


@pytest.fixture
def make_runner() -> MakeRunner:
    def make(decoder: Decoder, rows: int = 1, page_size: int = 8) -> DecoderRunner:
        return DecoderRunner(decoder, rows, page_size)

    return make


@pytest.fixture
def load_host() -> LoadDecoder:
    """Loads a folder or a GGUF file on the host."""

    def load(
        path: Path, max_position: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Decoder:
        spec = read_spec(path)
        spec = replace(spec, max_position=max_position or spec.max_position)
        return load_decoder(path, spec, load_format="auto", dtype=dtype, device=torch.device("cpu"))

    return load


@pytest.fixture
def reference_logits() -> ReferenceLogits:
    """transformers' fp32 logits of each prompt, [tokens, V]."""

    def run(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return logits_of(model, prompts)

    return run


@torch.inference_mode()
def logits_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    return [model.eval()(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


@pytest.fixture
def assert_logits_close() -> AssertClose:
    """The largest difference is within 1e-4 of the reference's range."""

    def check(found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        assert torch.isfinite(found).all()
        spread = (expected.max() - expected.min()).item()
        assert spread > 1.0
        assert (found - expected).abs().max().item() <= 1e-4 * spread

    return check


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """transformers' model of the embedded checkpoint, fp32."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
