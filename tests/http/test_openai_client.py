"""The official client, blocking and asynchronous, streaming and not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, EOS, MODEL, reply, reply_text

if TYPE_CHECKING:
    from tests.http.conftest import Served

MESSAGES: list[Any] = [{"role": "user", "content": "héllo"}]
CHAT_IDS = [BOS, *"user:héllo|assistant:".encode()]
TEXT_IDS = [BOS, *b"abc"]


async def test_async_client_chats(served: Served) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == reply_text(CHAT_IDS)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(reply(CHAT_IDS, 0))
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, n=2,
            stream_options={"include_usage": True},
        )  # fmt: skip
        texts, usage = ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [reply_text(CHAT_IDS, i) for i in range(2)]
        assert usage is not None
        assert usage.prompt_tokens == len(CHAT_IDS)


async def test_blocking_client_completes(served: Served) -> None:
    openai = pytest.importorskip("openai")

    def use() -> None:
        with openai.OpenAI(base_url=served.url + "/v1", api_key="x") as client:
            answer = client.completions.create(model=MODEL, prompt="abc")
            assert answer.choices[0].text == reply_text(TEXT_IDS)
            assert answer.choices[0].matched_stop == EOS
            stream = client.completions.create(model=MODEL, prompt=["abc", "de"], stream=True)
            texts = ["", ""]
            for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [reply_text([BOS, *text]) for text in (b"abc", b"de")]
            chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
            assert chat.choices[0].message.content == reply_text(CHAT_IDS, limit=2)
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL

    await asyncio.to_thread(use)


async def test_errors_have_their_classes(served: Served) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"


async def test_leaving_a_stream_early_aborts_it(served: Served) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x") as client:
        stream = await client.completions.create(
            model=MODEL, prompt="abc", stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(1):
        while served.engine.num_running:
            await asyncio.sleep(0.005)
    assert len(served.engine.aborted) == 1
