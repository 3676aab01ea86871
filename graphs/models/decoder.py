"""The one decoder-only transformer, built from a spec and its parameters.

Knows neither checkpoints nor requests: tokens, positions, cache slots and pages come in, hidden
states and logits go out. Each layer is cut at attention, so that captured pieces can end there.

Axes: T tokens, N cache slots, K kv heads, D head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.graphs.layers.attention import Attention, KvCache
from treadle.graphs.layers.linear import Linear
from treadle.graphs.layers.mlp import GatedMlp
from treadle.graphs.layers.norm import RmsNorm
from treadle.graphs.layers.rotary import Rotary
from treadle.graphs.models.parameters import layer_parameter
from treadle.graphs.models.spec import DecoderSpec
from treadle.kernels.paged_attention import AttentionMeta


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm, attention, norm, feed-forward; the sum they add to travels as `residual`."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def before_attention(
        self,
        hidden: Tensor,  # [T, hidden] what the layer before has still to add
        residual: Tensor | None,  # [T, hidden] None in the first layer
        positions: Tensor,  # [T]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q [T, H, D], k and v [T, K, D], and the new residual."""
        if residual is None:
            normed, residual = self.attention_norm(hidden), hidden
        else:
            normed, residual = self.attention_norm.add(hidden, residual)
        q, k, v = self.attention.project(normed, positions)
        return q, k, v, residual

    def after_attention(
        self,
        attended: Tensor,  # [T, H, D]
        residual: Tensor,  # [T, hidden]
    ) -> tuple[Tensor, Tensor]:
        """Returns what is still to be added, and the residual it belongs to."""
        output = self.attention.output(attended)
        normed, residual = self.mlp_norm.add(output, residual)
        return self.mlp(normed), residual


class Decoder:
    """Runs under `torch.inference_mode`; holds parameters, never a cache."""

    def __init__(self, spec: DecoderSpec, parameters: Mapping[str, Tensor]) -> None:
        """parameters: as `parameter_shapes(spec)` says, all of one dtype, on one device."""
        self.spec = spec
        self.embedding = parameters["embedding"]  # [V, hidden]
        self.rotary = Rotary(spec.rope, spec.max_position, self.embedding.device)
        self.layers = [self._layer(parameters, index) for index in range(spec.num_layers)]
        self.final_norm = RmsNorm(parameters["final_norm"], spec.norm_eps)
        self.head = Linear(self.embedding if spec.tied_head else parameters["head"])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, hidden]
        return F.embedding(token_ids, self.embedding)

    def forward(
        self,
        token_ids: Tensor,  # [T] int32 or int64
        positions: Tensor,  # [T] below spec.max_position
        kv_cache: Sequence[KvCache],  # per layer
        slot_mapping: Tensor,  # [T] int64
        attention: AttentionMeta,
    ) -> Tensor:  # [T, hidden], before the final norm
        """Writes the tokens' keys and values into the cache; returns the residual stream."""
        hidden, residual = self.embed(token_ids), None
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            q, k, v, residual = layer.before_attention(hidden, residual, positions)
            attended = layer.attention.attend(q, k, v, cache, slot_mapping, attention)
            hidden, residual = layer.after_attention(attended, residual)
        return hidden if residual is None else hidden + residual

    def logits(self, hidden: Tensor) -> Tensor:  # [N, hidden] -> [N, V] fp32
        """hidden: the rows of `forward`'s result that need logits."""
        return self.head(self.final_norm(hidden)).float()

    def _layer(self, parameters: Mapping[str, Tensor], index: int) -> DecoderLayer:
        spec = self.spec

        def linear(name: str) -> Linear:
            weight = parameters[layer_parameter(index, f"{name}.weight")]
            return Linear(weight, parameters.get(layer_parameter(index, f"{name}.bias")))

        def norm(name: str) -> RmsNorm:
            return RmsNorm(parameters[layer_parameter(index, name)], spec.norm_eps)

        attention = Attention(
            qkv=linear("qkv"),
            o=linear("o"),
            q_norm=norm("q_norm") if spec.qk_norm else None,
            k_norm=norm("k_norm") if spec.qk_norm else None,
            rotary=self.rotary,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.windows[index],
        )
        mlp = GatedMlp(linear("gate_up"), linear("down"), spec.activation)
        return DecoderLayer(norm("attention_norm"), attention, norm("mlp_norm"), mlp)
