"""Treadle's public API."""

from treadle.engine.config import EngineConfig
from treadle.engine.engine import Engine
from treadle.engine.errors import (
    ConfigError,
    EngineClosed,
    InvalidRequest,
    ModelError,
    NotBuilt,
    NotIdle,
    QueueFull,
    TreadleError,
)
from treadle.engine.info import EngineInfo, EngineLoad
from treadle.engine.offline import SyncEngine
from treadle.engine.options import RequestOptions
from treadle.engine.output import Completion, FinishReason, RequestOutput
from treadle.engine.sampling_params import SamplingParams

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineInfo",
    "EngineLoad",
    "FinishReason",
    "InvalidRequest",
    "ModelError",
    "NotBuilt",
    "NotIdle",
    "QueueFull",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SyncEngine",
    "TreadleError",
]
