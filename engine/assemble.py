"""Settings -> a scheduler with its owners: pages and tree, order, estimate, admission, retraction.

The one place in the engine that turns flags into objects.
"""

from __future__ import annotations

import random

from treadle.engine.admission import Limits
from treadle.engine.config import EngineConfig
from treadle.engine.estimator import NewTokenRatio, ObservedLengths, OutputEstimator
from treadle.engine.eviction import make_policy
from treadle.engine.info import Parts
from treadle.engine.kv_pages import KvPages
from treadle.engine.policy import QueuePolicy
from treadle.engine.radix_cache import RadixCache
from treadle.engine.retraction import RetractionRules
from treadle.engine.scheduler import Rules, Scheduler
from treadle.engine.waiting import WaitingQueue
from treadle.graphs.step import Capacity


def build_scheduler(parts: Parts) -> Scheduler:
    config, capacity = parts.config, parts.executor.capacity
    schedule = config.schedule
    pages = KvPages(capacity.groups, _cache(config, capacity))
    policy = QueuePolicy(schedule, pages.cache, random.Random(config.model.random_seed))
    is_observed = schedule.admission == "observed"
    kind = ObservedLengths if is_observed else NewTokenRatio
    estimator: OutputEstimator = kind(
        schedule.schedule_conservativeness, schedule.clip_max_new_tokens_estimation
    )
    chunk = parts.chunked_prefill_size
    limits = Limits(
        max_running_requests=min(parts.max_running_requests, capacity.slots),
        chunk_tokens=chunk if chunk > 0 else None,
        max_prefill_tokens=schedule.max_prefill_tokens,
        prefill_max_requests=schedule.prefill_max_requests,
    )
    retraction = RetractionRules(
        order="observed" if is_observed else "sglang",
        by_priority=schedule.retraction_policy == "priority",
        preempts=schedule.enable_priority_scheduling and not schedule.disable_priority_preemption,
        threshold=schedule.priority_scheduling_preemption_threshold,
    )
    rules = Rules(
        limits=limits,
        retraction=retraction,
        mixes=is_observed or schedule.enable_mixed_chunk,
        continuous_decode_steps=schedule.num_continuous_decode_steps,
    )
    waiting = WaitingQueue(
        policy, schedule.max_queued_requests, schedule.enable_priority_scheduling
    )
    return Scheduler(capacity, rules, pages, waiting, estimator)


def _cache(config: EngineConfig, capacity: Capacity) -> RadixCache | None:
    """The prefix tree, where there is one group of pages and it keeps every page."""
    memory = config.memory
    is_plain = len(capacity.groups) == 1 and capacity.groups[0].window is None
    if memory.disable_radix_cache or not is_plain:
        return None
    policy = make_policy(memory.radix_eviction_policy, memory.radix_eviction_policy_config or {})
    return RadixCache(capacity.groups[0].page_size, policy)
