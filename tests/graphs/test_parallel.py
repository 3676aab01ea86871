"""Ranks that share a model against the whole of it: shares, logits, tokens, tapes, processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gloo_rank
import pytest
import torch
from rank_threads import Meeting, decode_logits, rank_threads, together
from torch import Tensor

from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.spec import DecoderSpec, RopeSpec
from treadle.graphs.parallel import SINGLE, TensorParallel, legal_sizes, local_spec, share
from treadle.graphs.weights.load import load_model, read_spec
from treadle.kernels import host
from treadle.kernels.collective import all_reduce, all_reduce_max
from treadle.tools.tiny_model import ARCHITECTURES, make_folder, make_gguf

Check = Callable[[Tensor, Tensor], None]
VOCAB = 377  # no multiple of anything
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=96, num_layers=1, num_heads=12,
    num_kv_heads=4, head_dim=8, intermediate_size=96, norm_eps=1e-5, activation="silu",
    rope=RopeSpec(10000.0, 8), windows=(None,), max_position=64, dtype="float32",
)  # fmt: skip
SIZES: dict[str, object] = {
    "vocab_size": VOCAB, "hidden_size": 96, "num_attention_heads": 12, "intermediate_size": 96,
    "num_hidden_layers": 2,
}  # fmt: skip
EXTRA: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
KV_HEADS = {2: 2, 3: 3, 4: 2}  # by ranks; with four, two hold each kv head


@dataclass
class Ranks:
    """A model in parts."""

    meeting: Meeting
    decoders: list[Decoder]

    def logits(self, runners: list[Any], tokens: list[list[int]]) -> list[Tensor]:
        """Of every row, [tokens, V]: the ranks' parts side by side, without their padding."""
        found = together(self.meeting, [partial(runner.step, tokens) for runner in runners])
        parts = zip(found, self.decoders, strict=True)
        ids = [[row[:, : decoder.num_ids] for row in rows] for rows, decoder in parts]
        return [torch.cat(row, dim=1) for row in zip(*ids, strict=True)]


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    chosen = {"load_format": "auto", "dtype": dtype, **options}

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    return load_model(path, read_spec(path), allocate=allocate, **chosen).decoder


def load_ranks(path: Path, size: int, **options: Any) -> Ranks:
    meeting, places = rank_threads(size)
    return Ranks(meeting, [load(path, parallel=place, **options) for place in places])


def make(folder: Path, arch: str, size: int, **overrides: object) -> Path:
    values = {**SIZES, "num_key_value_heads": KV_HEADS[size], **EXTRA[arch], **overrides}
    return make_folder(folder, arch, overrides=values, seed=random.randrange(1000))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_the_whole_models(
    arch: str, size: int, tmp_path: Path, make_runner: Any, assert_logits_close: Check
) -> None:
    folder = make(tmp_path, arch, size)
    whole, ranks = load(folder), load_ranks(folder, size)
    prompts = [[random.randrange(VOCAB) for _ in range(length)] for length in (19, 1, 8)]
    expected = make_runner(whole, rows=3)
    found = [make_runner(decoder, rows=3) for decoder in ranks.decoders]
    tokens = prompts
    for _ in range(16):
        ours, theirs = ranks.logits(found, tokens), expected.step(tokens)
        for row, reference in zip(ours, theirs, strict=True):
            assert_logits_close(row, reference)
            assert torch.equal(row.argmax(1), reference.argmax(1))
        tokens = [[int(row[-1].argmax())] for row in ours]


def test_ranks_without_token_ids_take_part(
    tmp_path: Path, make_runner: Any, assert_logits_close: Check
) -> None:
    folder = make(tmp_path, "qwen2", 4, vocab_size=17, tie_word_embeddings=True)
    ranks = load_ranks(folder, 4)
    assert [decoder.num_ids for decoder in ranks.decoders] == [16, 1, 0, 0]
    prompt = [random.randrange(17) for _ in range(20)]
    [ours] = ranks.logits([make_runner(decoder) for decoder in ranks.decoders], [prompt])
    assert_logits_close(ours, make_runner(load(folder)).step([prompt])[0])


def test_bf16_ranks_follow_the_whole_model(tmp_path: Path, make_runner: Any) -> None:
    folder = make(tmp_path, "qwen3", 4)
    ranks = load_ranks(folder, 4, dtype=torch.bfloat16)
    prompt = [random.randrange(VOCAB) for _ in range(20)]
    [ours] = ranks.logits([make_runner(decoder) for decoder in ranks.decoders], [prompt])
    [exact] = make_runner(load(folder)).step([prompt])
    assert 0 < (ours - exact).abs().max() < 0.1 * (exact.max() - exact.min())


@pytest.mark.skipif(host.LIBRARY is None, reason="the host kernels are not built")
@pytest.mark.parametrize(
    ("size", "dtype", "overrides"),
    [
        (2, torch.float32, {}),  # torch multiplies too, between runs of the host's kernels
        (2, torch.float32, {"intermediate_size": 192}),
        (3, torch.bfloat16, {"hidden_size": 192}),
    ],
)
def test_a_recorded_step_equals_an_eager_one_bitwise(
    size: int, dtype: torch.dtype, overrides: dict[str, object], tmp_path: Path
) -> None:
    folder = make(tmp_path, "llama", size, head_dim=16, **overrides)
    ranks = load_ranks(folder, size, dtype=dtype)
    tokens = [random.randrange(VOCAB) for _ in range(5)]
    eager, recorded = (
        together(
            ranks.meeting,
            [partial(decode_logits, decoder, tokens, recorded=way) for decoder in ranks.decoders],
        )
        for way in (False, True)
    )
    for ours, theirs in zip(recorded, eager, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)
    # eager and recorded: one sum for the embedding, two a layer
    assert ranks.meeting.num_reduced == [2 * (1 + 2 * 2)] * size


def test_processes_over_gloo_get_the_same_sums_and_logits(
    tmp_path: Path, assert_logits_close: Check
) -> None:
    size = 3
    folder = make(tmp_path / "model", "llama", size, head_dim=16)
    files = [tmp_path / f"{rank}.pt" for rank in range(size)]
    script, store = gloo_rank.__file__, tmp_path / "store"
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(store), str(folder), str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, file in enumerate(files)
    ]
    try:
        assert [process.wait(120) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = [torch.load(file) for file in files]
    for count in gloo_rank.SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{count} {dtype}"
            assert all(torch.equal(each[name], found[0][name]) for each in found)
            parts = [gloo_rank.numbers(rank, count, dtype) for rank in range(size)]
            exact = torch.stack(parts).double().sum(0)
            rounded = 2**-8 if dtype is torch.bfloat16 else 2**-23
            scale = torch.stack(parts).double().abs().sum(0)
            assert ((found[0][name] - exact).abs() <= rounded * scale).all()
    largest = torch.stack([gloo_rank.keys(rank) for rank in range(size)]).amax(0)
    assert all(torch.equal(each["keys"], largest) for each in found)
    logits = torch.cat([each["logits"] for each in found], dim=1)
    assert_logits_close(logits, decode_logits(load(folder), gloo_rank.TOKENS, recorded=False))
    if host.LIBRARY is not None:
        assert torch.equal(torch.cat([each["recorded"] for each in found], dim=1), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_rounded_once(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.kernels.collective._WIDE_PIECE", 100)
    parts = [torch.randn(6, 50).to(dtype) for _ in range(size)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    meeting, places = rank_threads(size)
    zipped = zip(parts, places, strict=True)
    together(meeting, [partial(all_reduce, part, place.group) for part, place in zipped])
    for part in parts:
        assert torch.equal(part, expected.to(dtype))


def test_maxima_are_over_the_ranks_and_alone_nothing_happens() -> None:
    parts = [torch.randint(-(2**62), 2**62, (50,)) for _ in range(3)]
    expected = torch.stack(parts).amax(0)
    meeting, places = rank_threads(3)
    zipped = zip(parts, places, strict=True)
    together(meeting, [partial(all_reduce_max, part, place.group) for part, place in zipped])
    assert all(torch.equal(part, expected) for part in parts)
    x = torch.randn(5)
    before = x.clone()
    all_reduce(x, None)
    all_reduce_max(x, None)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "legal"),
    [
        (12, 4, 96, (1, 2, 4, 12)),
        (12, 6, 96, (1, 2, 3, 6, 12)),
        (12, 1, 96, (1, 2, 3, 4, 6, 12)),
        (12, 12, 100, (1, 2, 4)),
        (14, 2, 4864, (1, 2)),
        (9, 3, 1536, (1, 3)),
    ],
)
def test_numbers_of_ranks_that_can_share_a_model(
    heads: int, kv_heads: int, intermediate: int, legal: tuple[int, ...]
) -> None:
    spec = replace(SPEC, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate)
    assert legal_sizes(spec, 64) == legal
    assert legal_sizes(spec, 3) == tuple(size for size in legal if size <= 3)
    for size in range(1, 15):
        if size in legal:
            own = local_spec(spec, TensorParallel(size - 1, size))
            assert own.num_heads * size == heads
            assert own.num_kv_heads * size == max(kv_heads, size)
        else:
            with pytest.raises(
                ValueError, match=f"^{size} ranks .*: {', '.join(map(str, legal))}$"
            ):
                local_spec(spec, TensorParallel(0, size))


@pytest.mark.parametrize("vocab", [16, 17, 377, 384, 1000])
@pytest.mark.parametrize("size", [2, 4, 12])
def test_every_token_id_is_on_one_rank(vocab: int, size: int) -> None:
    spec = replace(SPEC, vocab_size=vocab)
    places = [TensorParallel(rank, size) for rank in range(size)]
    ids = [share(spec, "vocab", place) for place in places]
    assert [i for part in ids for i in part] == list(range(vocab))
    [rows] = {local_spec(spec, place).vocab_size for place in places}
    assert rows % 16 == 0 and rows * size - vocab < 16 * size
    assert all(len(part) <= rows for part in ids)


def test_one_rank_has_the_whole_model() -> None:
    assert local_spec(SPEC, SINGLE) is SPEC
    assert share(SPEC, "vocab", SINGLE) == range(VOCAB)
    assert share(SPEC, "kv_heads", SINGLE) == range(4 * 8)


@pytest.mark.parametrize("size", [2, 4, 12])
def test_queries_find_their_kv_head_on_their_rank(size: int) -> None:
    per_group = SPEC.num_heads // SPEC.num_kv_heads
    for rank in range(size):
        place = TensorParallel(rank, size)
        own = local_spec(SPEC, place)
        q = [i // 8 for i in share(SPEC, "heads", place)][::8]
        kv = [i // 8 for i in share(SPEC, "kv_heads", place)][::8]
        assert (len(q), len(kv)) == (own.num_heads, own.num_kv_heads)
        for place_of, head in enumerate(q):
            assert kv[place_of // (own.num_heads // own.num_kv_heads)] == head // per_group


def test_gguf_ranks_equal_the_whole_model(
    tmp_path: Path, make_runner: Any, assert_logits_close: Check
) -> None:
    file = make_gguf(make(tmp_path, "llama", 4), tmp_path / "tiny.gguf", "Q8_0")
    ranks = load_ranks(file, 4)
    prompt = [random.randrange(VOCAB) for _ in range(20)]
    [ours] = ranks.logits([make_runner(decoder) for decoder in ranks.decoders], [prompt])
    assert_logits_close(ours, make_runner(load(file)).step([prompt])[0])
