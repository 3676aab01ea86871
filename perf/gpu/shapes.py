"""Sizes of the models that the check builds with random weights.

Knows sizes only; no checkpoint is read. Source: the models' published config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec, Llama3Scaling, RopeSpec

MAX_POSITION = 8192  # tokens that the check serves; the published contexts are longer


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    spec: DecoderSpec


QWEN3_600M = ModelShape(
    "qwen3-0.6b",
    DecoderSpec(
        architecture="Qwen3ForCausalLM", vocab_size=151_936, hidden_size=1024, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072, norm_eps=1e-6,
        activation="silu", rope=RopeSpec(1_000_000.0, 128), windows=(None,) * 28,
        max_position=MAX_POSITION, dtype="bfloat16", qk_norm=True, tied_head=True,
    ),
)  # fmt: skip
LLAMA_8B = ModelShape(
    "llama-3.1-8b",
    DecoderSpec(
        architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14_336, norm_eps=1e-5,
        activation="silu", rope=RopeSpec(500_000.0, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        windows=(None,) * 32, max_position=MAX_POSITION, dtype="bfloat16",
    ),
)  # fmt: skip
# For correctness: a window, norms on queries and keys, sizes that the host kernels take.
SMALL = ModelShape(
    "small",
    DecoderSpec(
        architecture="Qwen3ForCausalLM", vocab_size=1008, hidden_size=96, num_layers=3,
        num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=160, norm_eps=1e-5,
        activation="silu", rope=RopeSpec(10_000.0, 32), windows=(None, 21, None),
        max_position=256, dtype="float32", qk_norm=True,
    ),
)  # fmt: skip


def count_parameters(spec: DecoderSpec) -> dict[str, int]:
    """`read`: what a decode step reads, `layers`: the matrices that every token goes through."""
    shapes = parameter_shapes(spec)
    sizes = {name: _product(shape) for name, shape in shapes.items()}
    read = sum(sizes.values()) - (0 if spec.tied_head else sizes["embedding"])
    matrices = (
        n for name, n in sizes.items() if name.startswith("layers.") and len(shapes[name]) > 1
    )
    return {"read": read, "layers": sum(matrices)}


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
