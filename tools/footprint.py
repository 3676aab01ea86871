"""What a model takes on the device of one rank: weights, KV, and the activations of a step.

Knows a model's description; reads no checkpoint and allocates nothing.
"""

from __future__ import annotations

import math

import torch

from treadle.engine.memory import ModelFacts
from treadle.graphs.kv_memory import KvShape
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import SINGLE, TensorParallel, local_spec
from treadle.tools.machine import Room

FP32_BYTES = 4


def model_facts(
    spec: DecoderSpec,
    dtype: torch.dtype,
    room: Room,
    *,
    weights_loaded: bool,
    is_host: bool,
    parallel: TensorParallel = SINGLE,
) -> ModelFacts:
    """Of one rank; all have the same but for the room.

    spec: of the whole model; the functions below take a rank's, `local_spec`.
    weights_loaded: whether `room` was measured beside the weights.
    Raises: ValueError when so many ranks cannot share the model.
    """
    spec = local_spec(spec, parallel)
    weights = weight_bytes(spec, dtype)
    return ModelFacts(
        max_position=spec.max_position,
        bytes_per_token=kv_shape(spec, dtype).bytes_per_token,
        weight_bytes=weights,
        free_bytes=room.free if weights_loaded else max(0, room.free - weights),
        capacity_bytes=room.capacity,
        step_bytes_per_token=step_bytes_per_token(spec, dtype),
        step_bytes_per_row=step_bytes_per_row(spec, dtype),
        is_host=is_host,
    )


def weight_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """All parameters as they lie in memory, whatever the checkpoint's format."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values()) * dtype.itemsize


def kv_shape(spec: DecoderSpec, dtype: torch.dtype) -> KvShape:
    return KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)


def step_bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Activations alive at once when a layer's feed-forward block runs, for one token.

    What pieces hand on: the residual, queries and what attention made of them. The block's input
    before and after the norm; gate and up, and their product.
    """
    handed_on = spec.hidden_size + 2 * spec.q_size
    return (handed_on + 2 * spec.hidden_size + 3 * spec.intermediate_size) * dtype.itemsize


def step_bytes_per_row(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """The head's output and the fp32 logits that sampling reads, for one row."""
    head = 0 if dtype is torch.float32 else dtype.itemsize
    return spec.vocab_size * (head + FP32_BYTES)
