"""How much memory a device has, and how much of it is free to us.

Knows devices and control groups; never a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from treadle.graphs.device import Device

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # version 1 writes a huge number where there is no limit

# limit, use and, within it, what the kernel gives back under pressure: versions 2 and 1
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one memory."""

    capacity: int
    free: int


def room(device: Device, cgroups: Path = CGROUPS) -> Room:
    """What the device has, or what a container leaves of it."""
    if not device.is_host:
        return Room(
            int(torch.cuda.mem_get_info(device.torch_device)[1]),
            device.free_bytes(),
        )
    whole = Room(int(psutil.virtual_memory().total), device.free_bytes())
    limit = container_room(cgroups)
    if limit is None or limit.capacity >= whole.capacity:
        return whole
    return Room(limit.capacity, min(limit.free, whole.free))


def container_room(cgroups: Path) -> Room | None:
    """The limit of the container that this process sees as its root, if there is one."""
    for limit_file, use_file, stat_file, reclaimable in _FILES:
        try:
            limit = int((cgroups / limit_file).read_text())
            used = int((cgroups / use_file).read_text())
            stat = (cgroups / stat_file).read_text()
        except (OSError, ValueError):  # no such version, or "max"
            continue
        if limit >= _UNLIMITED:
            continue
        counts = dict(line.split() for line in stat.splitlines())
        return Room(limit, max(0, limit - used + int(counts.get(reclaimable, 0))))
    return None
