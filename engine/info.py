"""What an engine serves, how busy it is, and what composition hands to it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.engine.config import EngineConfig
from treadle.engine.tokenizer import Tokenizer
from treadle.graphs.step import Executor, GraphReport

NO_GRAPHS = GraphReport({}, {}, 0)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves, fixed at start-up."""

    served_model_name: str
    model_path: str
    tokenizer_path: str
    architectures: tuple[str, ...]
    model_type: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # rows of the embedding
    created: int  # seconds since 1970
    version: str
    server_args: Mapping[str, object]  # every resolved setting by SGLang's flat name
    weight_bytes: int = 0
    kv_bytes: int = 0  # page tables included
    available_bytes: int = 0  # what the device had left when everything was loaded
    startup_s: Mapping[str, float] = field(default_factory=dict)  # by phase, hundredths

    @property
    def startup_time(self) -> float:
        """Seconds; the phases add up to it."""
        return round(sum(self.startup_s.values()), 2)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is now, and how far the capture of its graphs is."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int  # prompt tokens that no step has been planned for
    num_used_tokens: int
    num_total_tokens: int  # used and waiting
    max_total_num_tokens: int
    last_gen_throughput: float  # tokens a second
    graphs: GraphReport = NO_GRAPHS


@dataclass(frozen=True, slots=True)
class Parts:
    """What composition brings."""

    executor: Executor
    tokenizer: Tokenizer | None
    info: EngineInfo
    max_running_requests: int
    chunked_prefill_size: int
    config: EngineConfig
