"""Every start-up setting by concern: its name, its default, its help and what is legal.

Knows no formula, model or device; `resolve` gives the automatic ones their values. Flag names are
SGLang's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from treadle.engine.errors import ConfigError
from treadle.engine.eviction import POLICY_NAMES, make_policy
from treadle.engine.graph_config import GraphConfig, wish
from treadle.engine.settings import AT_LEAST_ONE, Legal, check_setting, flag, names_of, setting

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")  # they ask the prefix cache; without it: fcfs


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_path: str | None = setting(
        None, "a GGUF file, a Hugging Face folder or a name in the local hub cache; "
        "without it the embedded model is served",
        aliases=("model",),
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
    random_seed: int | None = setting(
        None, "seeds the requests that bring no seed of their own", aliases=("seed",)
    )


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
    enable_memory_saver: bool = setting(
        False, "weights and KV pool can be given back to the system while nothing runs"
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
class ParallelConfig:
    tp_size: int = setting(
        1, "ranks that share one model, each with a device of its own",
        AT_LEAST_ONE, aliases=("tp", "tensor_parallel_size"),
    )  # fmt: skip
    nnodes: int = setting(1, "machines that the ranks are spread over", AT_LEAST_ONE)
    node_rank: int = setting(0, "which machine this is; the one with 0 serves", Legal(at_least=0))
    dist_init_addr: str | None = setting(
        None, "host:port on machine 0 where ranks meet; default: a free port, on one machine",
        aliases=("nccl_init_addr",),
    )  # fmt: skip
    nccl_port: int | None = setting(
        None, "on one machine: the port where ranks meet", Legal(at_least=1, below=65536)
    )
    dist_timeout: int | None = setting(
        None, "seconds that ranks wait for each other; default: 600", AT_LEAST_ONE
    )
    enable_p2p_check: bool = setting(
        False, "find out whether GPUs reach each other's memory, and do without where they don't"
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str | None = setting(None, "cpu or cuda; default: cuda where there is one")
    base_gpu_id: int = setting(0, "the first rank's GPU on this machine", Legal(at_least=0))
    watchdog_timeout: float = setting(
        300.0, "seconds that a step may take beyond what is expected of it before the device "
        "counts as lost", Legal(above=0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelConfig:
    attention_backend: str | None = setting(
        None, "what computes attention; auto, the default: the first that serves model and device"
    )
    prefill_attention_backend: str | None = setting(
        None, "the same for prompts; default: --attention-backend"
    )
    decode_attention_backend: str | None = setting(
        None, "the same for generated tokens; default: --attention-backend"
    )
    sampling_backend: str | None = setting(
        None, "what picks tokens; auto, the default: the first that runs on the device"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Immutable. `from_flags` takes the flat names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> EngineConfig:
        """Raises: ConfigError for an unknown name or an illegal value."""
        config = cls().replace(flags)
        config.check()
        return config

    def replace(self, changes: Mapping[str, Any]) -> EngineConfig:
        """The same with other values, by flat name or alias.

        Raises: ConfigError for an unknown name, and for a name and its alias with unlike values.
        """
        owners = _owners()
        chosen: dict[str, dict[str, Any]] = {each.name: {} for each in fields(self)}
        for name, value in changes.items():
            if name not in owners:
                close = difflib.get_close_matches(name, owners, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{name} is not a setting{hint}")
            group, each = owners[name]
            before = chosen[group].get(each.name, each.default)
            if before == each.default:
                chosen[group][each.name] = value
            elif value not in (before, each.default):
                names = " and ".join(map(flag, names_of(each)))
                raise ConfigError(f"{names} are one setting, got both {before!r} and {value!r}")
        return EngineConfig(**{
            group: type(now)(**(_values(now) | new))
            for group, new in chosen.items()
            for now in (getattr(self, group),)
        })  # fmt: skip

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
                check_setting(each, getattr(group, each.name))
        make_policy(
            self.memory.radix_eviction_policy, self.memory.radix_eviction_policy_config or {}
        )
        wish(self.graphs, "decode")
        wish(self.graphs, "prefill")


@cache
def _owners() -> Mapping[str, tuple[str, Field[Any]]]:
    """Group and declaration of every setting, by flat name and alias."""
    config = EngineConfig()
    return {
        name: (group.name, each)
        for group in fields(config)
        for each in fields(getattr(config, group.name))
        for name in names_of(each)
    }


def _values(group: Any) -> dict[str, Any]:
    return {each.name: getattr(group, each.name) for each in fields(group)}
