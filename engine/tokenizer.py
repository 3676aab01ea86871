"""The engine's view of a tokenizer. Knows no backend: `treadle.tools.compose` brings one.

What the engine asks of it: encode text off the loop, render chats, and give each token's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Encodes, decodes and renders chats. Methods marked [thread] may be called off the loop."""

    @property
    def vocab_size(self) -> int:
        """Ids below this one have a meaning; the model's embedding may be larger."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation, from the tokenizer and the generation config."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """[thread] One list of ids per text. Releases the GIL while it works."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """[thread] The prompt text of a chat; already holds its special tokens.

        Raises: InvalidRequest with the template's own message when the template refuses.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; empty for ids without a meaning."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
