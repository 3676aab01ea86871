"""`--explain`: every setting, the value it would run with and why, and the memory equation.

Reads the model's description, never its weights; starts nothing.
"""

from __future__ import annotations

from treadle.engine.config import EngineConfig, flag
from treadle.tools.compose import Survey, survey

VALUE_WIDTH = 16  # paths are longer and stick out


def explain(config: EngineConfig) -> str:
    """One line per setting, then memory term by term.

    Raises: ConfigError, ModelError.
    """
    found = survey(config)
    rows = [(flag(name), value, why) for name, (value, why) in _settings(config, found).items()]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:{width}}  {value:{VALUE_WIDTH}}  {why}" for name, value, why in rows]
    resolved = found.resolved
    contexts = resolved.max_total_tokens / resolved.context_length
    lines += [
        "",
        f"Memory: {resolved.equation}",
        f"The KV pool of {resolved.max_total_tokens} tokens holds {contexts:.1f} full contexts.",
        *(f"Warning: {warning}" for warning in resolved.warnings),
    ]
    return "\n".join(lines)


def _settings(config: EngineConfig, found: Survey) -> dict[str, tuple[str, str]]:
    """Value and why, by flat name."""
    default, resolved = EngineConfig().values(), found.resolved
    settings = {
        name: (
            "none" if value is None else str(value),
            resolved.reasons.get(name) or ("default" if value == default[name] else "given"),
        )
        for name, value in resolved.config.values().items()
    }
    return settings | found.reasons
