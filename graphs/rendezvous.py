"""How ranks find each other: addresses, a store, a group for collectives, framed streams.

Knows sockets and torch.distributed; never what a frame says or what a rank runs.
"""

from __future__ import annotations

import concurrent.futures
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

_HEADER: Final = struct.Struct("<IBxxx")  # payload bytes, kind
_COMMANDS_KEY: Final = "treadle/commands"
_SEND_BUFFER: Final = 4 << 20  # bytes asked for; the system grants less
_READ: Final = 1 << 18  # bytes at once
_HELLO_LIMIT: Final = 1 << 12  # bytes that a connection may send before it is known
_STORE_GRACE_S: Final = 3.0  # beyond its own timeout, which torch does not keep to the second
_MOST_CALLERS: Final = 64  # connections that have not said yet who they are


class Kind(IntEnum):
    """What a frame holds."""

    PLAN = 1
    CONNECT = 2  # make the group
    ALLOCATE = 3
    COMMAND = 4
    REPORT = 5  # from a follower, JSON
    HELLO = 6


class Channel:
    """Blocking frames over a stream socket. Any thread may send, one receives."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(True)
        self._stream = stream
        self._frames = Frames()
        self._ready: deque[tuple[Kind, bytearray]] = deque()
        self._lock = threading.Lock()

    def send(self, kind: Kind, payload: bytes) -> None:
        """Raises: OSError when the other side is gone."""
        with self._lock:
            self._stream.sendall(frame(kind, payload))

    def receive(self) -> tuple[Kind, bytearray]:
        """Raises: EOFError when the other side is gone."""
        while not self._ready:
            try:
                data = self._stream.recv(_READ)
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the stream ended")
            self._ready.extend(self._frames.feed(data))
        return self._ready.popleft()


class Frames:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytearray]]:
        self._data += data
        while len(self._data) >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._data)
            end = _HEADER.size + size
            if len(self._data) < end:
                return
            payload = self._data[_HEADER.size : end]
            del self._data[:end]
            yield Kind(kind), payload


def frame(kind: Kind, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), kind) + payload


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a stream on this machine; the second is for a child."""
    ours, theirs = socket.socketpair()
    prepare_stream(ours)
    return ours, theirs


def prepare_stream(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port`, also `tcp://host:port` and `[v6]:port`. Raises: ValueError."""
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is no address; expected host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_store(address: Address, *, is_master: bool, timeout_s: float) -> Store:
    """port 0: any that is free.

    Raises: RuntimeError or TimeoutError when it cannot be opened, or reached in time.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps one
    owns = is_master and not is_shared
    made: concurrent.futures.Future[TCPStore] = concurrent.futures.Future()

    def make() -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            made.set_result(
                TCPStore(address.host, address.port, None, owns, timeout, wait_for_workers=False)
            )
        except Exception as error:
            made.set_exception(error)

    # in a thread: torch waits without end for somebody who takes the connection and is no store
    threading.Thread(target=make, name="treadle-store", daemon=True).start()
    try:
        store = made.result(timeout_s + _STORE_GRACE_S)
    except concurrent.futures.TimeoutError as error:
        raise TimeoutError(f"no store answers at {address} in {timeout_s:g} s") from error
    return PrefixStore(f"treadle/{restarts}", store)


def port_of(store: Store) -> int:
    """Of a store made by `open_store`."""
    assert isinstance(store, PrefixStore)
    inner = store.underlying_store
    assert isinstance(inner, TCPStore)
    return inner.port


def connect_group(
    store: Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> ProcessGroup:
    """The ranks' own group; torch's default group is left to whoever embeds an engine.

    Opens its connections with a first sum. Raises: RuntimeError when not all come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    scoped = PrefixStore("group", store)
    group = ProcessGroup(scoped, rank, size)
    backend: Backend
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(scoped, rank, size, options)
        kind = ProcessGroup.BackendType.NCCL
    else:
        backend = _gloo(scoped, rank, size, timeout)
        kind = ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == size
    return group


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Over the interface that the store is reached by, or the one that GLOO_SOCKET_IFNAME names."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
    options._timeout = timeout
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = [
        ProcessGroupGloo.create_device(interface=interface)
        if interface
        else ProcessGroupGloo.create_device(hostname=_own_host(store))
    ]
    return ProcessGroupGloo(store, rank, size, options)


def _own_host(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    family, kind, protocol, _, address = socket.getaddrinfo(
        store.host, store.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


class Listener:
    """Where ranks that rank 0 has not started itself connect to, with a token from the store.

    It waits for nobody, and can be selected on: `accept` has something to do when it is readable.
    """

    def __init__(self, host: str, store: Store) -> None:
        self._token = secrets.token_hex(16)
        self._socket = socket.create_server((host, 0), family=_family(host))
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._callers: dict[socket.socket, bytearray] = {}  # what each has said, the oldest first
        told = {"host": host, "port": self._socket.getsockname()[1], "token": self._token}
        store.set(_COMMANDS_KEY, json.dumps(told))

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(self) -> list[tuple[int, str, socket.socket]]:
        """Ranks that have come, their devices and streams; closes those who lack the token."""
        came = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._let_in()
            elif (known := self._hear(key.fileobj)) is not None:  # type: ignore[arg-type]
                came.append(known)
        return came

    def close(self) -> None:
        for stream in list(self._callers):
            self._drop(stream)
        self._selector.close()
        self._socket.close()

    def _let_in(self) -> None:
        try:
            stream, _ = self._socket.accept()
        except OSError:  # the caller has left already
            return
        stream.setblocking(False)
        self._callers[stream] = bytearray()
        self._selector.register(stream, selectors.EVENT_READ)
        if len(self._callers) > _MOST_CALLERS:  # a rank says at once who it is
            self._drop(next(iter(self._callers)))

    def _hear(self, stream: socket.socket) -> tuple[int, str, socket.socket] | None:
        if (said := self._callers.get(stream)) is None:
            return None
        try:
            said += stream.recv(_HELLO_LIMIT) or b"\0" * _HELLO_LIMIT  # the end is no hello
            frames = list(Frames().feed(bytes(said)))
            if not frames and len(said) < _HELLO_LIMIT:
                return None
            ((kind, payload),) = frames
            hello = json.loads(payload)
            if kind != Kind.HELLO or not hmac.compare_digest(str(hello["token"]), self._token):
                raise ValueError("not a rank of this engine")
            known = int(hello["rank"]), str(hello["device"])
            prepare_stream(stream)
        except Exception:  # whatever a stranger may send
            self._drop(stream)
            return None
        self._selector.unregister(stream)
        del self._callers[stream]
        return *known, stream

    def _drop(self, stream: socket.socket) -> None:
        self._selector.unregister(stream)
        del self._callers[stream]
        stream.close()


def connect_to_leader(store: Store, rank: int, device: str, timeout_s: float) -> socket.socket:
    """Raises: RuntimeError or OSError when rank 0 does not answer in time."""
    store.wait([_COMMANDS_KEY], timedelta(seconds=timeout_s))
    told = json.loads(store.get(_COMMANDS_KEY))
    stream = socket.create_connection((told["host"], told["port"]), timeout_s)
    prepare_stream(stream)
    hello = {"token": told["token"], "rank": rank, "device": device}
    stream.sendall(frame(Kind.HELLO, json.dumps(hello).encode()))
    return stream


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]
