"""One rank of a group of processes over gloo: saves sums and a model's logits for the test.

Arguments: rank, number of ranks, the store's file, the model's folder, the result's file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rank_threads import decode_logits
from torch import distributed
from torch._C._distributed_c10d import FileStore

from treadle.graphs.parallel import TensorParallel
from treadle.graphs.weights.load import load_model, read_spec
from treadle.kernels import host
from treadle.kernels.collective import all_reduce, all_reduce_max

TOKENS = (5, 376, 130, 251, 128)
SIZES = (1, 2, 7, 1000, 100_003)


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator).to(dtype)


def keys(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**62), 2**62, (33,), generator=generator)


def main(rank: int, size: int, store: str, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size)
    group = distributed.group.WORLD
    assert group is not None
    found: dict[str, torch.Tensor] = {}
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x = numbers(rank, count, dtype)
            all_reduce(x, group)
            found[f"{count} {dtype}"] = x
    found["keys"] = keys(rank)
    all_reduce_max(found["keys"], group)
    decoder = load_model(
        folder,
        read_spec(folder),
        load_format="auto",
        dtype=torch.float32,
        allocate=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        parallel=TensorParallel(rank, size, group),
    ).decoder
    found["logits"] = decode_logits(decoder, TOKENS, recorded=False)[:, : decoder.num_ids]
    if host.LIBRARY is not None:
        found["recorded"] = decode_logits(decoder, TOKENS, recorded=True)[:, : decoder.num_ids]
    torch.save({name: x.contiguous() for name, x in found.items()}, out)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
