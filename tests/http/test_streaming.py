"""Streams on real sockets: who hangs up, reads slowly, speaks HTTP/1.0 or keeps the line open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, FakeEngine, reply_text

from treadle.engine.output import RequestOutput
from treadle.http.sse import MAX_BUFFERED_BYTES
from treadle.http.wire import native_answers, openai_answers

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "u"}], "ignore_eos": True},
    TEXT: {"prompt": "p", "max_tokens": 4000, "ignore_eos": True},
    NATIVE: {"text": "p", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
}
paths = pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])


def raw_request(path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def idle(engine: FakeEngine) -> None:
    """Within the second that a dropped connection may take."""
    await until(lambda: engine.num_running == 0, 1.0)


@paths
async def test_stream_that_is_dropped_is_aborted(served: Served, path: str) -> None:
    async with served.session.post(served.url + path, json={**BASE[path], "stream": True}) as r:
        await r.content.readany()
        served.engine.gate.clear()
        r.close()
    await idle(served.engine)
    assert served.engine.aborted == [served.engine.submitted[0].request_id]


@paths
async def test_answer_nobody_waits_for_is_aborted(served: Served, path: str) -> None:
    served.engine.gate.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw_request(path, BASE[path]))
    await until(lambda: served.engine.num_running)
    writer.close()
    await idle(served.engine)
    assert len(served.engine.aborted) == 1


@paths
async def test_call_dropped_while_encoding_never_starts(served: Served, path: str) -> None:
    served.engine.encode_gate.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw_request(path, BASE[path]))
    await until(lambda: served.engine.num_encoding)
    writer.close()
    await asyncio.wait_for(served.state.wait_idle(), 1.0)
    served.engine.encode_gate.set()
    await asyncio.sleep(0.01)
    assert served.engine.submitted == []


@paths
@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_is_never_aborted(served: Served, path: str, stream: bool) -> None:
    body = {**BASE[path], "stream": stream, "ignore_eos": False, "n": 1, "sampling_params": {}}
    async with served.session.post(served.url + path, json=body) as response:
        assert response.status == 200
        await response.read()
    await idle(served.engine)
    assert served.engine.aborted == []


async def test_many_dropped_streams_leave_nothing(served: Served) -> None:
    async def drop() -> None:
        body = {**BASE[TEXT], "stream": True, "n": random.randrange(1, 4)}
        async with served.session.post(served.url + TEXT, json=body) as response:
            for _ in range(random.randrange(3)):
                await response.content.readany()
            response.close()

    await asyncio.gather(*(drop() for _ in range(60)))
    await idle(served.engine)
    assert (await served.post(TEXT, {"prompt": "p"}))[0] == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/health"])
async def test_connection_is_reused_after_a_stream(served: Served, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    body = {"messages": BASE[CHAT]["messages"], "prompt": "p", "text": "p", "stream": True}
    for _ in range(3):
        writer.write(raw_request(CHAT, body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"chunked" in head
        assert (await read_chunks(reader)).endswith(b"data: [DONE]\n\n")
        is_get = path == "/health"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() if is_get
                     else raw_request(path, {**body, "stream": False}))  # fmt: skip
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def test_pipelined_streams_answer_in_order(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    texts = ["abc", "de", "fghi"]
    writer.write(b"".join(raw_request(TEXT, {"prompt": t, "stream": True}) for t in texts))
    for text in texts:
        await reader.readuntil(b"\r\n\r\n")
        events = (await read_chunks(reader)).decode().split("\n\n")[:-2]
        choices = [json.loads(event[6:])["choices"][0] for event in events]
        assert "".join(c["text"] for c in choices) == reply_text([BOS, *text.encode()])
    writer.close()


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


@paths
async def test_old_http_gets_the_events_and_a_close(served: Served, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    body = {"messages": BASE[CHAT]["messages"], "prompt": "p", "text": "p", "stream": True}
    writer.write(raw_request(path, body, "1.0"))
    head, _, events = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")
    writer.close()


async def test_each_token_leaves_at_once(served: Served) -> None:
    body = {"prompt": "p", "max_tokens": 3, "ignore_eos": True, "stream": True}
    served.engine.gate.clear()
    async with served.session.post(served.url + TEXT, json=body) as response:
        assert response.status == 200, "headers come before the first token"
        served.engine.gate.set()
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 1)
        assert first.startswith(b"data: {")
        await response.read()


async def test_slow_reader_gets_everything_in_few_events(served: Served) -> None:
    """The server holds a bounded number of bytes, and joins what it could not send."""
    length = 3900
    body = {"input_ids": [97], "stream": True,
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True}}  # fmt: skip
    answer = (await served.post(NATIVE, {**body, "stream": False}))[1]
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=slow, limit=2**12)
    writer.write(raw_request(NATIVE, body))
    await until(lambda: len(served.engine.submitted) == 2)
    await until(lambda: served.engine.num_running == 0, 20)
    await reader.readuntil(b"\r\n\r\n")
    events = (await read_chunks(reader)).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) < length, "deltas were joined while the client slept"
    last = json.loads(events[-3][6:])
    assert last["text"] == answer["text"]
    assert last["output_ids"] == answer["output_ids"]
    writer.close()


async def test_slow_reader_of_deltas_misses_nothing(served: Served) -> None:
    prompts = [[97 + i] for i in range(40)]
    body = {"prompt": prompts, "max_tokens": 400, "ignore_eos": True}
    answer = (await served.post(TEXT, body))[1]
    texts = [""] * len(prompts)
    async with served.session.post(served.url + TEXT, json={**body, "stream": True}) as response:
        await until(lambda: served.engine.num_running == 0, 20)
        raw = (await response.read()).decode()
    assert len(raw) > 2 * MAX_BUFFERED_BYTES
    for event in raw.split("\n\n")[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


async def test_dropped_slow_reader_is_aborted(served: Served) -> None:
    body = {**BASE[TEXT], "prompt": [[97]] * 60, "stream": True}
    _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=2**12)
    writer.write(raw_request(TEXT, body))
    await until(lambda: served.engine.num_running == 60)
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await idle(served.engine)
    assert (await served.post(TEXT, {"prompt": "p"}))[0] == 200


@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_stream_ends_after_an_exception_while_writing(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_later(self: Any, choice: int, delta: RequestOutput) -> bytes:
        if delta.completion_tokens == 3:
            raise RuntimeError("broken formatter")
        return b"data: {}\n\n"

    monkeypatch.setattr(openai_answers.ChatAnswers, "events", break_later)
    monkeypatch.setattr(native_answers.NativeAnswers, "events", break_later)
    events = await served.events(path, BASE[path])
    assert events[:-1] == [{}, {}]
    assert events[-1]["error"]["type"] == "server_error"
    assert "broken" not in events[-1]["error"]["message"]
    assert "broken formatter" in caplog.text
    await idle(served.engine)


async def test_exception_before_anything_is_sent_is_500(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.engine, "submit", broken)
    for stream in (False, True):
        status, answer = await served.post(CHAT, {**BASE[CHAT], "stream": stream})
        assert status == 500
        assert answer["error"]["type"] == "server_error"
        assert "secret" not in answer["error"]["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n",
     b"GET / HTTP/1.1\r\nBad Header\r\n\r\n",
     b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n"],
    ids=range(5),
)  # fmt: skip
async def test_what_is_no_http_gets_json_too(served: Served, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(garbage)
    with contextlib.suppress(ConnectionError):
        raw = await asyncio.wait_for(reader.read(), 5)
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b" 400 " in head.split(b"\r\n")[0]
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    writer.close()
    assert (await served.post(TEXT, {"prompt": "p"}))[0] == 200


async def test_headers_of_a_stream_forbid_buffering(serve: Serve) -> None:
    served = await serve()
    body = {"prompt": "p", "stream": True}
    async with served.session.post(served.url + TEXT, json=body) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        await response.read()
