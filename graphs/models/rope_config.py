"""Hugging Face rope settings -> RopeSpec, from the current and the older config keys.

Knows no model: every architecture spells its rotary embedding the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.spec import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_DEFAULT_THETA = 10_000.0


def rope_spec(config: HfConfig, head_dim: int, max_position: int) -> RopeSpec:
    """Reads `rope_parameters`, or `rope_scaling` with `rope_theta` beside it.

    max_position: the config's max_position_embeddings, in tokens.
    Raises: ValueError naming the key.
    """
    rope = config.section("rope_scaling") or config.section("rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type {kind!r} is not supported; known: {', '.join(_SCALINGS)}")
    original = rope.size("original_max_position_embeddings", max_position)
    original = config.size("original_max_position_embeddings", original)
    scaling = _SCALINGS[kind](rope, original, max_position)
    return RopeSpec(theta, int(head_dim * partial), scaling)


def extended_max_position(rope: RopeSpec, max_position: int) -> int:
    """The context, in tokens, once scaling that states its own reach is counted."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_position, int(rope.scaling.factor * rope.scaling.original_max_position))
    return max_position


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by (Peng et al., YaRN, 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _default(rope: HfConfig, original: int, max_position: int) -> None:
    return None


def _linear(rope: HfConfig, original: int, max_position: int) -> LinearScaling:
    return LinearScaling(rope.number("factor"))


def _dynamic(rope: HfConfig, original: int, max_position: int) -> DynamicNtkScaling:
    return DynamicNtkScaling(rope.number("factor"), max_position)


def _yarn(rope: HfConfig, original: int, max_position: int) -> YarnScaling:
    factor = rope.number("factor", max_position / original)
    attention_factor = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = yarn_attention_factor(factor, rope.number("mscale"))
        attention_factor /= yarn_attention_factor(factor, rope.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        rope.number("attention_factor", attention_factor),
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.flag("truncate", True),
    )


def _longrope(rope: HfConfig, original: int, max_position: int) -> LongRopeScaling:
    factor = rope.number("factor", max_position / original)
    attention_factor = 1.0
    if factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        rope.numbers("short_factor"),
        rope.numbers("long_factor"),
        original,
        rope.number("attention_factor", attention_factor),
    )


def _llama3(rope: HfConfig, original: int, max_position: int) -> Llama3Scaling:
    return Llama3Scaling(
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        original,
    )


_SCALINGS: dict[str, Callable[[HfConfig, int, int], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "llama3": _llama3,
}
