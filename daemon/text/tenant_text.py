"""Implements TextPort for the requests of one tenant: makes their jobs and reads the answers of the text workers."""

from __future__ import annotations

import os
from array import array
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Protocol

import msgspec

from config.chat_templates import is_template_text
from daemon.models.entry import ModelEntry
from daemon.text.jobs import (
    CheckGrammar,
    Describe,
    Detokenize,
    Encode,
    EncodeChat,
    EncodePairs,
    Job,
    Open,
    ParseBody,
    TextFacts,
    Tokenize,
)
from daemon.text.places import Share
from daemon.text.port import TextPort
from daemon.text.token_table import TokenTable

MAX_FACTS = 1024

Key = tuple[str, str, str | None]  # path, ModelEntry.text_id, chat template: a model whose files changed has another key
Where = tuple[Key, Open]  # the worker that does a job
MakeJob = Callable[[int], Job]  # makes a job with the given id
NO_MODEL: Where = ("", "", None), Open("", "", None)
_facts_decoder = msgspec.msgpack.Decoder(TextFacts)


class TextWork(Protocol):
    """The text workers, as a tenant's requests use them. known_facts: the TextFacts of models that were already described
    (`Describe`)."""

    known_facts: dict[Key, TextFacts]

    def run(self, share: Share, at: Where, make: MakeJob, param: str | None) -> Awaitable[list[bytes]]:
        """Does a job and returns the parts of its answer. share: the share of the work of the tenant for whom the job is done. at:
        the worker: the key by which it is found, and the message that opens a new one. make: makes the job from the id that it is
        given. param: the request's field that the job is about, for errors. Raises HearthError."""
        ...

    def run_grammar(self, share: Share, make: MakeJob, param: str, num_bytes: int) -> Awaitable[list[bytes]]:
        """Lets a text worker check a client's grammar, and returns the parts of the worker's answer, encoded. share: the share of
        the work of the client's tenant. make: makes the job from the id that it is given. param: the request's field that contains
        the grammar, for errors. num_bytes: the grammar's length, which is shown to operators while the check waits. Raises
        HearthError if the check fails."""
        ...

    def shared_table(self, model: ModelEntry) -> Awaitable[TokenTable]:
        """Returns the model's token table, which all tenants share."""
        ...


class TenantText:
    """Implements TextPort, the interface to the tokenizers and chat templates that run in helper processes (text workers), for the
    requests of one tenant. share: the tenant's name and weight, by which the workers' time is divided among tenants. All methods
    may raise HearthError."""

    def __init__(self, work: TextWork, share: Share) -> None:
        self._work, self._share = work, share

    async def encode(
        self,
        model: ModelEntry,
        text: str | bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
        keep_first: int = 0,
    ) -> list[array[int]]:
        texts = msgspec.msgpack.encode([text]) if isinstance(text, str) else text
        limit = 0 if keep_last or keep_first else model.max_model_len
        parts = await self._work.run(
            self._share,
            where(model),
            lambda job_id: Encode(job_id, texts, add_special_tokens, limit, field, keep_last, suffix, keep_first),
            field,
        )
        return [_unpacked(part) for part in parts]

    async def encode_pairs(
        self, model: ModelEntry, texts: bytes, fields: tuple[str, str], keep: int = 0, keep_second: int = 0
    ) -> tuple[array[int], list[array[int]]]:
        limit = 0 if keep else model.max_model_len
        begins, *pairs = await self._work.run(
            self._share, where(model), lambda job_id: EncodePairs(job_id, texts, fields, limit, keep, keep_second), fields[1]
        )
        return _unpacked(begins), [_unpacked(part) for part in pairs]

    async def encode_chat(self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0) -> array[int]:
        packed, limit = msgspec.msgpack.encode(options), 0 if keep_last else model.max_model_len
        parts = await self._work.run(
            self._share, where(model), lambda job_id: EncodeChat(job_id, messages, packed, limit, keep_last), "messages"
        )
        return _unpacked(parts[0])

    async def parse_body(self, reader: str, body: bytes) -> tuple[bytes, bytes]:
        head, prompt = await self._work.run(self._share, NO_MODEL, lambda job_id: ParseBody(job_id, reader, body), None)
        return head, prompt

    async def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> list[bytes]:
        packed, param = msgspec.msgpack.encode(options), "messages" if kind == "messages" else "prompt"
        return await self._work.run(self._share, where(model), lambda job_id: Tokenize(job_id, kind, prompt, packed), param)

    async def detokenize(self, model: ModelEntry, ids: bytes) -> bytes:
        (text,) = await self._work.run(
            self._share, where(model), lambda job_id: Detokenize(job_id, ids, model.vocab_size), "tokens"
        )
        return text

    def of(self, share: Share) -> TextPort:
        return TenantText(self._work, share)

    def table(self, model: ModelEntry) -> Awaitable[TokenTable]:
        return self._work.shared_table(model)

    async def facts(self, model: ModelEntry) -> TextFacts:
        at, known = where(model), self._work.known_facts
        facts = known.get(at[0])
        if facts is None:
            (part,) = await self._work.run(self._share, at, Describe, "model")
            facts = known[at[0]] = _facts_decoder.decode(part)
            while len(known) > MAX_FACTS:
                del known[next(iter(known))]
        return facts

    async def check_grammar(self, field: str, grammar: str) -> None:
        await self._work.run_grammar(self._share, lambda job_id: CheckGrammar(job_id, field, grammar), field, len(grammar))


def where(model: ModelEntry) -> Where:
    return _opening(model.name, model.path, model.text_id, model.chat_template)


@lru_cache(maxsize=MAX_FACTS)
def _opening(name: str, path: str, text_id: str, template: str | None) -> Where:
    # absolute, because the helper's working folder is /
    path = os.path.abspath(path)
    if template is not None and not is_template_text(template):
        template = os.path.abspath(template)
    return (path, text_id, template), Open(name, path, template)


def _unpacked(part: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(part)
    return ids
