"""Chat templates render as transformers renders them, and refuse as requests, not as crashes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from treadle.engine.chat_template import PART_SEPARATOR, ChatTemplate, select_template
from treadle.engine.errors import InvalidRequest, ModelError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

HEADERS = """{{ bos_token }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set today = date_string if date_string is defined else 'unknown' %}
{{- 'Today: ' + today + '\\n' }}
{% for message in messages %}
<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}<|eot_id|>
    {% if message.tool_calls %}{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

ALTERNATING = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user and assistant') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' + message['content'] + ' [/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {%- continue -%}
    {%- endif -%}
{%- endfor -%}"""

PARTS = """{% for message in messages %}{{ message.role | upper }}:
{%- for part in message['content'] %}
    {%- if part['type'] == 'text' %}{{ ' ' + part['text'] }}{% endif %}
    {%- if part['type'] == 'stop' %}{% break %}{% endif %}
{%- endfor %}
{{ eos_token }}
{% endfor %}"""

EITHER = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING, "parts": PARTS}

USER = {"role": "user", "content": '  What is <1> & "2"? é\n'}
ASSISTANT = {"role": "assistant", "content": "Numbers, I suppose "}
SYSTEM = {"role": "system", "content": "Answer."}

Reference = Callable[..., str]


def make(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, "test")


@pytest.fixture(scope="module")
def reference() -> Reference:
    """transformers' own rendering of a template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocab={"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)

    def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        text = tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options
        )
        assert isinstance(text, str)
        return text

    return render


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages", [[USER], [USER, ASSISTANT, USER], [USER, ASSISTANT]], ids=["one", "three", "two"]
)
def test_rendering_equals_transformers(
    reference: Reference, name: str, add_generation_prompt: bool, messages: list[dict[str, Any]]
) -> None:
    expected = reference(
        TEMPLATES[name],
        in_parts(messages) if name == "parts" else messages,
        add_generation_prompt=add_generation_prompt,
    )
    template = make(TEMPLATES[name])
    for form in (messages, in_parts(messages)):
        found = template.render(form, add_generation_prompt=add_generation_prompt)
        assert found == expected
    assert expected.count("suppose") == len(messages) // 2


def test_tools_kwargs_and_defaults_equal_transformers(reference: Reference) -> None:
    tools = [{"type": "function", "function": {"name": "über", "z": 1, "a": [True, None]}}]
    kwargs = {"date_string": "1 May"}
    expected = reference(HEADERS, [SYSTEM, USER], tools=tools, add_generation_prompt=True, **kwargs)
    found = make(HEADERS).render(
        [SYSTEM, USER], tools=tools, add_generation_prompt=True, template_kwargs=kwargs
    )
    assert found == expected
    assert '"name": "über"' in found and found.index('"z"') < found.index('"a"')


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["Numbers, I", "Numbers, I ", "", "a<|im_end|>b", "  x\n"])
def test_open_final_message_equals_transformers(
    reference: Reference, name: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = reference(
        TEMPLATES[name],
        in_parts(messages) if name == "parts" else messages,
        continue_final_message=True,
    )
    found = make(TEMPLATES[name]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert found == expected
    assert found.rstrip().endswith(content.strip())


def test_open_final_message_leaves_the_callers_messages_alone() -> None:
    messages = in_parts([USER, ASSISTANT])
    before = json.dumps(messages)
    for source in (PARTS, CHATML):
        make(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("source", "messages", "pattern"),
    [
        (CHATML, [USER], "role assistant"),
        (CHATML, [], "at least one message"),
        (CHATML.replace("message.content", "'gone'"), [USER, ASSISTANT], "changes or drops"),
        (CHATML.replace("message.content", "message.content[:3]"), [USER, ASSISTANT], "or drops"),
    ],
    ids=["user-last", "empty", "dropped", "cut"],
)
def test_final_message_that_cannot_stay_open_is_refused(
    source: str, messages: list[dict[str, Any]], pattern: str
) -> None:
    with pytest.raises(InvalidRequest, match=pattern):
        make(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_open_final_message_excludes_a_generation_prompt() -> None:
    with pytest.raises(InvalidRequest, match="exclude") as caught:
        make(CHATML).render(
            [USER, ASSISTANT], add_generation_prompt=True, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "messages", "pattern"),
    [
        (ALTERNATING, [USER, USER], "Roles must alternate user and assistant"),
        (CHATML, [{"content": "no role"}], "role"),
        ("{{ messages[0].nothing.at_all }}", [USER], "nothing"),
        ("{{ messages[0].content + 1 }}", [USER], "concatenate|str"),
        ("{{ 1 // 0 }}", [USER], "zero"),
        ("{{ messages[0].content.__class__.mro() }}", [USER], "unsafe"),
        ("{{ messages.append(1) }}", [USER], "append"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [USER], "recursion"),
    ],
)
def test_refusal_of_the_template_is_a_bad_request(
    source: str, messages: list[dict[str, Any]], pattern: str
) -> None:
    with pytest.raises(InvalidRequest, match=pattern) as caught:
        make(source).render(messages, add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_content_goes_in_the_form_that_the_template_takes() -> None:
    two = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}]
    assert "user\none\ntwo<|im_end|>" in make(CHATML).render(two, add_generation_prompt=False)
    assert "USER: one two</s>" in make(PARTS).render(two, add_generation_prompt=False)
    assert make(EITHER).render(two, add_generation_prompt=False) == "user: onetwo;"
    assert make(EITHER).render([SYSTEM], add_generation_prompt=False) == "system: Answer.;"
    shown = make("{{ messages[0].content | tojson }}")
    assert shown.render(two, add_generation_prompt=False) == '"one\\ntwo"'


@pytest.mark.parametrize("name", ["chatml", "headers", "alternating"])
def test_parts_equal_the_string_that_the_separator_makes_of_them(name: str) -> None:
    texts = [random.choice(["", " a", "b\n", "é {{ c }}"]) for _ in range(random.randrange(1, 6))]
    parts = [{"type": "text", "text": text} for text in texts]
    found = [
        make(TEMPLATES[name]).render([{**USER, "content": content}], add_generation_prompt=True)
        for content in (parts, PART_SEPARATOR.join(texts))
    ]
    assert found[0] == found[1]


def test_part_that_is_no_text_is_refused() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequest, match="text parts") as caught:
        make(CHATML).render(image, add_generation_prompt=True)
    assert caught.value.param == "messages[0].content"


def test_null_content_is_empty_and_null_fields_are_absent() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    source = "{{ messages[0].content }}|{{ 'name' in messages[0] }}|{{ messages[0] | length }}"
    assert make(source).render([message], add_generation_prompt=False) == "|False|2"


def test_tool_call_arguments_reach_the_template_as_an_object() -> None:
    def chat(arguments: object) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]

    template = make("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    assert template.render(chat('{"b": 1, "a": "é"}'), add_generation_prompt=False) == (
        '{"b": 1, "a": "é"}'
    )
    assert template.render(chat({"x": 2}), add_generation_prompt=False) == '{"x": 2}'
    for broken in ("{not json", "[" * 100_000):
        assert template.render(chat(broken), add_generation_prompt=False) == f'"{broken}"'


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_kwargs_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        make(CHATML).render([USER], add_generation_prompt=True, template_kwargs={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_kwargs_may_replace_special_tokens_as_in_transformers(reference: Reference) -> None:
    expected = reference(ALTERNATING, [USER], bos_token="<other>")
    found = make(ALTERNATING).render(
        [USER], add_generation_prompt=False, template_kwargs={"bos_token": "<other>"}
    )
    assert found == expected and found.startswith("<other>")


def test_strftime_now_gives_the_date() -> None:
    year = make("{{ strftime_now('%Y-%m') }}").render([USER], add_generation_prompt=False)
    assert re.fullmatch(r"20\d\d-[01]\d", year)


def test_template_that_does_not_compile_names_the_line_and_the_model() -> None:
    with pytest.raises(ModelError, match=r"some/model does not compile: line 2"):
        ChatTemplate("fine\n{% if %}", {}, "some/model")


def test_template_is_chosen_by_name_and_tools() -> None:
    default, tool_use, other = make("d"), make("t"), make("o")
    both = {"default": default, "tool_use": tool_use, "rag": other}
    assert select_template(both, has_tools=False) is default
    assert select_template(both, has_tools=True) is tool_use
    assert select_template({"default": default}, has_tools=True) is default
    assert select_template({"rag": other}, has_tools=False) is other
    with pytest.raises(InvalidRequest, match="only: rag, tool_use"):
        select_template({"rag": other, "tool_use": tool_use}, has_tools=False)
    with pytest.raises(InvalidRequest, match="no chat template"):
        select_template({}, has_tools=False)
