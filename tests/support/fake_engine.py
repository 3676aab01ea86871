"""Engines that run on a fake executor, for tests of everything above the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.graphs.fake import EMPTY, FakeExecutor, TokenFunction, default_token, extend_hash
from treadle.graphs.step import Capacity, KvGroup

VOCAB = 300
EOS = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, the rest mean nothing."""

    vocab_size = 257
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})
    has_chat_template = True

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def capacity(
    *groups: KvGroup, slots: int = 16, max_model_len: int = 512, vocab_size: int = VOCAB
) -> Capacity:
    return Capacity(groups or (KvGroup("full", 4, 1024, 64),), slots, max_model_len, vocab_size)


def expected_tokens(
    prompt: Sequence[int], count: int, token_function: TokenFunction = default_token
) -> list[int]:
    """What a fake executor generates after a prompt, computed without pages or steps."""
    prefix, length = EMPTY, 0
    for token in prompt:
        prefix, length = extend_hash(prefix, token), length + 1
    tokens = []
    for _ in range(count):
        tokens.append(token_function(prefix, length, VOCAB))
        prefix, length = extend_hash(prefix, tokens[-1]), length + 1
    return tokens


def make_parts(executor: FakeExecutor, **flags: Any) -> Parts:
    config = EngineConfig.from_flags(flags)
    info = EngineInfo(
        served_model_name="fake",
        model_path="fake",
        tokenizer_path="fake",
        architectures=("Fake",),
        model_type="fake",
        max_model_len=executor.capacity.max_model_len,
        vocab_size=executor.capacity.vocab_size,
        created=1,
        version="0",
        server_args={"device": "cpu"},
    )
    return Parts(
        executor,
        ByteTokenizer(),
        info,
        config.schedule.max_running_requests or 256,
        config.schedule.chunked_prefill_size or 512,
        config,
    )
