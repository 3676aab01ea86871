"""Renders a chat into a prompt with the model's own Jinja template. Knows no tokenizer.

Output equals transformers' `apply_chat_template`; the environment follows its documentation
("Chat templates", advanced): trimmed blocks, loop controls, raise_exception, strftime_now, tojson.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.engine.errors import InvalidRequest, ModelError

PART_SEPARATOR = "\n"  # as vLLM and LMDeploy have it; SGLang has a space

# Ends the message that is to be continued; the trailing space tells whether the template trims.
_OPEN_END = "\ue0f1continue\ue0f2 "
_PROBE = "\ue0f1probe\ue0f2"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them pass."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One compiled template.

    source: its Jinja text.
    special_tokens: what `bos_token`, `eos_token` … stand for inside.
    origin: where it came from, for messages.
    Raises: ModelError when it does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template of {origin} does not compile: line {error.lineno}: {error}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._takes_strings, self._takes_parts = self._probe()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included.

        Content may be a string, a list of text parts or None. It is given in the form the template
        takes: parts are joined with PART_SEPARATOR where it takes strings only, a string is wrapped
        where it takes parts only. With `continue_final_message` the last message stays open.
        Raises: InvalidRequest with the template's own message when the template refuses.
        """
        kwargs = dict(template_kwargs or {})
        if reserved := _RESERVED & kwargs.keys():
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}",
                "chat_template_kwargs",
            )
        if not messages:
            raise InvalidRequest("messages must hold at least one message", "messages")
        prepared = [self._prepare(message, i) for i, message in enumerate(messages)]
        open_text = _leave_open(prepared[-1]) if continue_final_message else None
        if open_text is not None and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        try:
            given = {
                "messages": prepared,
                "tools": [dict(tool) for tool in tools] if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
            text = self._render({**given, **kwargs})
        except Exception as error:  # a template is a program: whatever it raises is about its input
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refused: {reason}", "messages") from error
        return text if open_text is None else _cut_open(text, open_text)

    def _render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({"documents": None, **self._special_tokens, **variables})

    def _probe(self) -> tuple[bool, bool]:
        """Whether a string and a list of parts, given as content, come out as their text."""

        def render(content: object) -> str:
            message = {"role": "user", "content": content}
            try:
                return self._render(
                    {"messages": [message], "tools": None, "add_generation_prompt": False}
                )
            except Exception:  # refused: it does not take this form
                return ""

        plain = render(_PROBE)
        parts = render([{"type": "text", "text": _PROBE}])
        is_printed_raw = any(quoted in parts for quoted in (f"'{_PROBE}'", f'"{_PROBE}"'))
        return _PROBE in plain, _PROBE in parts and not is_printed_raw

    def _prepare(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A copy as templates expect it: no None, content in the form taken, arguments parsed."""
        prepared = {key: value for key, value in message.items() if value is not None}
        content = prepared.get("content", "")
        if isinstance(content, str):
            if self._takes_parts and not self._takes_strings:
                content = [{"type": "text", "text": content}]
        elif self._takes_parts:
            content = [dict(part) for part in content]
        else:
            where = f"messages[{index}].content"
            content = PART_SEPARATOR.join(_text_of(part, where) for part in content)
        prepared["content"] = content
        if "tool_calls" in prepared:
            prepared["tool_calls"] = [_parse_arguments(call) for call in prepared["tool_calls"]]
        return prepared


def select_template(templates: Mapping[str, ChatTemplate], has_tools: bool) -> ChatTemplate:
    """The template for a request: `tool_use` with tools, else `default`, else the only one.

    Raises: InvalidRequest when there is none.
    """
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    if templates:
        names = ", ".join(sorted(templates))
        raise InvalidRequest(f"this model has no default chat template, only: {names}", "messages")
    raise InvalidRequest(
        "this model has no chat template; use /v1/completions or /generate", "messages"
    )


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(f"{where} must hold text parts only: this model reads text", where)


def _parse_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI sends them as a string of JSON."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # the template gets them as they are
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _leave_open(message: dict[str, Any]) -> str:
    """Marks the end of the message's text, in place, and returns that text."""
    if message.get("role") != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of role assistant",
            "continue_final_message",
        )
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _OPEN_END
        return content
    for part in reversed(content):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _OPEN_END
            return text
    raise InvalidRequest(
        "continue_final_message needs text in the last message", "continue_final_message"
    )


def _cut_open(rendered: str, open_text: str) -> str:
    """The prompt up to the mark."""
    end = rendered.rfind(_OPEN_END.rstrip())
    if end < 0 or open_text.strip() not in rendered:
        raise InvalidRequest(
            "continue_final_message: this model's chat template changes or drops the last message",
            "continue_final_message",
        )
    is_trimmed = not rendered.startswith(_OPEN_END, end)
    return rendered[:end].rstrip() if is_trimmed else rendered[:end]
