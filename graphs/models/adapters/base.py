"""What an adapter is: a config made into a spec, checkpoint names into places in parameters.

Knows no file format; `read_common` holds what dense decoders' configs share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.parameters import Shape, Split
from treadle.graphs.models.rope_config import extended_max_position, rope_spec
from treadle.graphs.models.spec import Activation, DecoderSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_FIRST_WINDOWED_LAYER = 28  # where a config has no max_window_layers
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Placement:
    """One checkpoint tensor and the rows of the parameter that it fills."""

    name: str  # in a Hugging Face checkpoint
    gguf_name: str
    parameter: str
    row: int  # the first row it fills
    shape: Shape  # of the checkpoint tensor
    rotary_heads: int = 0  # heads whose rows some GGUF files interleave; 0: not rotated
    row_split: Split | None = None  # what the rows are made of; None: every rank has all of them
    column_split: Split | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One architecture."""

    architecture: str  # Hugging Face class name
    model_type: str  # Hugging Face config key
    gguf_names: tuple[str, ...]  # `general.architecture`
    gguf_interleaves: bool  # whether its GGUF files hold q and k rows as interleaved pairs
    spec: Callable[[HfConfig], DecoderSpec]  # raises ValueError naming the config key
    placements: Callable[[DecoderSpec], list[Placement]]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an architecture takes for keys its config leaves out."""

    max_position: int  # tokens
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads


def read_common(config: HfConfig, architecture: str, defaults: Defaults) -> DecoderSpec:
    """A dense gated decoder without biases or windows; adapters `replace` what differs."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", defaults.kv_heads or num_heads)
    if config.has("num_key_value_heads") and config.get("num_key_value_heads") is None:
        num_kv_heads = num_heads
    hidden_size = config.size("hidden_size")
    head_dim = config.size("head_dim", defaults.head_dim or hidden_size // num_heads)
    num_layers = config.size("num_hidden_layers")
    max_position = config.size("max_position_embeddings", defaults.max_position)
    rope = rope_spec(config, head_dim, max_position)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.size("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=_activation(config),
        rope=rope,
        windows=(None,) * num_layers,
        max_position=extended_max_position(rope, max_position),
        dtype=_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        tied_head=config.flag("tie_word_embeddings", False),
    )


def layer_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of architectures where only some layers have one, and only on request."""
    if not config.flag("use_sliding_window", False) or not config.get("sliding_window"):
        return (None,) * num_layers
    window = config.size("sliding_window")
    first = config.get("max_window_layers")
    first = first if isinstance(first, int) else _FIRST_WINDOWED_LAYER
    kinds = config.texts("layer_types") or tuple(
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(config: HfConfig) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; known: {', '.join(_DTYPES)}")
    return name


def _activation(config: HfConfig) -> Activation:
    name = config.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"hidden_act {name!r} is not supported; known: {known}")
    return _ACTIVATIONS[name]
