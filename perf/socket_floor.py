"""What it costs to write to many sockets, alone: below this no server of one write a token gets.

A process of its own reads. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import cast

from treadle.http.server import run

EVENT = b"x" * 230  # bytes of an ordinary event with its chunk's frame
ROUNDS = 200
PAUSE_S = 0.003  # the reader catches up, as it does while a step is planned


def measure(streams: int) -> dict[str, float]:
    """Milliseconds of CPU for one write per socket, by way of writing."""
    return run(_measure(streams))


async def _measure(streams: int) -> dict[str, float]:
    transports: list[asyncio.WriteTransport] = []
    arrived = asyncio.Event()

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast(asyncio.WriteTransport, transport))
            if len(transports) == streams:
                arrived.set()

    server = await asyncio.get_running_loop().create_server(Writer, "127.0.0.1", 0, backlog=streams)
    port = server.sockets[0].getsockname()[1]
    reader = subprocess.Popen([sys.executable, __file__, str(port), str(streams)])
    await arrived.wait()
    files = [transport.get_extra_info("socket").fileno() for transport in transports]

    def write_by_hand() -> None:
        for file in files:
            os.write(file, EVENT)

    def write() -> None:
        for transport in transports:
            transport.write(EVENT)

    try:
        return await _rounds({"write system call": write_by_hand, "transport.write": write})
    finally:
        for transport in transports:
            transport.close()
        server.close()
        await asyncio.to_thread(reader.wait)


async def _rounds(ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Median rounds, in turns, with the turn of the loop in which a transport sends its queue."""
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, write_all in ways.items():
            started = time.thread_time()
            write_all()
            await asyncio.sleep(0)
            spent[way].append(time.thread_time() - started)
            await asyncio.sleep(PAUSE_S)
    return {way: median(seconds) * 1e3 for way, seconds in spent.items()}


def _read(port: int, streams: int) -> None:
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(2**16):
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    _read(int(sys.argv[1]), int(sys.argv[2]))
