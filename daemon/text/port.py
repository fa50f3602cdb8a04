"""What the API asks of the text workers."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable
from typing import Protocol

from daemon.models.entry import ModelEntry
from daemon.text.jobs import TextFacts
from daemon.text.token_table import TokenTable


class TextPort(Protocol):
    """Tokenising and templates, done in a helper process. Token ids come back packed (`array("i")`), so that counting them
    against max_model_len costs nothing and only an accepted prompt becomes a list."""

    def encode(
        self,
        model: ModelEntry,
        text: str | bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
    ) -> Awaitable[list[array[int]]]:
        """Returns one array per prompt. `text`: one prompt, or a list of strings packed as msgpack. `field`: the request's.
        `keep_last`: so many tokens at the end are kept, beside special ones; 0: all. `suffix`: what follows the gap that the model
        fills. Raises HearthError context_length_exceeded (400) if a text cannot fit, as far as that shows before encoding; an
        array may still be too long."""
        ...

    def encode_chat(
        self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0
    ) -> Awaitable[array[int]]:
        """Renders the checkpoint's Jinja template (sandboxed) and encodes it. `messages`: a list of objects packed as msgpack.
        `keep_last`: as for encode. Raises HearthError (400) with the template's own message."""
        ...

    def table(self, model: ModelEntry) -> Awaitable[TokenTable]:
        """The text of every token id. Raises HearthError unsupported_tokenizer (400)."""
        ...

    def facts(self, model: ModelEntry) -> Awaitable[TextFacts]:
        """What the model's template and tokenizer say of its replies. Never raises for a template or tokenizer that is missing."""
        ...

    def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> Awaitable[list[bytes]]:
        """`kind`, `prompt`, `options`: "text" and what `encode` takes, or "messages" and what `encode_chat` takes; options also
        hold token_strings. Three parts: how many tokens, and as JSON their ids and (or null) how the vocabulary writes them."""
        ...

    def detokenize(self, model: ModelEntry, ids: bytes) -> Awaitable[bytes]:
        """`ids`: packed int32. The text as a JSON string, special tokens included."""
        ...

    def check_grammar(self, field: str, grammar: str) -> Awaitable[None]:
        """Raises HearthError (400) naming `field`, with the reason why `grammar` (SamplingParams.grammar) cannot be followed."""
        ...

    def parse_body(self, reader: str, body: bytes) -> Awaitable[tuple[bytes, bytes]]:
        """Decodes and checks a large request body off the event loop. reader: the function that does it, MODULE:NAME. Returns the
        two parts that it gives, the small one packed as msgpack. Raises what it raises."""
        ...
