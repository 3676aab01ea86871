"""A decoder-only transformer described as data: what the one implementation needs to know.

Knows no checkpoint format, no file and no tensor; adapters make specs, the decoder reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNtkScaling:
    """A larger base beyond the trained length, chosen once for the served context.

    A sequence's length cannot choose the frequencies here: cached keys would be rotated by other
    ones than later queries, and the same prefix would differ between requests. So a context within
    the trained length is unscaled and a longer one has its own base for every sequence.
    """

    factor: float
    original_max_position: int  # tokens


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolates slow frequencies, keeps fast ones, ramps in between."""

    factor: float
    original_max_position: int  # tokens
    attention_factor: float  # multiplies cosines and sines
    beta_fast: float = 32.0  # rotations over the trained length above which nothing changes
    beta_slow: float = 1.0  # rotations below which a frequency is interpolated fully
    truncate: bool = True  # the ramp starts and ends at whole dimensions


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor per frequency: one set within the trained length, another beyond it.

    The served context chooses the set for every sequence, for the reason DynamicNtkScaling gives.
    """

    short_factor: tuple[float, ...]  # [rotary_dim / 2]
    long_factor: tuple[float, ...]  # [rotary_dim / 2]
    original_max_position: int  # tokens
    attention_factor: float  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides slow frequencies by the factor, keeps fast ones, blends in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int  # tokens


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """A finished divisor per frequency, as GGUF files carry them."""

    divisors: tuple[float, ...]  # [rotary_dim / 2]


RopeScaling = (
    LinearScaling
    | DynamicNtkScaling
    | YarnScaling
    | LongRopeScaling
    | Llama3Scaling
    | DivisorScaling
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: which dimensions turn, how fast, and how pairs are laid out."""

    theta: float
    rotary_dim: int  # the first dimensions of a head; the rest passes unchanged
    scaling: RopeScaling | None = None
    interleaved: bool = False  # pairs are neighbours instead of half a rotary_dim apart

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary dimension {self.rotary_dim} is not a positive even number")
        scaling = self.scaling
        if isinstance(scaling, LongRopeScaling):
            self._check_length("short_factor", scaling.short_factor)
            self._check_length("long_factor", scaling.long_factor)
        elif isinstance(scaling, DivisorScaling):
            self._check_length("rope divisors", scaling.divisors)

    def _check_length(self, name: str, values: tuple[float, ...]) -> None:
        if len(values) != self.rotary_dim // 2:
            raise ValueError(
                f"{name}: expected {self.rotary_dim // 2} numbers, half the rotary dimension; "
                f"found {len(values)}"
            )


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder. Raises ValueError for sizes that contradict each other."""

    architecture: str  # the Hugging Face class name
    vocab_size: int  # rows of the embedding and of the head
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: tokens seen, the current one included; None: all
    max_position: int  # tokens of context; `replace` it to serve another context length
    dtype: str  # of the checkpoint: float32, float16, bfloat16 or quantized
    eos_token_ids: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm over head_dim on queries and keys, before the rotation
    tied_head: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary dimension {self.rope.rotary_dim} exceeds the head's {self.head_dim}"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
