"""The one decoder-only transformer, built from a spec and its parameters.

Knows neither checkpoints nor requests: tokens, positions, cache slots and pages come in, hidden
states and logits go out. The forward is cut at attention into pieces that read and write given
buffers and nothing else, so that each can be captured.

Axes: T tokens, N cache slots, H query heads, K kv heads, D head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.graphs.layers.attention import Attention, Backend, KvCache
from treadle.graphs.layers.embedding import Embedding, SharedEmbedding
from treadle.graphs.layers.linear import Linear, Projection, ReducedLinear
from treadle.graphs.layers.mlp import GatedMlp
from treadle.graphs.layers.norm import RmsNorm
from treadle.graphs.layers.rotary import Rotary
from treadle.graphs.models.parameters import layer_parameter
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import SINGLE, TensorParallel, local_spec, share
from treadle.kernels.paged_attention import AttentionMeta, paged_attention
from treadle.kernels.rows import add_to, widen


@dataclass(frozen=True, slots=True)
class Activations:
    """What the pieces of a forward hand on to each other and to attention."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, below spec.max_position
    slot_mapping: Tensor  # [T] int64
    residual: Tensor  # [T, hidden] the sum that every block adds to
    q: Tensor  # [T, H, D] what attention reads
    attended: Tensor  # [T, H, D] what attention writes

    @classmethod
    def empty(cls, spec: DecoderSpec, tokens: int, like: Tensor) -> Activations:
        """Zeros for so many tokens; like: of the device and dtype."""
        heads = (tokens, spec.num_heads, spec.head_dim)
        ids, positions, mapping = (
            torch.zeros(tokens, dtype=torch.int64, device=like.device) for _ in range(3)
        )
        residual = like.new_zeros(tokens, spec.hidden_size)
        return cls(ids, positions, mapping, residual, like.new_zeros(heads), like.new_zeros(heads))

    def first(self, tokens: int) -> Activations:
        """The same memory, its first tokens only."""
        return Activations(
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.slot_mapping[:tokens],
            self.residual[:tokens],
            self.q[:tokens],
            self.attended[:tokens],
        )


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm, attention, norm, feed-forward."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp


class Decoder:
    """Runs under `torch.inference_mode`; holds parameters, never a cache.

    One of several ranks that share a model holds its part, and computes with the others in step:
    its heads, its rows of the vocabulary, all of every hidden state.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        parameters: Mapping[str, Tensor],
        parallel: TensorParallel = SINGLE,
    ) -> None:
        """spec: of the whole model; the decoder's own is `local_spec`.

        parameters: as `parameter_shapes` of that says, all of one dtype, on one device.
        """
        self.parallel = parallel
        ids = share(spec, "vocab", parallel)
        self.first_id, self.num_ids = ids.start, len(ids)  # rows beyond them are padding
        self.spec = spec = local_spec(spec, parallel)
        self.embedding = parameters["embedding"]  # [V, hidden]
        self._embed = self._embedding()
        self.rotary = Rotary(spec.rope, spec.max_position, self.embedding.device)
        self.layers = [self._layer(parameters, index) for index in range(spec.num_layers)]
        self.attention_backend: Backend = paged_attention
        self.final_norm = RmsNorm(parameters["final_norm"], spec.norm_eps)
        self.head = Linear(self.embedding if spec.tied_head else parameters["head"])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_pieces(self) -> int:
        """Attention of layer i runs between piece i and piece i + 1."""
        return len(self.layers) + 1

    def piece(self, index: int, activations: Activations, caches: Sequence[KvCache]) -> None:
        """Everything between two attentions: the end of one layer and the start of the next.

        Ends with queries in `activations.q` and the tokens' keys and values in the cache; the last
        piece ends with the finished sum in `activations.residual`.
        """
        residual = activations.residual
        following = self.layers[index] if index < len(self.layers) else None
        if index == 0:
            self._embed(activations.token_ids, residual)
            if following is None:
                return
            normed = following.attention_norm(residual)
        else:
            layer = self.layers[index - 1]
            output = layer.attention.output(activations.attended)
            hidden = layer.mlp(layer.mlp_norm.add(output, residual))
            if following is None:
                add_to(residual, hidden)
                return
            normed = following.attention_norm.add(hidden, residual)
        following.attention.project(
            normed,
            activations.positions,
            caches[index],
            activations.slot_mapping,
            activations.q,
        )

    def attend(
        self, index: int, activations: Activations, cache: KvCache, meta: AttentionMeta
    ) -> None:
        """Attention of one layer, from `activations.q` into `activations.attended`."""
        attention = self.layers[index].attention
        attention.attend(activations.q, cache, meta, activations.attended, self.attention_backend)

    def forward(
        self,
        token_ids: Tensor,  # [T] int32 or int64
        positions: Tensor,  # [T] below spec.max_position
        kv_cache: Sequence[KvCache],  # per layer
        slot_mapping: Tensor,  # [T] int64
        attention: AttentionMeta,
    ) -> Tensor:  # [T, hidden], before the final norm
        """All pieces in buffers of their own; writes the tokens' keys and values into the cache."""
        activations = Activations.empty(self.spec, len(token_ids), self.embedding)
        activations.token_ids.copy_(token_ids)
        activations.positions.copy_(positions)
        activations.slot_mapping.copy_(slot_mapping)
        for index in range(self.num_pieces):
            self.piece(index, activations, kv_cache)
            if index < len(self.layers):
                self.attend(index, activations, kv_cache[index], attention)
        return activations.residual

    def logits(
        self,
        hidden: Tensor,  # [N, hidden] the rows of `forward`'s result that need logits
        out: Tensor | None = None,  # [N, V] fp32
    ) -> Tensor:  # [N, V] fp32
        """Of this rank's rows of the vocabulary: `num_ids` from `first_id` on, then padding."""
        if out is None:
            shape = (len(hidden), len(self.head.weight))
            out = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        normed = self.final_norm(hidden)
        if out.dtype is hidden.dtype:
            self.head(normed, out)
        else:
            widen(self.head(normed), out)
        return out

    def _embedding(self) -> Embedding | SharedEmbedding:
        if self.parallel.size == 1:
            return Embedding(self.embedding)
        return SharedEmbedding(self.embedding, self.first_id, self.parallel.group)

    def _layer(self, parameters: Mapping[str, Tensor], index: int) -> DecoderLayer:
        spec = self.spec

        def linear(name: str) -> Linear:
            weight = parameters[layer_parameter(index, f"{name}.weight")]
            return Linear(weight, parameters.get(layer_parameter(index, f"{name}.bias")))

        def reduced(name: str) -> Projection:
            whole, parallel = linear(name), self.parallel
            if parallel.size == 1:
                return whole
            bias = whole.bias if parallel.rank == 0 else None
            return ReducedLinear(whole.weight, bias, parallel.group)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(parameters[layer_parameter(index, name)], spec.norm_eps)

        attention = Attention(
            qkv=linear("qkv"),
            o=reduced("o"),
            q_norm=norm("q_norm") if spec.qk_norm else None,
            k_norm=norm("k_norm") if spec.qk_norm else None,
            rotary=self.rotary,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.windows[index],
        )
        mlp = GatedMlp(linear("gate_up"), reduced("down"), spec.activation)
        return DecoderLayer(norm("attention_norm"), attention, norm("mlp_norm"), mlp)
