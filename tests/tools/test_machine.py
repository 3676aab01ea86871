from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from treadle.graphs.device import HostDevice
from treadle.tools.machine import Room, container_room, room


def version_2(root: Path, limit: str, used: int, reclaimable: int) -> Path:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {reclaimable}\n")
    return root


def version_1(root: Path, limit: int, used: int, reclaimable: int) -> Path:
    folder = root / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {reclaimable}\n")
    return root


@pytest.mark.parametrize("version", [version_1, version_2])
def test_container_room_is_the_limit_less_what_cannot_be_given_back(
    tmp_path: Path, version: type
) -> None:
    root = version(tmp_path, 1000, 700, 150)
    assert container_room(root) == Room(1000, 450)


def test_no_limit_is_no_container(tmp_path: Path) -> None:
    assert container_room(tmp_path) is None
    assert container_room(version_2(tmp_path, "max", 700, 0)) is None
    assert container_room(version_1(tmp_path, 9223372036854771712, 700, 0)) is None


def test_overdrawn_container_has_nothing_free(tmp_path: Path) -> None:
    assert container_room(version_2(tmp_path, "1000", 1200, 50)) == Room(1000, 0)


def test_host_room_is_the_container_where_that_is_smaller(tmp_path: Path) -> None:
    megabyte = 2**20
    root = version_2(tmp_path, str(100 * megabyte), 40 * megabyte, 10 * megabyte)
    assert room(HostDevice(), root) == Room(100 * megabyte, 70 * megabyte)


def test_host_room_is_the_machine_where_a_limit_is_larger(tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    root = version_2(tmp_path, str(memory.total + 1), 0, 0)
    found = room(HostDevice(), root)
    assert found.capacity == memory.total and 0 < found.free <= memory.total
