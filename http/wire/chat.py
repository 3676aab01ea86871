"""The body of `/v1/chat/completions`. Knows no template and no engine.

What a message says goes on in the form that the client chose: the chat template turns it into the
form that it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.http.wire.base import FastList, Ids, Rid, Unbuilt, Wire, between
from treadle.http.wire.common import CommonFields

MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MESSAGES_BATCH = 256  # checked before other work gets a turn: about 1 ms

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Part(Wire):
    type: Literal[
        "text", "refusal", "thinking", "image_url", "input_audio", "audio_url", "video_url", "file"
    ]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    def to_template(self, where: str) -> dict[str, Any] | None:
        """A text part; None for thoughts, which no prompt repeats.

        Raises: InvalidRequest, NotBuilt.
        """
        if self.type not in ("text", "refusal", "thinking"):
            raise NotBuilt(where, f"a part of type {self.type!r}; this model reads text only")
        text: str | None = getattr(self, self.type)
        if text is None:
            raise InvalidRequest(f"{where}.{self.type} is required", f"{where}.{self.type}")
        return None if self.type == "thinking" else {"type": "text", "text": text}


class CalledFunction(Wire):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Wire):
    role: Role
    content: str | FastList[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: FastList[ToolCall] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Unbuilt[dict[str, Any]] = None

    def to_template(self, where: str) -> dict[str, Any]:
        """The message as a chat template reads it.

        Raises: InvalidRequest, NotBuilt.
        """
        # most templates know no developer role, some drop unknown roles without a word
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._content(f"{where}.content")}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.function_call is not None:
            message["function_call"] = self.function_call.model_dump()
        return message

    def _content(self, where: str) -> str | list[dict[str, Any]]:
        if isinstance(self.content, str):
            return self.content
        if self.content:
            parts = (part.to_template(f"{where}[{i}]") for i, part in enumerate(self.content))
            return [part for part in parts if part is not None]
        if self.content is None and self.role == "assistant":
            return self.refusal or ""
        raise InvalidRequest(f"{where} must be a string or a non-empty list of parts", where)


class Function(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(CommonFields):
    messages: list[Any]  # `read_messages` checks them, a few at a time
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    rid: Rid | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    # without a reasoning parser, tools or audio output these change nothing
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    parallel_tool_calls: bool = True
    prediction: dict[str, Any] | None = None

    tools: Unbuilt[FastList[Tool]] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: Unbuilt[FastList[Function]] = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    logprobs: Unbuilt[bool] = None
    top_logprobs: Annotated[int, between(0, MAX_TOP_LOGPROBS)] = 0
    modalities: FastList[Literal["text", "audio"]] | None = None
    audio: Unbuilt[dict[str, Any]] = None
    web_search_options: Unbuilt[dict[str, Any]] = None
    reasoning_effort: Unbuilt[Effort] = None
    reasoning: Unbuilt[dict[str, Any]] = None
    thinking: Unbuilt[bool | dict[str, Any]] = None
    verbosity: Literal["low", "medium", "high"] = "medium"
    input_ids: Unbuilt[Ids] = None
    return_prompt_token_ids: Unbuilt[bool] = None
    return_meta_info: Unbuilt[bool] = None
    moderation: Unbuilt[dict[str, Any]] = None

    def check(self) -> None:
        """What no single field can tell.

        Raises: InvalidRequest, NotBuilt.
        """
        self.check_common()
        if not self.messages:
            raise InvalidRequest("messages must hold at least one message", "messages")
        if self.length is not None and self.length < 1:
            name = self.client_name("max_new_tokens")
            raise InvalidRequest(f"{name} must be at least 1, got {self.length}", name)
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                tools = "tools" if name == "tool_choice" else "functions"
                raise InvalidRequest(f"{name} asks for a call, but {tools} names none", name)
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.modalities is not None and "audio" in self.modalities:
            raise NotBuilt("modalities", "this model writes text only")
        if self.verbosity != "medium":
            raise NotBuilt("verbosity", "medium is the only one")

    @property
    def length(self) -> int | None:
        """Tokens to generate at most; None: the rest of the context."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def client_name(self, name: str) -> str:
        if name == "prompt":
            return "messages"
        if name == "max_new_tokens":
            return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().client_name(name)


async def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat as its template reads them.

    Raises: InvalidRequest, NotBuilt.
    """
    read = []
    for index, message in enumerate(messages):
        read.append(Message.parse(message, ("messages", index)).to_template(f"messages[{index}]"))
        if index % MESSAGES_BATCH == MESSAGES_BATCH - 1:
            await asyncio.sleep(0)
    return read
