"""Random weights of plausible size, for trying an architecture without its checkpoint.

Knows parameters by name and shape only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def fill_randomly(
    parameters: Mapping[str, Tensor], seed: int, progress: Callable[[int, int], None] | None
) -> None:
    """Norms become 1, biases 0, matrices normal with variance 1 / columns.

    A parameter's numbers depend on the seed and its own name, not on the others.
    progress: called with the bytes filled so far, and of all.
    """
    total = sum(tensor.nbytes for tensor in parameters.values())
    done = 0
    for name, tensor in parameters.items():
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            generator = torch.Generator(tensor.device)
            generator.manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
