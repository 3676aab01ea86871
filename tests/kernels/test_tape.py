"""Recording kernels, playing them, and the memory that their outputs share."""

from __future__ import annotations

import gc
import random
import threading
from functools import partial

import pytest
import torch
from torch import Tensor

from treadle.kernels import host, tape
from treadle.kernels.activation import silu_and_mul
from treadle.kernels.linear import linear
from treadle.kernels.rmsnorm import add_rms_norm, rms_norm
from treadle.kernels.rows import add_to, gather_rows, widen

pytestmark = [
    pytest.mark.skipif(host.LIBRARY is None, reason="the host kernels are not built"),
]


@pytest.fixture
def workspace() -> tape.Workspace:
    return tape.Workspace(torch.empty(1 << 20, dtype=torch.uint8).random_())


def a_block(x: Tensor, weights: dict[str, Tensor], out: Tensor) -> None:
    """A small piece of a model: views, kernels, and a product that torch makes."""
    normed = rms_norm(x.view(2, -1, 64).flatten(0, 1), weights["norm"], 1e-5)
    gated = silu_and_mul(linear(normed, weights["up"]))
    hidden = linear(gated, weights["down"], weights["bias"])
    residual = gather_rows(x, weights["order"])
    more = add_rms_norm(hidden, residual, weights["norm"], 1e-5)
    add_to(residual, more)
    widen(residual, out)


def some_weights(dtype: torch.dtype, inner: int) -> dict[str, Tensor]:
    weights = {
        "norm": torch.randn(64), "up": torch.randn(2 * inner, 64),
        "down": torch.randn(64, inner) / 8, "bias": torch.randn(64),
    }  # fmt: skip
    order = torch.tensor([3, 0, 1, 2])
    return {name: value.to(dtype) for name, value in weights.items()} | {"order": order}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [64, 40])  # 40 columns: torch's product
@torch.inference_mode()
def test_played_tape_does_what_the_code_does_with_what_stands_there_now(
    workspace: tape.Workspace, dtype: torch.dtype, inner: int
) -> None:
    weights = some_weights(dtype, inner)
    x, out = torch.randn(4, 64).to(dtype), torch.full((4, 64), torch.nan)
    recorded = host.record(lambda: a_block(x, weights, out), workspace)
    assert out.isnan().all()  # nothing has run
    for _ in range(3):
        x.copy_(torch.randn(4, 64))
        expected = torch.empty(4, 64)
        a_block(x, weights, expected)
        recorded.play()
        assert torch.equal(out, expected)


@torch.inference_mode()
def test_tapes_share_memory_and_give_it_back(workspace: tape.Workspace) -> None:
    weights = some_weights(torch.bfloat16, 40)
    x, outs = torch.randn(4, 64).bfloat16(), [torch.empty(4, 64) for _ in range(50)]
    tapes = [host.record(partial(a_block, x, weights, out), workspace) for out in outs]
    gc.collect()
    assert workspace._free == [(0, workspace.size)]
    assert 0 < workspace.peak < 4096
    for recorded in tapes:
        recorded.play()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_workspace_blocks_never_overlap_and_merge_again(workspace: tape.Workspace) -> None:
    rng = random.Random(3)
    live: list[tuple[Tensor, int]] = []
    block: Tensor | None
    for step in range(500):
        if live and rng.random() < 0.5:
            block, mark = live.pop(rng.randrange(len(live)))
            assert (block == mark).all()
            block = None
        else:
            block = workspace.empty((rng.randint(1, 3000),), torch.int64)
            assert block.data_ptr() % 64 == 0
            live.append((block.fill_(step), step))
            block = None
    assert all((kept == mark).all() for kept, mark in live)
    live.clear()
    assert workspace._free == [(0, workspace.size)]


def test_workspace_that_is_full_says_so(workspace: tape.Workspace) -> None:
    kept = workspace.empty((workspace.size - 64,), torch.uint8)
    with pytest.raises(tape.NotRecordable, match="has no 128 bytes left"):
        workspace.empty((65,), torch.uint8)
    del kept
    assert workspace.empty((65,), torch.uint8).shape == (65,)


@torch.inference_mode()
def test_a_view_keeps_its_block(workspace: tape.Workspace) -> None:
    view = workspace.empty((4, 8), torch.float32)[1].view(2, 4)
    assert workspace._free != [(0, workspace.size)]
    del view
    assert workspace._free == [(0, workspace.size)]


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.clone(), lambda x: x.float(), lambda x: x.t().contiguous(),
     lambda x: x.sum().item(), lambda x: torch.zeros(3)],
)  # fmt: skip
@torch.inference_mode()
def test_torch_operators_that_compute_are_refused(
    workspace: tape.Workspace, compute: object
) -> None:
    x = torch.randn(4, 6).bfloat16()
    assert callable(compute)
    with pytest.raises(tape.NotRecordable, match="not a host kernel"):
        host.record(lambda: compute(x), workspace)
    assert tape.active() is None
    assert torch.equal(x + 1, x + 1)  # and outside all is as before


@torch.inference_mode()
def test_only_the_recording_thread_records(workspace: tape.Workspace) -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    seen: list[Tensor] = []

    def body() -> None:
        other = threading.Thread(target=lambda: seen.append(rms_norm(x, weight, 1e-5)))
        other.start()
        other.join()
        rms_norm(x, weight, 1e-5)

    recorded = host.record(body, workspace)
    assert recorded.num_calls == 1
    assert torch.equal(seen[0], rms_norm(x, weight, 1e-5))


def test_arguments_become_words() -> None:
    words = tape.to_words([host.INT, host.POINTER, host.SIZE, host.FLOAT], [1, None, -5, 1.5])
    assert words == [1, 0, -5, 0x3FC00000]
    assert tape.to_words([host.FLOAT], [-2.0])[0] & 0xFFFFFFFF == 0xC0000000
