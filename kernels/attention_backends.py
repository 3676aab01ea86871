"""Which attention and sampling implementations exist, and which one serves a model on a device.

Knows what each supports, never how it works, nor flags: callers bring what was asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from treadle.kernels import host, paged_attention, sampling

Phase = Literal["prefill", "decode"]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of its attention on a device."""

    device: str  # a torch device type: cpu, cuda
    kv_dtype: torch.dtype
    head_dim: int
    window: bool = False
    sinks: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        extras = [name for name in ("window", "sinks", "softcap") if getattr(self, name)]
        dtype = str(self.kv_dtype).removeprefix("torch.")
        plain = f"{self.device} with {dtype} KV and head dim {self.head_dim}"
        return ", ".join([plain, *extras])


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of paged attention, and what it supports."""

    name: str
    reason: str  # why `auto` takes it where it fits
    devices: tuple[str, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    head_dim_multiple: int = 1
    window: bool = True
    sinks: bool = True
    softcap: bool = True
    phases: tuple[Phase, ...] = ("prefill", "decode")

    def missing(self) -> str | None:
        """Why it cannot run in this installation, None when it can."""
        if self.name == "triton" and importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if self.name == "host" and host.LIBRARY is None:
            return "the host kernels are not built"
        return None

    def misfit(self, needs: AttentionNeeds, phase: Phase) -> str | None:
        """Why it does not serve these needs, None when it does."""
        if missing := self.missing():
            return missing
        if needs.device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}"
        if phase not in self.phases:
            return f"it has no {phase}"
        if needs.kv_dtype not in self.kv_dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in self.kv_dtypes]
            return f"its KV is {', '.join(names)}"
        if needs.head_dim > self.max_head_dim:
            return f"its head dim is at most {self.max_head_dim}"
        if needs.head_dim % self.head_dim_multiple:
            return f"its head dim is a multiple of {self.head_dim_multiple}"
        for name in ("window", "sinks", "softcap"):
            if getattr(needs, name) and not getattr(self, name):
                return f"it has no {name}"
        return None


BACKENDS: Final = (  # auto takes the first that fits
    AttentionBackend(
        "triton",
        "the fastest that runs on a GPU",
        devices=("cuda",),
        kv_dtypes=_FLOATS,
        max_head_dim=256,
    ),
    AttentionBackend(
        "host",
        "compiled C++, the fastest on a CPU",
        devices=("cpu",),
        kv_dtypes=(torch.float32, torch.bfloat16),
        max_head_dim=256,
        head_dim_multiple=16,
        sinks=False,
        softcap=False,
    ),
    AttentionBackend(
        "torch_native",
        "plain torch, slower, for what no other backend takes",
        devices=("cpu", "cuda"),
        kv_dtypes=_FLOATS,
        max_head_dim=1 << 16,
        sinks=False,
        softcap=False,
    ),
)
_SAMPLING: Final = {"triton": ("cuda",), "pytorch": ("cpu", "cuda")}


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str


def choose(needs: AttentionNeeds, phase: Phase, requested: str | None = None) -> Choice:
    """The backend that was asked for, or with None or `auto` the first that fits.

    Raises: ValueError when it does not fit or nothing does, with the list of those that do.
    """
    misfits = {backend.name: backend.misfit(needs, phase) for backend in BACKENDS}
    fitting = [name for name, misfit in misfits.items() if misfit is None]
    instead = (
        f"these fit: {', '.join(fitting)}"
        if fitting
        else "no backend fits: "
        + "; ".join(f"{name}: {misfit}" for name, misfit in misfits.items())
    )
    if requested in (None, "auto"):
        if not fitting:
            raise ValueError(f"{phase} attention on {needs}: {instead}")
        backend = next(backend for backend in BACKENDS if backend.name == fitting[0])
        return Choice(backend.name, f"{backend.reason}; {phase} on {needs}")
    if requested not in misfits:
        raise ValueError(f"there is no attention backend {requested!r}; {instead}")
    if misfit := misfits[requested]:
        raise ValueError(
            f"attention backend {requested} does not serve {phase} on {needs}: {misfit}; {instead}"
        )
    return Choice(requested, "asked for")


def load(name: str) -> Callable[..., Tensor]:
    """The named backend's attention: `treadle.kernels.paged_attention.paged_attention`'s arguments.

    triton takes `sinks` and `softcap` after them.
    """
    if name == "triton":
        from treadle.kernels.gpu import paged_attention as triton_attention

        return triton_attention.paged_attention
    if name == "torch_native":
        return paged_attention.paged_attention_torch
    return paged_attention.paged_attention


def choose_sampling(device: str, requested: str | None = None) -> Choice:
    """The sampling backend that was asked for, or with None or `auto` the first that fits.

    Raises: ValueError when it does not fit, with the list of those that do.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    fitting = [
        name
        for name, devices in _SAMPLING.items()
        if device in devices and (has_triton or name != "triton")
    ]
    if requested in (None, "auto"):
        reason = "no sort, no host sync" if fitting[0] == "triton" else "the one that runs here"
        return Choice(fitting[0], f"{reason}; {device}")
    if requested not in fitting:
        raise ValueError(
            f"sampling backend {requested!r} does not run on {device}; "
            f"these fit: {', '.join(fitting)}"
        )
    return Choice(str(requested), "asked for")


def load_sampling(name: str) -> Callable[..., Tensor]:
    """The named backend's `treadle.kernels.sampling.sample`."""
    if name == "pytorch" and torch.cuda.is_available():
        return sampling.sample_torch
    return sampling.sample  # on a host its compiled kernel, where there is one
