"""The body of `/v1/completions`. Knows no engine."""

from __future__ import annotations

from typing import Annotated

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.engine.sampling_params import MAX_N
from treadle.http.wire.base import AnyPrompts, FastList, Rid, Unbuilt, between
from treadle.http.wire.common import CommonFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20


class CompletionRequest(CommonFields):
    prompt: AnyPrompts
    max_tokens: int = DEFAULT_MAX_TOKENS
    echo: bool = False
    rid: Rid | FastList[Rid] | None = None
    best_of: Annotated[int, between(1, MAX_N)] | None = None
    suffix: Unbuilt[str] = None
    logprobs: Unbuilt[Annotated[int, between(0, MAX_LOGPROBS)]] = None

    def check(self) -> None:
        """What no single field can tell.

        Raises: InvalidRequest, NotBuilt.
        """
        self.check_common()
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}), got {self.best_of}", "best_of")
        if self.best_of is not None and self.best_of > n:
            raise NotBuilt("best_of", "only as many as n")

    def client_name(self, name: str) -> str:
        return "max_tokens" if name == "max_new_tokens" else super().client_name(name)
