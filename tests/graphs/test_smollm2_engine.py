"""The whole engine on the embedded checkpoint against transformers' own tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.engine import Engine, SamplingParams

pytestmark = pytest.mark.model

COUNT = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "List three reasons why the sky is blue:\n1.",
]
GREEDY = SamplingParams(max_new_tokens=COUNT, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(smollm2_reference: Any, smollm2_gguf: Path) -> dict[str, list[int]]:
    """Greedy tokens by transformers, by prompt; prompts are tokenized by this project."""
    from treadle.tools.tokenizer_source import load_tokenizer

    tokenizer = load_tokenizer(smollm2_gguf)
    smollm2_reference.generation_config.eos_token_id = None  # go on, as `ignore_eos` does
    found = {}
    for prompt, ids in zip(PROMPTS, tokenizer.encode(PROMPTS, True), strict=True):
        inputs = torch.tensor([ids])
        out = smollm2_reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=COUNT,
        )
        found[prompt] = out[0, len(ids) :].tolist()
    return found


def margin(model: Any, ids: list[int], place: int) -> float:
    """How far the reference's two likeliest tokens are apart at a place, over its logit range."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:place]])).logits[0, -1]
    top = logits.topk(2).values
    return float((top[0] - top[1]) / (logits.max() - logits.min()))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [
        (1, 512),
        (16, 17),
        pytest.param(1, 7, marks=SLOW),
        pytest.param(16, 512, marks=SLOW),
        pytest.param(1, 1, marks=SLOW),
        pytest.param(16, 3, marks=SLOW),
    ],
)
async def test_greedy_tokens_equal_transformers_cold_and_among_neighbours(
    smollm2_gguf: Path,
    smollm2_reference: Any,
    reference: dict[str, list[int]],
    page_size: int,
    chunk: int,
) -> None:
    flags: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk}
    rng = random.Random(page_size * 1000 + chunk)
    ties = 0
    async with await Engine.create(
        model_path=str(smollm2_gguf), dtype="float32", context_length=2048, **flags
    ) as engine:
        cold = [await engine.generate(prompt, GREEDY) for prompt in PROMPTS[:2]]
        neighbours: list[str | list[int]] = [
            [rng.randrange(1000, 40000) for _ in range(rng.randint(1, 90))] for _ in range(12)
        ]
        batch: list[str | list[int]] = [*PROMPTS, *neighbours]
        order = rng.sample(range(16), 16)
        answers = await engine.generate([batch[i] for i in order], GREEDY)
        together = {batch[i]: a for i, a in zip(order, answers, strict=True) if i < len(PROMPTS)}
        for prompt, answer in [*zip(PROMPTS, cold, strict=False), *together.items()]:
            expected = reference[str(prompt)]
            if answer.token_ids != expected:
                place = next(i for i in range(COUNT) if answer.token_ids[i] != expected[i])
                ids = (await engine.encode([str(prompt)]))[0] + expected
                assert margin(smollm2_reference, ids, len(ids) - COUNT + place) < 1e-4
                ties += 1
    print(f"ties: {ties}")
    assert ties <= 1
