"""The decoder's own parameters: their names and shapes, as its layers hold them.

Knows no checkpoint: adapters say which checkpoint tensor lies where in which parameter.
"""

from __future__ import annotations

from typing import Literal

from treadle.graphs.models.spec import DecoderSpec

Shape = tuple[int, ...]

# What a dimension is made of, where ranks share it out: query heads, kv heads, the feed-forward
# block's inner features, token ids.
Split = Literal["heads", "kv_heads", "intermediate", "vocab"]


def parameter_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every parameter of the decoder, in the order of the forward pass."""
    shapes: dict[str, Shape] = {"embedding": (spec.vocab_size, spec.hidden_size)}
    layer = _layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {layer_parameter(index, name): shape for name, shape in layer.items()}
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_parameter(index: int, name: str) -> str:
    return f"layers.{index}.{name}"


def _layer_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    qkv_size = spec.q_size + 2 * spec.kv_size
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "qkv.weight": (qkv_size, hidden),
        "o.weight": (hidden, spec.q_size),
        "mlp_norm": (hidden,),
        "gate_up.weight": (2 * intermediate, hidden),
        "down.weight": (hidden, intermediate),
    }
    if spec.qkv_bias:
        shapes["qkv.bias"] = (qkv_size,)
    if spec.o_bias:
        shapes["o.bias"] = (hidden,)
    if spec.mlp_bias:
        shapes |= {"gate_up.bias": (2 * intermediate,), "down.bias": (hidden,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes
