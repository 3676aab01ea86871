"""What an engine will be, before any weight is read: model, devices, ranks and every setting.

Knows descriptions and the machine; loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treadle.engine.config import EngineConfig
from treadle.engine.errors import ConfigError, ModelError
from treadle.engine.resolve import Resolved, context_length, resolve
from treadle.engine.settings import flag
from treadle.graphs.device import Device, has_bf16_arithmetic, open_device
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import TensorParallel
from treadle.graphs.rank_plan import Layout
from treadle.graphs.weights.load import CheckpointError, read_spec
from treadle.kernels import attention_backends
from treadle.tools.footprint import model_facts
from treadle.tools.machine import room
from treadle.tools.model_source import ModelSource, locate, resolve_model
from treadle.tools.parallel import (
    check_devices,
    check_peers,
    check_size,
    layout_of,
    share_of,
    threads_of,
)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known before the weights are loaded."""

    source: ModelSource
    tokenizer_path: Path
    device: Device
    spec: DecoderSpec
    dtype: torch.dtype
    resolved: Resolved  # from the memory that will be free
    reasons: dict[str, tuple[str, str]]  # what was chosen here: value and why, by flat name
    attention: dict[str, str]  # backend by phase
    sampling: str  # backend
    layout: Layout  # of the ranks that share the model


def survey(config: EngineConfig) -> Survey:
    """Reads the model's description, not its weights, and decides every setting.

    Raises: ConfigError, ModelError.
    """
    config.check()
    source = resolve_model(config.model.model_path)
    given = config.model.tokenizer_path
    tokenizer_path = source.path if given is None else locate(given)
    layout = layout_of(config)
    if not layout.leads:
        raise ConfigError("this process belongs to an engine that another one serves")
    try:
        device = _open_device(config, layout)
        spec = read_spec(source.path)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    spec = replace(spec, max_position=context_length(config, spec.max_position))
    dtype, why_dtype = _dtype(config, spec, device)
    check_size(spec, layout)
    available = share_of(room(device), layout, device.is_host)
    facts = model_facts(
        spec, dtype, available, weights_loaded=False, is_host=device.is_host,
        parallel=TensorParallel(0, layout.size),
    )  # fmt: skip
    kind = device.torch_device.type
    why_device = "given" if config.device.device else f"{'no' if kind == 'cpu' else 'a'} GPU found"
    model = config.model
    reasons = {
        "model_path": (
            model.model_path or str(source.path),
            "given" if model.model_path else "the embedded model",
        ),
        "tokenizer_path": (str(tokenizer_path), "given" if given else "the model's"),
        "served_model_name": (
            model.served_model_name or source.served_name,
            "given" if model.served_model_name else "the model's",
        ),
        "dtype": (str(dtype).removeprefix("torch."), why_dtype),
        "device": (kind, why_device),
    }
    attention = _attention(config, spec, dtype, kind)
    reasons |= {f"{phase}_attention_backend": (c.name, c.reason) for phase, c in attention.items()}
    names = {phase: choice.name for phase, choice in attention.items()}
    reasons["attention_backend"] = (" and ".join(dict.fromkeys(names.values())), "by phase, below")
    sampling = _sampling(config, kind)
    reasons["sampling_backend"] = (sampling.name, sampling.reason)
    resolved = resolve(config, facts)
    return Survey(
        source, tokenizer_path, device, spec, dtype, resolved, reasons, names, sampling.name, layout
    )


def _open_device(config: EngineConfig, layout: Layout) -> Device:
    """Rank 0's. Raises: ValueError."""
    asked = config.device.device
    if asked is None and (layout.size > 1 or config.device.base_gpu_id):
        asked = layout.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    elif asked in ("cpu", "cuda"):
        asked = layout.device(asked, 0)
    device = open_device(asked, threads_of(layout))
    check_devices(config, layout, device.torch_device.type)
    check_peers(config, layout, device.torch_device.type)
    return device


def _attention(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, device: str
) -> dict[str, attention_backends.Choice]:
    """The backend of each phase.

    Raises: ConfigError when the one asked for does not serve the model, with those that do.
    """
    needs = attention_backends.AttentionNeeds(
        device, dtype, spec.head_dim, window=any(each is not None for each in spec.windows)
    )
    kernels, chosen = config.kernels, {}
    for phase in ("prefill", "decode"):
        name = f"{phase}_attention_backend"
        asked = getattr(kernels, name) or kernels.attention_backend
        used = name if getattr(kernels, name) else "attention_backend"
        try:
            chosen[phase] = attention_backends.choose(needs, phase, asked)
        except ValueError as error:
            raise ConfigError(f"{flag(used)}: {error}") from error
    return chosen


def _sampling(config: EngineConfig, device: str) -> attention_backends.Choice:
    try:
        return attention_backends.choose_sampling(device, config.kernels.sampling_backend)
    except ValueError as error:
        raise ConfigError(f"{flag('sampling_backend')}: {error}") from error


def _dtype(config: EngineConfig, spec: DecoderSpec, device: Device) -> tuple[torch.dtype, str]:
    """`auto` is the checkpoint's own; quantized ones compute in bf16 where it is native."""
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype], "given"
    if spec.dtype in _DTYPES:
        return _DTYPES[spec.dtype], "the checkpoint's own"
    if has_bf16_arithmetic(device):
        return torch.bfloat16, "for quantized weights, on a device that multiplies it natively"
    return torch.float32, "for quantized weights, on a device without bf16 arithmetic"
