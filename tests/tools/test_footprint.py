from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.graphs.models.decoder import Decoder
from treadle.graphs.parallel import TensorParallel, local_spec
from treadle.graphs.weights.load import load_decoder, load_model, read_spec
from treadle.kernels.paged_attention import AttentionMeta
from treadle.kernels.sampling import sample
from treadle.tools.footprint import (
    kv_shape,
    model_facts,
    step_bytes_per_row,
    step_bytes_per_token,
    weight_bytes,
)
from treadle.tools.machine import Room
from treadle.tools.tiny_model import ARCHITECTURES, make_folder

TOKENS, ROWS = 96, 80
WIDE = {"hidden_size": 128, "intermediate_size": 320, "vocab_size": 2048}


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that are made inside and alive at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._now += size
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


@pytest.fixture(
    params=[("llama", torch.float32, 1), ("qwen3", torch.bfloat16, 1), ("qwen2", torch.bfloat16, 2)]
)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    """The whole model, or a rank's part of it that computes alone."""
    arch, dtype, size = request.param
    folder = make_folder(tmp_path / arch, arch, overrides=WIDE)
    return load_model(
        folder,
        read_spec(folder),
        load_format="dummy",
        dtype=dtype,
        allocate=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        parallel=TensorParallel(0, size),
    ).decoder


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_take_what_the_loaded_parameters_take(arch: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / arch, arch)
    spec = read_spec(folder)
    decoder = load_decoder(
        folder, spec, load_format="auto", dtype=torch.bfloat16, device=torch.device("cpu")
    )
    layers = [
        weight
        for layer in decoder.layers
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
        for weight in (linear.weight, linear.bias)
        if weight is not None
    ]
    ends = [decoder.embedding, decoder.head.weight]
    norms = weight_bytes(spec, torch.bfloat16) - sum(t.nbytes for t in layers + ends)
    assert (
        0
        < norms
        <= (2 * spec.num_layers + 1) * spec.hidden_size * 2
        + (2 * spec.num_layers * spec.head_dim * 2)
    )


def test_activations_of_a_step_take_what_is_set_aside(decoder: Decoder) -> None:
    spec, dtype = decoder.spec, decoder.dtype
    empty = torch.zeros(TOKENS, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    cache = [(empty.clone(), empty.clone()) for _ in range(spec.num_layers)]
    positions = torch.arange(TOKENS)
    meta = AttentionMeta(
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.tensor([TOKENS], dtype=torch.int32),
        torch.tensor([0]),
        positions.int().unsqueeze(0),
        page_size=1,
        max_q_len=TOKENS,
        max_seq_len=TOKENS,
    )
    with torch.inference_mode():
        tokens = torch.randint(0, spec.vocab_size, (TOKENS,))
        with Peak() as forward:
            hidden = decoder.forward(tokens, positions, cache, positions, meta)
        with Peak() as sampling:
            logits = decoder.logits(hidden[:ROWS])
            sample(logits, torch.ones(ROWS), torch.arange(ROWS), torch.full((ROWS,), TOKENS))
    predicted = TOKENS * step_bytes_per_token(spec, dtype)
    assert forward.bytes <= 1.1 * predicted and predicted <= 1.5 * forward.bytes
    predicted = ROWS * step_bytes_per_row(spec, dtype)
    assert sampling.bytes <= 1.1 * predicted and predicted <= 1.5 * sampling.bytes


def test_facts_before_and_after_loading_agree(tmp_path: Path) -> None:
    spec = read_spec(make_folder(tmp_path))
    weights = weight_bytes(spec, torch.float32)
    free = weights + 10**9
    before = model_facts(
        spec, torch.float32, Room(10**10, free), weights_loaded=False, is_host=True
    )
    after = model_facts(
        spec, torch.float32, Room(10**10, free - weights), weights_loaded=True, is_host=True
    )
    assert before == after and before.free_bytes == 10**9 and before.total_bytes == free
    assert before.bytes_per_token == kv_shape(spec, torch.float32).bytes_per_token
    assert before.max_position == spec.max_position


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_facts_of_a_rank_are_those_of_its_part(arch: str, size: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / arch, arch, overrides={"vocab_size": 390})
    spec, place = read_spec(folder), TensorParallel(size - 1, size)
    loaded = load_model(
        folder,
        spec,
        load_format="dummy",
        dtype=torch.bfloat16,
        allocate=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        parallel=place,
    )
    room = Room(10**9, 10**8)
    facts = model_facts(
        spec, torch.bfloat16, room, weights_loaded=False, is_host=True, parallel=place
    )
    assert facts.weight_bytes == sum(tensor.nbytes for tensor in loaded.parameters.values())
    assert facts.free_bytes == room.free - facts.weight_bytes
    own = loaded.decoder.spec
    assert own == local_spec(spec, place)
    # two kv heads in all: each rank holds one of them
    assert facts.bytes_per_token == 2 * spec.num_layers * spec.head_dim * 2
    assert facts.step_bytes_per_token == step_bytes_per_token(own, torch.bfloat16)
    assert facts.step_bytes_per_row == step_bytes_per_row(own, torch.bfloat16)
    assert own.vocab_size * size >= 390 > own.vocab_size * size - 16 * size


def test_weights_beyond_the_free_memory_leave_nothing(tmp_path: Path) -> None:
    spec = read_spec(make_folder(tmp_path))
    facts = model_facts(spec, torch.float32, Room(100, 50), weights_loaded=False, is_host=True)
    assert facts.free_bytes == 0
