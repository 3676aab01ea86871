"""Where the tensors of Llama-like checkpoints go, under their Hugging Face and GGUF names.

Knows names and rows only: no file and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.parameters import Split, layer_parameter
from treadle.graphs.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class _Projection:
    parameter: str
    name: str  # in the Hugging Face layer
    gguf_name: str  # in the GGUF block
    row: int
    rows: int
    columns: int
    has_bias: bool
    row_split: Split | None
    column_split: Split | None = None
    rotary_heads: int = 0


def llama_placements(spec: DecoderSpec) -> list[Placement]:
    """Names of Llama and of all that follow it, with biases and qk-norm as the spec says."""
    places = [_table(spec, "model.embed_tokens.weight", "token_embd.weight", "embedding")]
    for index in range(spec.num_layers):
        places += _layer(spec, index)
    hidden = (spec.hidden_size,)
    places.append(Placement("model.norm.weight", "output_norm.weight", "final_norm", 0, hidden))
    if not spec.tied_head:
        places.append(_table(spec, "lm_head.weight", "output.weight", "head"))
    return places


def _table(spec: DecoderSpec, name: str, gguf_name: str, parameter: str) -> Placement:
    shape = (spec.vocab_size, spec.hidden_size)
    return Placement(name, gguf_name, parameter, 0, shape, row_split="vocab")


def _layer(spec: DecoderSpec, index: int) -> list[Placement]:
    prefix, block = f"model.layers.{index}", f"blk.{index}"
    norms = [
        ("input_layernorm", "attn_norm", "attention_norm", spec.hidden_size),
        ("post_attention_layernorm", "ffn_norm", "mlp_norm", spec.hidden_size),
    ]
    if spec.qk_norm:
        norms += [
            ("self_attn.q_norm", "attn_q_norm", "q_norm", spec.head_dim),
            ("self_attn.k_norm", "attn_k_norm", "k_norm", spec.head_dim),
        ]
    places = [
        Placement(
            f"{prefix}.{name}.weight",
            f"{block}.{gguf_name}.weight",
            layer_parameter(index, parameter),
            0,
            (size,),
        )
        for name, gguf_name, parameter, size in norms
    ]
    for projection in _projections(spec):
        kinds = ("weight", "bias") if projection.has_bias else ("weight",)
        rows = projection.rows
        places += [
            Placement(
                f"{prefix}.{projection.name}.{kind}",
                f"{block}.{projection.gguf_name}.{kind}",
                layer_parameter(index, f"{projection.parameter}.{kind}"),
                projection.row,
                (rows, projection.columns) if kind == "weight" else (rows,),
                projection.rotary_heads,
                projection.row_split,
                projection.column_split if kind == "weight" else None,
            )
            for kind in kinds
        ]
    return places


def _projections(spec: DecoderSpec) -> list[_Projection]:
    hidden, inter, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    bias, mlp = spec.qkv_bias, spec.mlp_bias
    make = _Projection
    return [
        make("qkv", "self_attn.q_proj", "attn_q", 0, q, hidden, bias, "heads", None, heads),
        make("qkv", "self_attn.k_proj", "attn_k", q, kv, hidden, bias, "kv_heads", None, kv_heads),
        make("qkv", "self_attn.v_proj", "attn_v", q + kv, kv, hidden, bias, "kv_heads"),
        make("o", "self_attn.o_proj", "attn_output", 0, hidden, q, spec.o_bias, None, "heads"),
        make("gate_up", "mlp.gate_proj", "ffn_gate", 0, inter, hidden, mlp, "intermediate"),
        make("gate_up", "mlp.up_proj", "ffn_up", inter, inter, hidden, mlp, "intermediate"),
        make("down", "mlp.down_proj", "ffn_down", 0, hidden, inter, mlp, None, "intermediate"),
    ]
