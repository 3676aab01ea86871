"""`--explain`: every setting, the value it would run with and why, and the memory equation.

Reads the model's description, never its weights; starts nothing.
"""

from __future__ import annotations

from treadle.engine.config import EngineConfig
from treadle.engine.settings import flag
from treadle.tools.survey import Survey, survey

VALUE_WIDTH = 16  # paths and lists are longer and stick out
WHOLE_LIST = 8  # numbers; of longer lists the first ones and the last


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
            _text(value),
            resolved.reasons.get(name) or ("default" if value == default[name] else "given"),
        )
        for name, value in resolved.config.values().items()
    }
    return settings | found.reasons


def _text(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, (list, tuple)):
        return str(value)
    if len(value) <= WHOLE_LIST:
        return ", ".join(map(str, value))
    first = ", ".join(map(str, value[:3]))
    return f"{first}, ... {value[-1]} ({len(value)} sizes)"
