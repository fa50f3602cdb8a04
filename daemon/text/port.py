"""The interface through which the API uses the text workers."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable
from typing import Protocol

from daemon.models.entry import ModelEntry
from daemon.text.jobs import TextFacts
from daemon.text.places import Share
from daemon.text.token_table import TokenTable


class TextPort(Protocol):
    """The interface to chat templates and tokenizers, which run in helper processes. Token ids are returned packed (`array("i")`),
    so that they can be counted at no cost; only an accepted prompt becomes a list."""

    def of(self, share: Share) -> TextPort:
        """Returns the port for the requests of one tenant. share: the tenant's share of the work."""
        ...

    def encode(
        self,
        model: ModelEntry,
        text: str | bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
        keep_first: int = 0,
    ) -> Awaitable[list[array[int]]]:
        """Returns the token ids of each prompt as one array.

        `text`: one prompt, or a list of prompts packed as msgpack. `field`: the request's field, named in errors. `keep_last`: how
        many tokens at each prompt's end are kept, special tokens included; 0 keeps all. `suffix`: the text after the gap that the
        model fills. `keep_first`: how many tokens at each prompt's beginning are kept, likewise. Raises HearthError
        context_length_exceeded (400) if a text is certain to be too long even without encoding it. Other texts may also turn out
        too long, which the caller has to check."""
        ...

    def encode_pairs(
        self, model: ModelEntry, texts: bytes, fields: tuple[str, str], keep: int = 0, keep_second: int = 0
    ) -> Awaitable[tuple[array[int], list[array[int]]]]:
        """Returns two values for pairs of texts: for each pair the index at which the segment of its second text begins (0: it has
        none), and for each pair its token ids.

        `texts`: a list of first texts (one for all pairs, or one for each) and a list of second texts, packed as msgpack. `fields`:
        the request's fields, named in errors. `keep`: how many tokens of a pair are kept, special ones included, by cutting the
        second text at its end; `keep_second`: how many of the second text; 0 keeps all. Raises HearthError (400) in the same cases
        as `encode`, and if `keep` leaves no room for the second text."""
        ...

    def encode_chat(
        self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0
    ) -> Awaitable[array[int]]:
        """Renders the checkpoint's Jinja template (sandboxed) and returns the token ids of the result. `messages`: a list of
        objects packed as msgpack. `options`: those of EncodeChat (daemon/text/jobs.py). `keep_last`: as for encode. Raises
        HearthError (400) with the template's own message."""
        ...

    def table(self, model: ModelEntry) -> Awaitable[TokenTable]:
        """Returns the table of each token id's text. Raises HearthError unsupported_tokenizer (400) for a tokenizer whose decoder
        cannot be reproduced."""
        ...

    def facts(self, model: ModelEntry) -> Awaitable[TextFacts]:
        """Returns how the model's replies are to be parsed: the dialects of tool calls and reasoning, and the special tokens that
        mark them. A missing template or tokenizer is no error."""
        ...

    def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> Awaitable[list[bytes]]:
        """Returns three parts: the number of tokens, their ids as JSON, and the vocabulary's strings for them as JSON (null if not
        wanted).

        `kind`: "text", with a `prompt` and `options` as for `encode`, or "messages", with `prompt` and `options` as for
        `encode_chat`. The options also hold token_strings: whether the third part is wanted."""
        ...

    def detokenize(self, model: ModelEntry, ids: bytes) -> Awaitable[bytes]:
        """Returns the text of the tokens as a JSON string, special tokens included. `ids`: packed int32."""
        ...

    def check_grammar(self, field: str, grammar: str) -> Awaitable[None]:
        """Raises HearthError (400) that names `field` and the reason, if `grammar` (as in SamplingParams.grammar) cannot be
        followed."""
        ...

    def parse_body(self, reader: str, body: bytes) -> Awaitable[tuple[bytes, bytes]]:
        """Parses a large request body in a text worker. reader: the function that parses it, MODULE:NAME. Returns that function's
        result: the fields that the daemon needs, packed as msgpack, and the prompt. Raises what the function raises."""
        ...
