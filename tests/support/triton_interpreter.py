"""Runs Triton kernels on the CPU: imported by conftest before anything imports Triton.

On a machine with a GPU the kernels are compiled instead, unless TRITON_INTERPRET=1 says otherwise.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HAS_GPU = Path("/dev/nvidiactl").exists()
HAS_TRITON = importlib.util.find_spec("triton") is not None

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Three things that Triton 3.6's interpreter gets wrong: fp32 becomes bf16 by truncation, a
    dot multiplies the raw bits of bf16, and NumPy 2.4 refuses its loop bounds.
    """
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    cast, dot = builder.cast_impl, builder.create_dot
    handle, tl = interpreter.TensorHandle, interpreter.tl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        return handle(_bf16_bits(np.asarray(source.data)), target.scalar)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            handle(_from_bf16_bits(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        ]
        return dot(self, *wide, *rest)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor


def _bf16_bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """fp32 to the bits of bf16, to nearest with ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)


def _from_bf16_bits(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
