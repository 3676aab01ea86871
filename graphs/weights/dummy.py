"""Random weights of plausible size, for trying an architecture without its checkpoint.

Knows parameters by name and shape only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from treadle.graphs.weights.parts import Part


def fill_randomly(
    parameters: Mapping[str, Tensor],
    seed: int,
    progress: Callable[[int, int], None] | None,
    parts: Sequence[Part] = (),
) -> None:
    """Norms become 1, biases 0, matrices normal with variance 1 / columns.

    A parameter's numbers depend on the seed and its own name, not on the others.
    progress: called with the bytes filled so far, and of all.
    parts: of a rank, whose numbers are then the whole model's at their places.
    """
    total = sum(tensor.nbytes for tensor in parameters.values())
    done = 0
    for name, tensor in parameters.items():
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            _draw(name, tensor, seed, [part for part in parts if part.own.parameter == name])
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _draw(name: str, tensor: Tensor, seed: int, parts: Sequence[Part]) -> None:
    whole = tensor
    if parts and any(part.whole.shape != part.own.shape for part in parts):
        rows = sum(part.whole.shape[0] for part in parts)
        whole = tensor.new_empty(rows, parts[0].whole.shape[1])
    generator = torch.Generator(tensor.device)
    generator.manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
    whole.normal_(0.0, whole.shape[1] ** -0.5, generator=generator)
    if whole is tensor:
        return
    tensor.zero_()
    for part in parts:
        rows_kept, columns = part.box
        first = part.whole.row + rows_kept.start
        box = whole[first : first + len(rows_kept), columns.start : columns.stop]
        tensor.narrow(0, part.own.row, len(rows_kept)).copy_(box)
