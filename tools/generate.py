"""`treadle generate`: answers prompts on the command line and leaves.

Knows the engine's public API only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from treadle.engine import Completion, Engine, InvalidRequest, SamplingParams
from treadle.engine.interpreter import own_interpreter


def generate(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    """Prints one answer per prompt, in order; 1 when one of them could not be answered."""
    prompts = options.prompt
    if prompts is None:
        if sys.stdin.isatty():
            print("Prompts, one a line; end with Ctrl-D:", file=sys.stderr)
        prompts = [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise InvalidRequest("no prompt: give --prompt, or lines on standard input")
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    own_interpreter()
    return asyncio.run(_answer(prompts, params, options.chat, flags))


async def _answer(
    prompts: list[str], params: SamplingParams, is_chat: bool, flags: Mapping[str, Any]
) -> int:
    async with await Engine.create(**flags) as engine:
        running = [asyncio.create_task(_one(engine, prompt, params, is_chat)) for prompt in prompts]
        failures = 0
        for prompt, task in zip(prompts, running, strict=True):
            try:
                print((await task).text, flush=True)
            except InvalidRequest as error:
                failures += 1
                print(f"treadle: prompt {prompt[:40]!r}: {error}", file=sys.stderr)
                print(flush=True)
    return 1 if failures else 0


async def _one(engine: Engine, prompt: str, params: SamplingParams, is_chat: bool) -> Completion:
    if is_chat:
        text = await engine.render_chat([{"role": "user", "content": prompt}])
        ids = (await engine.encode([text], add_special_tokens=False))[0]
        answer: Completion = await engine.generate(ids, params)
    else:
        answer = await engine.generate(prompt, params)
    return answer
