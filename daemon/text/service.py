"""Implements TextPort: templates and tokenizers run in helper processes, one worker per model; the least recently used workers are
ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from config.chat_templates import is_template_text
from daemon.errors import BadRequest, HearthError, NotNow
from daemon.models.entry import ModelEntry
from daemon.process.long_tasks import LongTasks
from daemon.text.connection import WorkerConnection, WorkerDied
from daemon.text.deaths import HELPER, Death
from daemon.text.helper import Helper
from daemon.text.jobs import (
    BuildTable,
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
from daemon.text.repeated_deaths import RepeatedDeaths
from daemon.text.token_table import PackedTable, TokenTable

log = logging.getLogger("hearthd.text")

MAX_WORKERS = 4  # models whose tokenizers stay parsed: 33-109 MB each for vocabularies of 128k and more
MAX_TABLES = 64  # 1.5-3 MB each
MAX_FACTS = 1024
STALL_S = 30.0  # the default of text_stall_s
SHARED_TRIES = 2  # attempts on a shared worker, which another job may end; after that a job gets a worker of its own
HELPER_PAUSES_S = (0.0, 0.2, 0.5, 1.0)  # before a job that was lost with the text helper is tried again, each time
ALONE_AT_A_TIME = 2
SHOWN_AFTER_S = 1.0
RECENT_S, MAX_RECENT = 600.0, 16  # deaths are reported for this long, and at most this many

_Key = tuple[str, str, str | None]  # path, ModelEntry.text_id, chat template: a model whose files changed has another key
_NO_MODEL: _Key = ("", "", None)
_GRAMMARS: _Key = ("", "grammars", None)
# what `hearth queue` calls a job
_WORK = {
    "Encode": "tokenizing",
    "EncodePairs": "tokenizing",
    "EncodeChat": "chat template, tokenizing",
    "Tokenize": "tokenizing",
    "Detokenize": "detokenizing",
    "Describe": "reading the tokenizer",
    "BuildTable": "reading the vocabulary",
    "ParseBody": "reading the body",
    "CheckGrammar": "checking the grammar",
}
_facts_decoder = msgspec.msgpack.Decoder(TextFacts)
_table_decoder = msgspec.msgpack.Decoder(PackedTable)


@dataclass(slots=True, frozen=True)
class _Recent:
    last_s: float
    count: int
    details: str


class TextService:
    """Runs jobs on requests' texts in worker processes. All methods may raise HearthError.

    A job that takes too long, or crashes its worker, is refused at once. Another worker does the jobs that waited after it, and any
    job whose worker was killed from outside. stall_s: returns the setting text_stall_s, in seconds. num_deaths: the number of
    workers that died, by cause; updated here."""

    def __init__(
        self,
        tasks: LongTasks,
        max_workers: int = MAX_WORKERS,
        stall_s: Callable[[], float] = lambda: STALL_S,
        num_deaths: MutableMapping[str, int] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """preload: modules with the functions that parse bodies; the helper imports them before it forks workers."""
        self._tasks, self._max_workers = tasks, max_workers
        self._helper = Helper(tasks, stall_s, self._died, preload)
        self._num_deaths: MutableMapping[str, int] = {} if num_deaths is None else num_deaths
        self._recent: dict[tuple[str, str], _Recent] = {}  # by model and cause
        self._repeated = RepeatedDeaths()
        self._workers: OrderedDict[_Key, asyncio.Task[WorkerConnection]] = OrderedDict()
        self._alone = asyncio.Semaphore(ALONE_AT_A_TIME)
        self._tables: OrderedDict[_Key, asyncio.Task[TokenTable]] = OrderedDict()
        self._facts: dict[_Key, TextFacts] = {}
        self._unreadable: dict[_Key, str] = {}  # why the last attempt to read a model's vocabulary failed
        self._job_ids = itertools.count(1)
        self._ahead: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts the helper process ahead, so that the first job need not wait for it. Without this call the first job starts
        it."""
        await self._helper.start()

    async def close(self) -> None:
        for task in [*self._ahead, *self._tables.values(), *self._workers.values()]:
            task.cancel()
        self._workers.clear()
        self._tables.clear()
        await self._helper.end()

    # ---- what the service is doing

    def rows(self) -> list[dict[str, Any]]:
        """Returns the jobs that have waited for SHOWN_AFTER_S or longer, the oldest first, for `hearth queue`."""
        now = asyncio.get_running_loop().time()
        rows = [
            {"model": worker.model, "work": _WORK[kind], "bytes": num_bytes, "waiting_s": round(now - since_s, 3)}
            for worker in self._helper.workers.values()
            for kind, num_bytes, since_s in worker.waiting()
            if now - since_s >= SHOWN_AFTER_S
        ]
        return sorted(rows, key=lambda row: -row["waiting_s"])

    @property
    def num_waiting(self) -> int:
        return sum(worker.num_waiting for worker in self._helper.workers.values())

    def problems(self) -> list[str]:
        """Returns a line of text for each model and cause with worker deaths in the last RECENT_S seconds."""
        now = time.monotonic()
        self._recent = {key: one for key, one in self._recent.items() if now - one.last_s < RECENT_S}
        return [
            f"text worker of {name} ended {now - one.last_s:.0f} s ago: {one.details}"
            + (f" ({one.count} times)" if one.count > 1 else "")
            for (name, _), one in self._recent.items()
        ]

    def _died(self, worker: WorkerConnection, death: Death) -> None:
        name = f"model {worker.model}" if worker.model else "request bodies and grammars"
        log.warning("text worker of %s (pid %d) ended: %s", name, worker.pid, death.details)
        self._num_deaths[death.cause] = self._num_deaths.get(death.cause, 0) + 1
        before = self._recent.pop((name, death.cause), None)
        self._recent[name, death.cause] = _Recent(time.monotonic(), 1 if before is None else before.count + 1, death.details)
        while len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    # ---- jobs

    async def encode(
        self,
        model: ModelEntry,
        text: str | bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
    ) -> list[array[int]]:
        texts = msgspec.msgpack.encode([text]) if isinstance(text, str) else text
        limit = 0 if keep_last else model.max_model_len
        parts = await self._run(
            _open(model), lambda job_id: Encode(job_id, texts, add_special_tokens, limit, field, keep_last, suffix), field
        )
        return [_unpacked(part) for part in parts]

    async def encode_pairs(
        self, model: ModelEntry, texts: bytes, fields: tuple[str, str], keep: int = 0, keep_second: int = 0
    ) -> tuple[array[int], list[array[int]]]:
        limit = 0 if keep else model.max_model_len
        begins, *pairs = await self._run(
            _open(model), lambda job_id: EncodePairs(job_id, texts, fields, limit, keep, keep_second), fields[1]
        )
        return _unpacked(begins), [_unpacked(part) for part in pairs]

    async def encode_chat(self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0) -> array[int]:
        packed, limit = msgspec.msgpack.encode(options), 0 if keep_last else model.max_model_len
        parts = await self._run(_open(model), lambda job_id: EncodeChat(job_id, messages, packed, limit, keep_last), "messages")
        return _unpacked(parts[0])

    async def parse_body(self, reader: str, body: bytes) -> tuple[bytes, bytes]:
        head, prompt = await self._run((_NO_MODEL, Open("", "", None)), lambda job_id: ParseBody(job_id, reader, body), None)
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
        # the task is shared: one client's disconnect must not fail the others
        return task.result() if task.done() else await asyncio.shield(task)

    def unreadable(self, model: ModelEntry) -> str:
        """Returns why the model's tokenizer, as its files are now, could not be read when a load or a request last tried; "" if it
        could, or if none has tried."""
        return self._unreadable.get(_open(model)[0], "")

    def open_ahead(self, model: ModelEntry) -> None:
        """Begins to parse the model's tokenizer in a worker and returns at once, unless a worker serves the model already. Called
        while the weights load: a vocabulary of 128k takes half a second or more, which the first request would have to wait for.
        Errors are not reported here, but to the requests that meet them."""
        if self._living(_open(model)[0]) is not None:
            return
        task = self._tasks.once(f"opening the tokenizer of {model.name} ahead", self._opened(model))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _opened(self, model: ModelEntry) -> None:
        with suppress(HearthError, OSError):
            await self.table(model)
            await self.encode(model, "", False)  # starts a worker if the token table exists but the worker that made it has ended

    async def _build(self, model: ModelEntry) -> TokenTable:
        key, _ = _open(model)
        try:
            parts = await self._run(_open(model), BuildTable, "model")
        except BadRequest as error:
            self._unreadable[key] = error.message
            while len(self._unreadable) > MAX_FACTS:
                del self._unreadable[next(iter(self._unreadable))]
            raise
        self._unreadable.pop(key, None)
        return TokenTable(_table_decoder.decode(parts[0]), model.vocab_size)

    async def _run(self, where: tuple[_Key, Open], make: Callable[[int], Job], param: str | None) -> list[bytes]:
        key, opening = where
        job = make(next(self._job_ids))
        pauses_s = iter(HELPER_PAUSES_S)
        while True:
            try:
                return await self._tried(key, opening, job, param)
            except WorkerDied as died:
                if (pause_s := next(pauses_s, None)) is None:
                    raise _failed(opening, died.death, param) from None
                await asyncio.sleep(pause_s)

    async def _tried(self, key: _Key, opening: Open, job: Job, param: str | None) -> list[bytes]:
        """Returns a worker's answer to a job. Raises HearthError if the job cannot be done, and WorkerDied if the text helper has
        ended and its workers with it, for which no job is to blame."""
        for _ in range(SHARED_TRIES):
            self._check_not_paused(key, opening)
            worker = await self._worker(key, opening)
            try:
                parts = await worker.call(job)
            except WorkerDied as died:
                self._count(key, worker, died)
                if died.death.cause == HELPER:
                    raise
                if died.is_to_blame:
                    raise _failed(opening, died.death, param) from None
                if died.is_suspect:
                    break
            else:
                self._repeated.answered(key)
                return parts
        # in a worker of its own: shows whether this job kills workers, and keeps it from killing other jobs' worker
        async with self._alone:
            self._check_not_paused(key, opening)
            worker = await self._helper.connect(opening)
            try:
                return await worker.call(job)
            except WorkerDied as died:
                self._count(key, worker, died)
                if died.death.cause == HELPER:
                    raise
                raise _failed(opening, died.death, param) from None
            finally:
                self._helper.release(worker)

    def _count(self, key: _Key, worker: WorkerConnection, died: WorkerDied) -> None:
        if worker.model and died.is_to_blame and not worker.has_answered:
            self._repeated.add(key, died.death)

    def _check_not_paused(self, key: _Key, opening: Open) -> None:
        if (paused := self._repeated.pause(key)) is not None:
            left_s, death = paused
            message = f"{_about(opening)} {death.why}, as did that of others before; it is tried again in {left_s:.0f} s"
            raise NotNow("text_worker_ended", message, retry_after_s=max(1.0, left_s))

    def _living(self, key: _Key) -> asyncio.Task[WorkerConnection] | None:
        """Returns the task that connects the model's worker, finished or not; None if there is no worker that can take jobs."""
        task = self._workers.get(key)
        if task is None or not task.done():
            return task
        return None if task.cancelled() or task.exception() is not None or not task.result().alive else task

    async def _worker(self, key: _Key, opening: Open) -> WorkerConnection:
        task = self._living(key)
        if task is None:
            task = self._workers[key] = asyncio.get_running_loop().create_task(self._helper.connect(opening))
            self._end_idle(key)
        self._workers.move_to_end(key)
        return task.result() if task.done() else await asyncio.shield(task)

    def _end_idle(self, but: _Key) -> None:
        """Ends workers that have no job: those that hold earlier files of the same model, and of the others the least recently used
        until at most max_workers are left. Workers for request bodies and grammars do not count and stay. but: the key of a worker
        that is kept in any case."""
        for key, task in list(self._workers.items()):
            is_needed = key[0] != but[0] and len(self._workers.keys() - {_NO_MODEL, _GRAMMARS}) <= self._max_workers
            if is_needed or key in (but, _NO_MODEL, _GRAMMARS) or not task.done():
                continue
            if task.cancelled() or task.exception() is not None:
                del self._workers[key]
            elif not task.result().num_waiting:
                del self._workers[key]
                self._helper.release(task.result())


def _failed(opening: Open, death: Death, param: str | None) -> HearthError:
    if death.has_waited:
        return NotNow("text_worker_ended", f"{_about(opening)} {death.why}", retry_after_s=10.0)
    if death.is_of_a_job:
        return BadRequest("text_work_failed", f"{_about(opening)} {death.why}", param=param)
    return NotNow("text_worker_ended", f"{_about(opening)} {death.why}, again and again", retry_after_s=1.0)


def _about(opening: Open) -> str:
    return f"model {opening.name}: the text of this request" if opening.name else "the text of this request"


def _open(model: ModelEntry) -> tuple[_Key, Open]:
    return _opening(model.name, model.path, model.text_id, model.chat_template)


@lru_cache(maxsize=MAX_FACTS)
def _opening(name: str, path: str, text_id: str, template: str | None) -> tuple[_Key, Open]:
    # absolute, because the helper's working folder is /
    path = os.path.abspath(path)
    if template is not None and not is_template_text(template):
        template = os.path.abspath(template)
    return (path, text_id, template), Open(name, path, template)


def _unpacked(part: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(part)
    return ids
