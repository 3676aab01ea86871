"""Loads the compiled host kernels and hands out their functions; without them torch serves.

Knows nothing of any kernel: each family declares the functions that it calls.

The library is built when the package is installed, once per instruction set. It uses the OpenMP
runtime that torch has already loaded: a second thread pool would compete for the same cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch  # before the library: its OpenMP symbols come from torch's runtime
from torch import Tensor

from treadle.kernels import tape

_log = logging.getLogger(__name__)

POINTER: Final = ctypes.c_void_p
SIZE: Final = ctypes.c_int64
INT: Final = ctypes.c_int
FLOAT: Final = ctypes.c_float

_V2 = frozenset("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split())
_V3 = _V2 | frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_BUILDS = (  # the best first: x86-64 psABI levels, the highest also with bf16 arithmetic
    ("_host_v4_bf16", _V4 | {"avx512_bf16"}),
    ("_host_v4", _V4),
    ("_host_v3", _V3),
    ("_host", frozenset[str]()),
)
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


def _cpu_flags() -> frozenset[str]:
    """What the CPU can do, in Linux's words; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _load() -> ctypes.CDLL | None:
    if os.environ.get("TREADLE_HOST_KERNELS") == "0":
        _log.info("host kernels are off: TREADLE_HOST_KERNELS=0")
        return None
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = _cpu_flags()
    reason = "not built, or for another CPU"
    for name, needed in _BUILDS:
        path = Path(__file__).with_name(f"{name}{suffix}")
        if not needed <= flags or not path.exists():
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = str(error)
    _log.warning("no compiled host kernels (%s): the slower torch versions serve", reason)
    return None


LIBRARY: Final = _load()


class Function:
    """A C function of the library. While a thread records a tape, its calls are noted, not made."""

    __slots__ = ("argtypes", "_address", "_pointer")

    def __init__(self, library: ctypes.CDLL, name: str, argtypes: Sequence[type]) -> None:
        self.argtypes = list(argtypes)
        self._pointer = library[name]
        self._pointer.argtypes = self.argtypes
        self._pointer.restype = None
        self._address = ctypes.cast(library[f"{name}_words"], ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> None:
        recorded = tape.active()
        if recorded is None:
            self._pointer(*arguments)
        else:
            recorded.note(self._address, tape.to_words(self.argtypes, arguments))


def function(name: str, argtypes: Sequence[type]) -> Function | None:
    """None when the library is not there."""
    return None if LIBRARY is None else Function(LIBRARY, name, argtypes)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A kernel's output, contiguous: the recorded tape's memory, or new memory."""
    recorded = tape.active()
    if recorded is not None:
        return recorded.workspace.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def empty_like(x: Tensor) -> Tensor:
    """An output of x's shape, contiguous whatever x is."""
    return empty(x.shape, x.dtype, x.device)


def call(operator: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
    """A torch operator that writes into the output it is given: run, or noted on a tape."""
    recorded = tape.active()
    if recorded is None:
        operator(*arguments, **keywords)
    else:
        recorded.note_call(operator, arguments, keywords)


def record(body: Callable[[], object], workspace: tape.Workspace) -> tape.Tape:
    """What body does, ready to play; nothing of it has run.

    Raises: NotRecordable.
    """
    if LIBRARY is None:
        raise tape.NotRecordable("there are no compiled host kernels")
    recorded = tape.Tape(workspace)
    with tape.record(recorded):
        body()
    play = LIBRARY.treadle_play
    play.argtypes = [POINTER, SIZE]
    play.restype = None
    recorded.seal(play)
    return recorded


def kind(x: Tensor) -> int | None:
    """The library's number for the tensor's dtype, None for a tensor that it cannot take."""
    return _KINDS.get(x.dtype) if x.is_cpu else None
