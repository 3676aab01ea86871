"""The flags of captured graphs, and which of them counts where several speak.

Knows no model and no device; `graph_settings` makes sizes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treadle.engine.errors import ConfigError
from treadle.engine.settings import ANYTHING, AT_LEAST_ONE, Legal, check_value, flag, setting

Phase = Literal["decode", "prefill"]
_JSON = flag("cuda_graph_config")
BACKENDS = Legal(("full", "breakable", "disabled"))
_JSON_KEYS = {
    "backend": ("str", BACKENDS), "max_bs": ("int", AT_LEAST_ONE), "bs": ("Sequence", AT_LEAST_ONE),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphConfig:
    cuda_graph_max_bs: int | None = setting(
        None, "requests of the largest decode graph; default: by the GPU's size, all on a host",
        AT_LEAST_ONE, aliases=("cuda_graph_max_bs_decode",),
    )  # fmt: skip
    cuda_graph_bs: Sequence[int] | None = setting(
        None, "requests of every decode graph: 1 2 4 or 1,2,4",
        AT_LEAST_ONE, aliases=("cuda_graph_bs_decode",),
    )  # fmt: skip
    disable_cuda_graph_padding: bool = setting(
        False, "a decode graph serves its own number of requests only"
    )
    piecewise_cuda_graph_max_tokens: int | None = setting(
        None, "tokens of the largest prefill graph; default: the chunk",
        AT_LEAST_ONE, aliases=("cuda_graph_max_bs_prefill",),
    )  # fmt: skip
    piecewise_cuda_graph_tokens: Sequence[int] | None = setting(
        None, "tokens of every prefill graph: 64 128 or 64,128",
        AT_LEAST_ONE, aliases=("cuda_graph_bs_prefill",),
    )  # fmt: skip
    enable_piecewise_cuda_graph: bool = setting(False, "prefill graphs: they are on anyway")
    disable_piecewise_cuda_graph: bool = setting(
        False, "no prefill graphs", aliases=("disable_prefill_cuda_graph",)
    )
    disable_decode_cuda_graph: bool = setting(False, "no decode graphs")
    disable_cuda_graph: bool = setting(
        False, "no graphs, unless a flag of one phase says otherwise"
    )
    cuda_graph_backend_decode: str | None = setting(
        None, "how decode steps are captured; default: full, the whole step", BACKENDS
    )
    cuda_graph_backend_prefill: str | None = setting(
        None, "how prefill steps are captured; default: breakable, cut at attention", BACKENDS
    )
    cuda_graph_config: Mapping[str, Any] | None = setting(
        None, "all of this as JSON, before every other flag: "
        '{"decode": {"backend": "full", "max_bs": 64}, "prefill": {"bs": [64, 512]}}',
    )  # fmt: skip
    graph_capture_budget_ms: float = setting(
        100.0, "how long a capture may hold up running requests; 0: capture only when none run",
        Legal(at_least=0),
    )  # fmt: skip
    warmup_graphs: bool = setting(False, "the server is ready only when every graph is captured")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags say about the graphs of one phase; None: nothing."""

    backend: str | None
    largest: int | None  # decode: rows; prefill: tokens
    sizes: tuple[int, ...] | None  # ascending; the last one is `largest`
    backend_from: str  # why this backend
    sizes_from: str  # why these sizes


@dataclass(frozen=True, slots=True)
class _Flags:
    """The names of one phase's flags."""

    backend: str
    off: str
    largest: str
    sizes: str


_FLAGS: dict[Phase, _Flags] = {
    "decode": _Flags(
        "cuda_graph_backend_decode", "disable_decode_cuda_graph",
        "cuda_graph_max_bs", "cuda_graph_bs",
    ),
    "prefill": _Flags(
        "cuda_graph_backend_prefill", "disable_piecewise_cuda_graph",
        "piecewise_cuda_graph_max_tokens", "piecewise_cuda_graph_tokens",
    ),
}  # fmt: skip


def wish(config: GraphConfig, phase: Phase) -> Wish:
    """JSON counts before the flags of one phase, those before `--disable-cuda-graph`.

    Raises: ConfigError for contradictions, and for what the JSON must not hold.
    """
    stated, flags = _stated(config, phase), _FLAGS[phase]
    backend, backend_from = stated.get("backend"), _JSON
    if backend is None:
        backend, backend_from = _backend(config, flags)
    if phase == "prefill" and backend == "full":
        raise ConfigError(
            "full prefill graphs do not exist: they are breakable (cut at attention) or disabled"
        )
    largest, sizes, sizes_from = stated.get("max_bs"), stated.get("bs"), _JSON
    labels = (f"{_JSON} {phase}.max_bs", f"{phase}.bs")
    if largest is None and sizes is None:
        largest, sizes = getattr(config, flags.largest), getattr(config, flags.sizes)
        sizes_from, labels = "given", (flag(flags.largest), flag(flags.sizes))
    if sizes is not None:
        if largest is not None and largest < max(sizes):
            raise ConfigError(f"{labels[0]} {largest} is below {max(sizes)} of {labels[1]}")
        sizes = tuple(sorted(set(sizes)))
        largest = sizes[-1]
    return Wish(backend, largest, sizes, backend_from, sizes_from)


def _backend(config: GraphConfig, flags: _Flags) -> tuple[str | None, str]:
    chosen, is_off = getattr(config, flags.backend), getattr(config, flags.off)
    if is_off and chosen not in (None, "disabled"):
        raise ConfigError(f"{flag(flags.backend)} {chosen} contradicts {flag(flags.off)}")
    enable = "enable_piecewise_cuda_graph"
    if is_off and flags is _FLAGS["prefill"] and getattr(config, enable):
        raise ConfigError(f"{flag(enable)} contradicts {flag(flags.off)}")
    if chosen is not None:
        return chosen, "given"
    for name in (flags.off, "disable_cuda_graph"):
        if getattr(config, name):
            return "disabled", flag(name)
    return None, ""


def _stated(config: GraphConfig, phase: Phase) -> Mapping[str, Any]:
    """One phase of the JSON."""
    whole = config.cuda_graph_config or {}
    _check_keys(_JSON, whole, _FLAGS)
    stated = whole.get(phase)
    if stated is None:
        return {}
    check_value(f"{_JSON} {phase}", "Mapping", ANYTHING, stated)
    _check_keys(f"{_JSON} {phase}", stated, _JSON_KEYS)
    for key, value in stated.items():
        if value is not None:
            check_value(f"{_JSON} {phase}.{key}", *_JSON_KEYS[key], value)
    found: Mapping[str, Any] = stated
    return found


def _check_keys(label: str, given: Mapping[str, Any], legal: Mapping[Any, Any]) -> None:
    for key in given:
        if key not in legal:
            raise ConfigError(f"{label} may hold {', '.join(legal)}, not {key!r}")
