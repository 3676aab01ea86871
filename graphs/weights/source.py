"""Fills a decoder's parameters from a checkpoint, whatever its format.

Knows names, shapes and rows; how a tensor is stored is its source's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.parameters import Shape
from treadle.graphs.weights.errors import CheckpointError
from treadle.graphs.weights.parts import Part

logger = logging.getLogger(__name__)

_SHOWN = 4  # names listed in a message before it says how many more there are
_HARMLESS = (  # endings of tensors that are buffers, or the embedding again under the head's name
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "lm_head.weight",
)

_SCALES = ("scale", "scales", "scale_inv")  # endings of what stored numbers must be multiplied by

Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """A checkpoint that is open for reading."""

    @property
    def label(self) -> str:
        """What messages call it."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor it holds."""

    def name_of(self, placement: Placement) -> str:
        """The name that this format gives the tensor."""

    def read(self, part: Part, destination: Tensor) -> None:
        """Writes the part's box into the destination, converted to its dtype and device.

        No more of the checkpoint is read than the box, where the format can be cut there.

        Raises: CheckpointError when the stored type cannot be read.
        """


def fill_parameters(
    parameters: Mapping[str, Tensor],
    parts: Sequence[Part],
    source: TensorSource,
    progress: Progress | None,
) -> None:
    """Reads every part into its rows, one tensor at a time; rows that only pad become 0.

    progress: called with the bytes of parameters filled so far, and of all.
    Raises: CheckpointError for a missing tensor or another shape than the config asks for.
    """
    _check([part.whole for part in parts], source)
    total = sum(tensor.nbytes for tensor in parameters.values())
    done = 0
    for part in parts:
        own, count = part.own, len(part.box[0])
        rows = parameters[own.parameter].narrow(0, own.row, own.shape[0])
        if count:
            source.read(part, rows[:count])
        rows[count:].zero_()
        done += rows.nbytes
        if progress is not None:
            progress(done, total)


def _check(placements: Sequence[Placement], source: TensorSource) -> None:
    expected = {source.name_of(placement): placement.shape for placement in placements}
    found = source.shapes
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    if missing:
        raise CheckpointError(
            f"{source.label} lacks tensors that its config asks for: {_some(missing)}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{source.label}: tensor {name} does not fit the config: "
                f"expected shape {list(shape)}, found {list(found[name])}"
            )
    extra = [name for name in found if name not in expected and not name.endswith(_HARMLESS)]
    scales = [name for name in extra if name.endswith(_SCALES)]
    if scales:
        raise CheckpointError(
            f"{source.label} is quantized in a way that is not supported: it has {_some(scales)}"
        )
    if extra:
        logger.warning("%s: %d tensors are not used: %s", source.label, len(extra), _some(extra))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
