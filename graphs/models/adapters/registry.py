"""Finds the adapter for a Hugging Face config or a GGUF architecture.

Knows the list of adapters, nothing inside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.graphs.models.adapters.base import Adapter
from treadle.graphs.models.adapters.llama import LLAMA
from treadle.graphs.models.adapters.mistral import MISTRAL
from treadle.graphs.models.adapters.qwen2 import QWEN2
from treadle.graphs.models.adapters.qwen3 import QWEN3

ADAPTERS = (LLAMA, MISTRAL, QWEN2, QWEN3)


def find_adapter(architectures: Sequence[str], model_type: str = "") -> Adapter:
    """The adapter of the first known architecture; of the model type where none is named.

    Raises: ValueError listing the known ones.
    """
    for adapter in ADAPTERS:
        if adapter.architecture in architectures:
            return adapter
        if not architectures and adapter.model_type == model_type:
            return adapter
    named = ", ".join(architectures) or model_type or "none named"
    known = ", ".join(adapter.architecture for adapter in ADAPTERS)
    raise ValueError(f"architecture {named} is not supported; known: {known}")


def find_gguf_adapter(name: str) -> Adapter:
    """The adapter for a GGUF file's `general.architecture`.

    Raises: ValueError listing the known ones.
    """
    for adapter in ADAPTERS:
        if name in adapter.gguf_names:
            return adapter
    known = ", ".join(name for adapter in ADAPTERS for name in adapter.gguf_names)
    raise ValueError(f"GGUF architecture {name or 'none named'} is not supported; known: {known}")
