"""TextPort: templates and tokenizers in helper processes, one worker a model, the least recently used ones ended."""

from __future__ import annotations

import asyncio
import itertools
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

import msgspec

from daemon.contracts import ModelEntry
from daemon.errors import BadRequest
from daemon.text.helper import Helper, Worker, WorkerDied
from daemon.text.jobs import (
    BuildTable,
    CheckGrammar,
    Describe,
    Detokenize,
    Encode,
    EncodeChat,
    Job,
    Open,
    ParseBody,
    TextFacts,
    Tokenize,
    is_template_text,
)
from daemon.text.token_table import PackedTable, TokenTable

MAX_WORKERS = 4  # models whose tokenizers stay parsed: 33-109 MB each for vocabularies of 128k and more
MAX_TABLES = 64  # 1.5-3 MB each
MAX_FACTS = 1024

_Key = tuple[str, str, str | None]  # path, fingerprint, chat template: changed files are another model
_NO_MODEL: _Key = ("", "", None)
_GRAMMARS: _Key = ("", "grammars", None)
_facts_decoder = msgspec.msgpack.Decoder(TextFacts)
_table_decoder = msgspec.msgpack.Decoder(PackedTable)


class TextService:
    """All methods may raise HearthError. A job whose worker dies is tried once more, alone in a new one."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max_workers
        self._helper = Helper()
        self._workers: OrderedDict[_Key, asyncio.Task[Worker]] = OrderedDict()
        self._tables: OrderedDict[_Key, asyncio.Task[TokenTable]] = OrderedDict()
        self._facts: dict[_Key, TextFacts] = {}
        self._job_ids = itertools.count(1)

    async def start(self) -> None:
        """Starts the helper ahead of its first use. Optional."""
        await self._helper.start()

    async def close(self) -> None:
        for task in [*self._tables.values(), *self._workers.values()]:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None and isinstance(worker := task.result(), Worker):
                worker.close()
        self._workers.clear()
        self._tables.clear()
        await asyncio.to_thread(self._helper.end)

    async def encode(self, model: ModelEntry, text: str | bytes, add_special_tokens: bool = True) -> list[array[int]]:
        texts = msgspec.msgpack.encode([text]) if isinstance(text, str) else text
        parts = await self._run(_open(model), lambda job_id: Encode(job_id, texts, add_special_tokens), "prompt")
        return [_unpacked(part) for part in parts]

    async def encode_chat(self, model: ModelEntry, messages: bytes, options: dict[str, object]) -> array[int]:
        packed = msgspec.msgpack.encode(options)
        parts = await self._run(_open(model), lambda job_id: EncodeChat(job_id, messages, packed), "messages")
        return _unpacked(parts[0])

    async def parse_body(self, endpoint: str, body: bytes) -> tuple[bytes, bytes]:
        head, prompt = await self._run((_NO_MODEL, Open("", "", None)), lambda job_id: ParseBody(job_id, endpoint, body), None)
        return head, prompt

    async def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> list[bytes]:
        packed, param = msgspec.msgpack.encode(options), "messages" if kind == "messages" else "prompt"
        return await self._run(_open(model), lambda job_id: Tokenize(job_id, kind, prompt, packed), param)

    async def detokenize(self, model: ModelEntry, ids: bytes) -> bytes:
        (text,) = await self._run(_open(model), lambda job_id: Detokenize(job_id, ids, model.vocab_size), "tokens")
        return text

    async def facts(self, model: ModelEntry) -> TextFacts:
        key, _ = _open(model)
        known = self._facts.get(key)
        if known is None:
            (part,) = await self._run(_open(model), Describe, "model")
            known = self._facts[key] = _facts_decoder.decode(part)
            while len(self._facts) > MAX_FACTS:
                del self._facts[next(iter(self._facts))]
        return known

    async def check_grammar(self, field: str, grammar: str) -> None:
        await self._run((_GRAMMARS, Open("", "", None)), lambda job_id: CheckGrammar(job_id, field, grammar), field)

    async def table(self, model: ModelEntry) -> TokenTable:
        key, _ = _open(model)
        task = self._tables.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tables[key] = asyncio.get_running_loop().create_task(self._build(model))
            while len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        # shared: one client's disconnect must not fail the others'
        return task.result() if task.done() else await asyncio.shield(task)

    async def _build(self, model: ModelEntry) -> TokenTable:
        parts = await self._run(_open(model), BuildTable, "model")
        return TokenTable(_table_decoder.decode(parts[0]), model.vocab_size)

    async def _run(self, where: tuple[_Key, Open], make: Callable[[int], Job], param: str | None) -> list[bytes]:
        key, opening = where
        job = make(next(self._job_ids))
        try:
            return await (await self._worker(key, opening)).call(job)
        except WorkerDied:
            pass
        # alone, so that a job that kills its worker cannot take another with it twice
        alone = await self._helper.connect(opening)
        try:
            return await alone.call(job)
        except WorkerDied:
            raise BadRequest(
                "invalid_request", "the text helper died twice on this request: it needs too much time or memory", param=param
            ) from None
        finally:
            alone.close()

    async def _worker(self, key: _Key, opening: Open) -> Worker:
        task = self._workers.get(key)
        if task is not None and task.done() and (task.cancelled() or task.exception() is not None or not task.result().alive):
            task = None
        if task is None:
            task = self._workers[key] = asyncio.get_running_loop().create_task(self._helper.connect(opening))
            self._end_idle(key)
        self._workers.move_to_end(key)
        return task.result() if task.done() else await asyncio.shield(task)

    def _end_idle(self, but: _Key) -> None:
        """The least recently used workers without a job, down to the limit. Those without a model do not count."""
        for key, task in list(self._workers.items()):
            if len(self._workers.keys() - {_NO_MODEL, _GRAMMARS}) <= self._max_workers:
                return
            if key in (but, _NO_MODEL, _GRAMMARS) or not task.done():
                continue
            if task.cancelled() or task.exception() is not None:
                del self._workers[key]
            elif not task.result().num_waiting:
                del self._workers[key]
                task.result().close()


def _open(model: ModelEntry) -> tuple[_Key, Open]:
    return _opening(model.name, model.path, model.fingerprint, model.chat_template)


@lru_cache(maxsize=MAX_FACTS)
def _opening(name: str, path: str, fingerprint: str, template: str | None) -> tuple[_Key, Open]:
    # the helper's working folder is /
    path = os.path.abspath(path)
    if template is not None and not is_template_text(template):
        template = os.path.abspath(template)
    return (path, fingerprint, template), Open(name, path, template)


def _unpacked(part: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(part)
    return ids
