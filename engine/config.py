"""Every start-up setting by concern, and how the automatic ones get their values and reasons.

Knows names, ranges and formulas; never a device or a file. Flag names are SGLang's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from treadle.engine.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
HOST_MAX_RUNNING = 256  # logits of a step grow with it: 256 rows x 128k ids x 4 bytes = 128 MiB
HOST_CHUNK = 512  # above this a prefill gains nothing on a host and delays decodes longer
DEVICE_CHUNK = 4096
DEFAULT_CONTEXTS = 16  # full contexts the automatic pool holds at most


def setting(default: Any, doc: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A flag: its default, its help text and its closed set of values, if any."""
    return field(default=default, metadata={"help": doc, "choices": choices})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_path: str | None = setting(
        None, "a GGUF file, a Hugging Face folder or a name in the local hub cache; "
        "without it the embedded model is served",
    )  # fmt: skip
    served_model_name: str | None = setting(None, "the name clients use; default: the model path")
    tokenizer_path: str | None = setting(None, "default: the model path")
    load_format: str = setting("auto", "dummy makes random weights", choices=LOAD_FORMATS)
    dtype: str = setting("auto", "auto is the checkpoint's own", choices=DTYPES)
    context_length: int | None = setting(
        None, "tokens of the longest sequence; default: the model's"
    )
    random_seed: int | None = setting(None, "seeds the requests that bring no seed of their own")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    page_size: int | None = setting(None, "tokens per KV page; default: 1")
    max_total_tokens: int | None = setting(None, "tokens in the KV pool; default: what fits")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    max_running_requests: int | None = setting(None, "requests that run at once")
    chunked_prefill_size: int | None = setting(
        None, "prompt tokens computed per step; -1: whole prompts"
    )
    stream_interval: int = setting(1, "tokens per streamed delta, after the first")
    decode_log_interval: int = setting(40, "decode steps per log line")


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
        default = cls()
        groups = {f.name: getattr(default, f.name) for f in fields(cls)}
        owners = {f.name: name for name, group in groups.items() for f in fields(group)}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for name, value in flags.items():
            if name not in owners:
                close = difflib.get_close_matches(name, owners, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{name} is not a setting{hint}")
            chosen[owners[name]][name] = value
        config = cls(**{name: type(group)(**chosen[name]) for name, group in groups.items()})
        config.check()
        return config

    def check(self) -> None:
        """Raises: ConfigError that names the flag and its legal range."""
        for group in (getattr(self, f.name) for f in fields(self)):
            for each in fields(group):
                choices, value = each.metadata["choices"], getattr(group, each.name)
                if choices and value not in choices:
                    raise ConfigError(f"{flag(each.name)} must be one of {', '.join(choices)}, "
                                      f"got {value!r}")  # fmt: skip
        at_least_one = {
            "context_length": self.model.context_length,
            "page_size": self.memory.page_size,
            "max_total_tokens": self.memory.max_total_tokens,
            "max_running_requests": self.schedule.max_running_requests,
            "stream_interval": self.schedule.stream_interval,
            "decode_log_interval": self.schedule.decode_log_interval,
        }
        for name, value in at_least_one.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{flag(name)} must be an integer of at least 1, got {value!r}")
        chunk = self.schedule.chunked_prefill_size
        if chunk is not None and (type(chunk) is not int or not (chunk == -1 or chunk >= 1)):
            raise ConfigError(f"--chunked-prefill-size must be -1 or at least 1, got {chunk!r}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model and the machine say; the automatic values follow from it."""

    max_position: int  # tokens
    bytes_per_token: int  # KV bytes of one token over all layers
    free_bytes: int  # memory for KV, weights already loaded
    is_host: bool


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings an engine runs with. `reasons` tells why, by flat name."""

    context_length: int
    page_size: int
    max_total_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    reasons: Mapping[str, str]


def context_length(config: EngineConfig, max_position: int) -> int:
    """Tokens of the longest sequence to serve.

    Raises: ConfigError when the model has fewer positions than asked for.
    """
    chosen = config.model.context_length or max_position
    if chosen > max_position:
        raise ConfigError(
            f"--context-length {chosen} is beyond the model's {max_position} positions"
        )
    return chosen


def resolve(config: EngineConfig, facts: ModelFacts) -> Resolved:
    """Gives every automatic setting its value and says why.

    Raises: ConfigError that names the flags to change, and to what.
    """
    reasons: dict[str, str] = {}

    def pick(name: str, given: int | None, automatic: int, why: str) -> int:
        reasons[name] = "given" if given is not None else why
        return automatic if given is None else given

    context = context_length(config, facts.max_position)
    pick("context_length", config.model.context_length, context, "the model's own")
    page_size = pick("page_size", config.memory.page_size, 1, "finest prefix sharing")
    total, reasons["max_total_tokens"] = _pool_tokens(config, facts, context, page_size)
    chunk = pick("chunked_prefill_size", config.schedule.chunked_prefill_size,
                 HOST_CHUNK if facts.is_host else DEVICE_CHUNK,
                 "a host gains nothing above it" if facts.is_host else "common GPU value",
                 )  # fmt: skip
    automatic = max(1, min(total // 2, max(2048, min(total * 512 // context, 4096))))
    if facts.is_host:
        automatic = min(automatic, HOST_MAX_RUNNING)
    running = pick("max_running_requests", config.schedule.max_running_requests, automatic,
                   "pool tokens / context length x 512, within bounds")  # fmt: skip
    return Resolved(context, page_size, total, min(running, total), chunk, reasons)


def _pool_tokens(
    config: EngineConfig, facts: ModelFacts, context: int, page_size: int
) -> tuple[int, str]:
    fitting = facts.free_bytes // 2 // facts.bytes_per_token
    given = config.memory.max_total_tokens
    wanted = DEFAULT_CONTEXTS * context if given is None else given
    tokens = -(-min(wanted, fitting) // page_size) * page_size
    if tokens > fitting:
        tokens -= page_size
    if tokens < 2 or tokens < page_size:
        raise ConfigError(
            f"the KV pool would hold {max(tokens, 0)} tokens: half of the free memory is "
            f"{facts.free_bytes / 2**31:.2f} GB at {facts.bytes_per_token} bytes a token; "
            "free memory, or choose a smaller model or --page-size"
        )
    if given is not None and wanted <= fitting:
        return tokens, "given" if tokens == given else "given, rounded up to whole pages"
    if wanted > fitting:
        return tokens, "half of the free memory"
    return tokens, f"{DEFAULT_CONTEXTS} full contexts"
