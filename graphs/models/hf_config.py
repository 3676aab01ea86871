"""Reads typed values from a Hugging Face config and names the key when one is wrong.

Knows no architecture: adapters say which keys they need and what a missing one means.
"""

from __future__ import annotations

from collections.abc import Mapping


class HfConfig:
    """A view of config.json. A null counts as absent, except for `has`.

    Every reader raises ValueError naming the key, what was expected and what was found.
    """

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is present, be it null."""
        return key in self._values

    def get(self, key: str) -> object:
        return self._values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number of at least 1", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self._wrong(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, int | float) for v in value):
            raise self._wrong(key, "a list of numbers", value)
        return tuple(float(v) for v in value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in ids):
            raise self._wrong(key, "a token id or a list of them", value)
        return tuple(ids)

    def section(self, key: str) -> HfConfig:
        """The object under the key, empty when absent."""
        value = self._values.get(key)
        if value is None:
            return HfConfig({}, f"{self._prefix}{key}.")
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return HfConfig(value, f"{self._prefix}{key}.")

    def __bool__(self) -> bool:
        return bool(self._values)

    def _wrong(self, key: str, expected: str, found: object) -> ValueError:
        shown = "nothing" if found is None else repr(found)
        return ValueError(f"{self._prefix}{key}: expected {expected}, found {shown}")
