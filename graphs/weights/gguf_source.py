"""Dequantizes GGUF tensors into parameters, a few rows at a time.

Knows block formats through the gguf package only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.parameters import Shape
from treadle.graphs.weights.errors import CheckpointError
from treadle.graphs.weights.gguf_file import GgufFile, GgufTensor
from treadle.graphs.weights.parts import Part

# Numbers dequantized at once: a few MB of temporaries. A quarter of it loads Q4_1 a third slower,
# by numpy's call overhead; twice as much gains nothing; and a second thread gains a quarter, but
# brings torch's copies a second OpenMP pool.
_CHUNK = 1 << 18
# Numbers converted at once on the host: below torch's threshold for its thread pool, whose barriers
# cost more than the work does, and seconds in all while another process keeps a core busy.
_HOST_PIECE = 1 << 14
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufSource:
    """interleaved: q and k rows are stored as interleaved rotary pairs, and are put back."""

    def __init__(self, file: GgufFile, interleaved: bool) -> None:
        self._file = file
        self._interleaved = interleaved

    @property
    def label(self) -> str:
        return str(self._file.path)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def name_of(self, placement: Placement) -> str:
        return placement.gguf_name

    def read(self, part: Part, destination: Tensor) -> None:
        name, heads = part.own.gguf_name, part.own.rotary_heads
        tensor = self._file.tensors[name]
        flat = destination.view(-1)
        piece_size = _HOST_PIECE if flat.device.type == "cpu" else _CHUNK
        start = 0
        try:
            for chunk in _chunks(tensor, part.box):
                for piece in torch.split(chunk, piece_size):
                    flat[start : start + len(piece)].copy_(piece)
                    start += len(piece)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.label}: tensor {name} is stored as {tensor.kind.name}, "
                "which the gguf package cannot dequantize"
            ) from error
        if self._interleaved and heads:
            destination.copy_(_split_pairs(destination, heads))


def _chunks(tensor: GgufTensor, box: tuple[range, ...]) -> Iterator[Tensor]:
    """The numbers of the box, some rows at a time, flat; only the blocks that it touches."""
    *outer, columns = box
    rows = outer[0] if outer else range(1)
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    first, last = columns.start // block, -(-columns.stop // block)
    width, skipped = (last - first) * block, columns.start - first * block
    rows_at_once = max(1, _CHUNK // width)
    for start in range(rows.start, rows.stop, rows_at_once):
        stop = min(start + rows_at_once, rows.stop)
        touched = tensor.blocks[start:stop, first * block_bytes : last * block_bytes]
        numbers = _numbers(touched.reshape(1, -1), tensor.kind).view(-1, width)
        yield numbers[:, skipped : skipped + len(columns)].reshape(-1)


def _numbers(
    blocks: npt.NDArray[np.uint8],  # [1, bytes]
    kind: GGMLQuantizationType,
) -> Tensor:
    if (dtype := _PLAIN.get(kind)) is not None:
        return torch.from_numpy(blocks.copy()).view(dtype)
    return torch.from_numpy(dequantize(blocks, kind))


def _split_pairs(
    rows: Tensor,  # [heads * D, ...] neighbours are pairs
    heads: int,
) -> Tensor:
    """[heads * D, ...] with the pairs half a head apart."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
