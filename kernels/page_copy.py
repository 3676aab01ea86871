"""Copies of KV pages between a device's cache and a pool in host memory, both ways.

Knows page ids; never why a page moves, nor what lies in it. Copies are queued on the current stream
and no page is checked for other users.

Axes: N token slots of the device's cache, n pages to copy, P pages of the pool, L layers,
S page size, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["page_first", "layer_first"]
Direction = Literal["to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class HostPool:
    """Pages in host memory, pinned where a GPU copies them.

    page_first keeps a page in one piece, so that storage can move it in one go; layer_first keeps a
    layer's pages together.
    """

    data: Tensor  # page_first [P, 2, L, S, K, D], layer_first [2, L, P, S, K, D], contiguous
    layout: Layout

    @property
    def by_layer(self) -> Tensor:
        """The pages as [2, L, P, S, K, D], a view; keys, then values."""
        return self.data if self.layout == "layer_first" else self.data.permute(1, 2, 0, 3, 4, 5)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0 if self.layout == "page_first" else 2]

    @property
    def page_size(self) -> int:
        return self.data.shape[3]


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The paged cache of every layer."""

    layers: Sequence[tuple[Tensor, Tensor]]  # keys and values, [N, K, D], contiguous
    pointers: Tensor  # [2, L] int64 on the device, the layers' addresses

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, Tensor]]) -> DevicePool:
        """Waits for the device; the layers must not move afterwards."""
        assert all(x.is_contiguous() for layer in layers for x in layer)
        addresses = [[layer[kind].data_ptr() for layer in layers] for kind in (0, 1)]
        return cls(layers, torch.tensor(addresses, dtype=torch.int64, device=layers[0][0].device))


def host_pool(
    layout: Layout, pages: int, page_size: int, layers: Sequence[tuple[Tensor, Tensor]], pin: bool
) -> HostPool:
    """A pool for pages of such layers; not initialised.

    pin: as a GPU needs it; the memory is committed at once.
    """
    k = layers[0][0]
    page = (page_size, *k.shape[1:])
    shape = (
        (pages, 2, len(layers), *page) if layout == "page_first" else (2, len(layers), pages, *page)
    )
    return HostPool(torch.empty(shape, dtype=k.dtype, pin_memory=pin), layout)


def copy_pages(
    direction: Direction,
    device: DevicePool,
    host: HostPool,
    device_pages: Tensor,  # [n] int64, readable by the device
    host_pages: Tensor,  # [n] int64, readable by the device
    layers: range | None = None,
) -> None:
    """Copies page `device_pages[i]` to or from page `host_pages[i]`, keys and values.

    layers: which of the layers, consecutive; None for all. The destination's page ids must differ
    from each other. On a GPU the ids must be valid and stay until the copy is done.
    """
    k = device.layers[0][0]
    layers = range(len(device.layers)) if layers is None else layers
    assert layers.step == 1
    assert host.data.dtype == k.dtype and host.data.shape[4:] == k.shape[1:]
    assert device_pages.shape == host_pages.shape
    if k.is_cuda:
        from treadle.kernels.gpu import page_copy

        page_copy.copy_pages(direction, device, host, device_pages, host_pages, layers)
        return
    for layer in layers:
        for kind in (0, 1):
            flat = device.layers[layer][kind]
            cache = flat.view(-1, host.page_size, *flat.shape[1:])
            pool = host.by_layer[kind, layer]
            if direction == "to_host":
                pool[host_pages] = cache[device_pages]
            else:
                cache[device_pages] = pool[host_pages]
