"""Every start-up setting by concern: its name, its default, its help and what is legal.

Knows no formula, model or device; `resolve` gives the automatic ones their values. Flag names are
SGLang's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from treadle.engine.errors import ConfigError
from treadle.engine.eviction import POLICY_NAMES, make_policy

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")  # they ask the prefix cache; without it: fcfs

_KINDS: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "Mapping": Mapping,
}
_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text",
          "Mapping": "a JSON object"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Legal:
    """What a setting may be. `also` is legal beside the range."""

    choices: tuple[str, ...] = ()
    at_least: int | None = None
    above: float | None = None
    below: float | None = None
    also: int | None = None

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.also is not None and value == self.also:
            return True
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = [
            f"{word} {bound}"
            for word, bound in (
                ("of at least", self.at_least),
                ("above", self.above),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " and ".join(bounds) + ("" if self.also is None else f", or {self.also}")


def setting(default: Any, doc: str, legal: Legal = Legal()) -> Any:  # noqa: B008
    """A flag: its default, its help text and what it may be."""
    return field(default=default, metadata={"help": doc, "legal": legal})


AT_LEAST_ONE = Legal(at_least=1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_path: str | None = setting(
        None, "a GGUF file, a Hugging Face folder or a name in the local hub cache; "
        "without it the embedded model is served",
    )  # fmt: skip
    served_model_name: str | None = setting(None, "the name clients use; default: the model path")
    tokenizer_path: str | None = setting(None, "default: the model path")
    load_format: str = setting("auto", "dummy makes random weights", Legal(LOAD_FORMATS))
    dtype: str = setting("auto", "auto is the checkpoint's own", Legal(DTYPES))
    context_length: int | None = setting(
        None,
        "tokens of the longest sequence, a prompt and at least one more; default: the model's",
        Legal(at_least=2),
    )
    random_seed: int | None = setting(None, "seeds the requests that bring no seed of their own")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    page_size: int | None = setting(None, "tokens per KV page; default: 1", AT_LEAST_ONE)
    mem_fraction_static: float | None = setting(
        None, "share of the memory for weights and KV pool; default: what activations, graphs and "
        "a reserve leave",
        Legal(above=0, below=1),
    )  # fmt: skip
    max_total_tokens: int | None = setting(
        None, "tokens in the KV pool; default: what fits", AT_LEAST_ONE
    )
    disable_radix_cache: bool = setting(False, "requests never share the KV of equal prefixes")
    radix_eviction_policy: str = setting(
        "lru", "which cached prefix goes when pages run out", Legal(POLICY_NAMES)
    )
    radix_eviction_policy_config: Mapping[str, Any] | None = setting(
        None, 'the policy\'s parameters, as JSON: {"protected_threshold": 2}'
    )


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    max_running_requests: int | None = setting(None, "requests that run at once", AT_LEAST_ONE)
    max_queued_requests: int | None = setting(
        None, "requests that may wait; one more gets a 503; default: any number", AT_LEAST_ONE
    )
    chunked_prefill_size: int | None = setting(
        None, "prompt tokens computed per step; -1: whole prompts", Legal(at_least=1, also=-1)
    )
    max_prefill_tokens: int = setting(
        16384, "prompt tokens that one step takes in, unless its first prompt alone has more",
        AT_LEAST_ONE,
    )  # fmt: skip
    prefill_max_requests: int | None = setting(
        None, "requests that one step takes in; default: any number", AT_LEAST_ONE
    )
    schedule_policy: str = setting(
        "fcfs", "order of the waiting requests; lpm is fcfs above 128 of them",
        Legal(SCHEDULE_POLICIES),
    )  # fmt: skip
    enable_priority_scheduling: bool = setting(
        False, "more important requests go first, and may take the place of running ones"
    )
    disable_priority_preemption: bool = setting(False, "running requests keep their place")
    priority_scheduling_preemption_threshold: int = setting(
        10, "how much more important a request must be to take a running one's place",
        Legal(at_least=0),
    )  # fmt: skip
    schedule_low_priority_values_first: bool = setting(
        False, "a lower priority value is more important"
    )
    default_priority_value: int | None = setting(
        None, "priority of requests that bring none; default: the least important"
    )
    retraction_policy: str = setting(
        "length", "which running request gives way when pages run out: the one with the least "
        "generated, or the least important first",
        Legal(("length", "priority")),
    )  # fmt: skip
    schedule_conservativeness: float = setting(
        1.0, "scales the tokens that running requests are expected to generate; lower admits more",
        Legal(above=0),
    )  # fmt: skip
    clip_max_new_tokens_estimation: int = setting(
        4096, "tokens that a request is expected to generate at most", AT_LEAST_ONE
    )
    admission: str = setting(
        "observed", "how that is estimated: from what finished requests generated, or by SGLang's "
        "decaying share of max_new_tokens",
        Legal(("observed", "sglang")),
    )  # fmt: skip
    enable_mixed_chunk: bool = setting(
        False, "with --admission sglang: running requests decode in prefill steps too"
    )
    num_continuous_decode_steps: int = setting(
        1, "decode steps before waiting requests are looked at again", AT_LEAST_ONE
    )
    disable_overlap_schedule: bool = setting(False, "plan a step only when the one before is done")
    stream_interval: int = setting(1, "tokens per streamed delta, after the first", AT_LEAST_ONE)
    decode_log_interval: int = setting(40, "decode steps per log line", AT_LEAST_ONE)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str | None = setting(None, "cpu or cuda; default: cuda where there is one")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Immutable. `from_flags` takes the flat names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> EngineConfig:
        """Raises: ConfigError for an unknown name or an illegal value."""
        config = cls().replace(flags)
        config.check()
        return config

    def replace(self, changes: Mapping[str, Any]) -> EngineConfig:
        """The same with other values, by flat name.

        Raises: ConfigError for an unknown name.
        """
        groups = {each.name: getattr(self, each.name) for each in fields(self)}
        owners = {each.name: name for name, group in groups.items() for each in fields(group)}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for name, value in changes.items():
            if name not in owners:
                close = difflib.get_close_matches(name, owners, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{name} is not a setting{hint}")
            chosen[owners[name]][name] = value
        return EngineConfig(
            **{name: type(g)(**(_values(g) | chosen[name])) for name, g in groups.items()}
        )

    def values(self) -> dict[str, Any]:
        """Every setting by flat name, in the order of the help."""
        flat: dict[str, Any] = {}
        for each in fields(self):
            flat |= _values(getattr(self, each.name))
        return flat

    def check(self) -> None:
        """Raises: ConfigError that names the flag and what is legal."""
        for group in (getattr(self, each.name) for each in fields(self)):
            for each in fields(group):
                _check(each, getattr(group, each.name))
        make_policy(
            self.memory.radix_eviction_policy, self.memory.radix_eviction_policy_config or {}
        )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kind_of(each: Field[Any]) -> str:
    """`int`, `float`, `bool`, `str` or `Mapping`: what a setting holds when it is not None."""
    return str(each.type).removesuffix(" | None").split("[")[0]


def _values(group: Any) -> dict[str, Any]:
    return {each.name: getattr(group, each.name) for each in fields(group)}


def _check(each: Field[Any], value: Any) -> None:
    if value is None and each.default is None:
        return
    kind, legal = kind_of(each), each.metadata["legal"]
    is_kind = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind == "float" and is_kind:
        is_kind = math.isfinite(value)
    if not is_kind or value not in legal:
        noun = "" if legal.choices else _NOUNS[kind]
        range_ = str(legal)
        raise ConfigError(
            f"{flag(each.name)} must be {' '.join(filter(None, (noun, range_)))}, got {value!r}"
        )
