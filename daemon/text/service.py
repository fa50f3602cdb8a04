"""Implements TextPort: templates and tokenizers run in helper processes, one worker per model; the least recently used workers are
ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from daemon.errors import BadRequest, HearthError, NotNow
from daemon.models.entry import ModelEntry
from daemon.process.long_tasks import LongTasks
from daemon.text.connection import WorkerConnection, WorkerDied
from daemon.text.deaths import HELPER, Death
from daemon.text.helper import Helper
from daemon.text.jobs import BuildTable, CheckGrammar, Job, Open, TextFacts
from daemon.text.places import NOBODY, Places, Share
from daemon.text.repeated_deaths import RepeatedDeaths
from daemon.text.tenant_text import MAX_FACTS, NO_MODEL, Key, MakeJob, TenantText, Where, where
from daemon.text.token_table import PackedTable, TokenTable

log = logging.getLogger("hearthd.text")

MAX_WORKERS = 4  # models whose tokenizers stay parsed: 33-109 MB each for vocabularies of 128k and more
MAX_TABLES = 64  # 1.5-3 MB each
STALL_S = 30.0  # the default of text_stall_s
SHARED_TRIES = 2  # attempts on a shared worker, which another job may end; after that a job gets a worker of its own
HELPER_PAUSES_S = (0.0, 0.2, 0.5, 1.0)  # before a job that was lost with the text helper is tried again, each time
ALONE_AT_A_TIME = 2
GRAMMARS_AT_A_TIME = 2  # one of each tenant: they may take seconds, and end their worker
SHOWN_AFTER_S = 1.0
RECENT_S, MAX_RECENT = 600.0, 16  # deaths are reported for this long, and at most this many

# A worker for each place: a grammar that holds its worker, or ends it, holds up no other tenant's.
_GRAMMARS: list[Where] = [(("", f"grammars {at}", None), Open("", "", None)) for at in range(GRAMMARS_AT_A_TIME)]
_STAYING = {NO_MODEL[0], *(key for key, _ in _GRAMMARS)}  # keys of workers for request bodies and grammars
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
_table_decoder = msgspec.msgpack.Decoder(PackedTable)


@dataclass(slots=True, frozen=True)
class _Recent:
    last_s: float
    count: int
    details: str


class TextService(TenantText):
    """Runs jobs on requests' texts in worker processes; the methods that do jobs raise HearthError.

    If a worker dies or is killed for exceeding a limit, the job that was in progress is refused, provided that it was the only one
    and that it most likely is the cause. Otherwise a job that may be the cause is done again in a worker of its own, and the other
    jobs by another worker. stall_s: returns the setting text_stall_s, in seconds. num_deaths: the number of workers that died, by
    cause; updated here."""

    def __init__(
        self,
        tasks: LongTasks,
        max_workers: int = MAX_WORKERS,
        stall_s: Callable[[], float] = lambda: STALL_S,
        num_deaths: MutableMapping[str, int] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """preload: modules with the functions that parse bodies; the helper imports them before it forks workers."""
        super().__init__(self, NOBODY)
        self._tasks, self._max_workers = tasks, max_workers
        self._helper = Helper(tasks, stall_s, self._died, preload)
        self._num_deaths: MutableMapping[str, int] = {} if num_deaths is None else num_deaths
        self._recent: dict[tuple[str, str], _Recent] = {}  # by model and cause
        self._repeated = RepeatedDeaths()
        self._workers: OrderedDict[Key, asyncio.Task[WorkerConnection]] = OrderedDict()
        self._alone = Places(ALONE_AT_A_TIME, ALONE_AT_A_TIME)
        self._grammars = Places(GRAMMARS_AT_A_TIME, 1)
        self._tables: OrderedDict[Key, asyncio.Task[TokenTable]] = OrderedDict()
        self.known_facts: dict[Key, TextFacts] = {}
        self._unreadable: dict[Key, str] = {}  # why the last attempt to read a model's vocabulary failed
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
        jobs = [(worker.model, *job) for worker in self._helper.workers.values() for job in worker.waiting()]
        jobs += [("", CheckGrammar.__name__, *job) for job in self._grammars.waiting()]
        rows = [
            {"model": model, "work": _WORK[kind], "tenant": tenant, "bytes": num_bytes, "waiting_s": round(now - since_s, 3)}
            for model, kind, tenant, num_bytes, since_s in jobs
            if now - since_s >= SHOWN_AFTER_S
        ]
        return sorted(rows, key=lambda row: -row["waiting_s"])

    @property
    def num_waiting(self) -> int:
        return self._grammars.num_waiting + sum(worker.num_waiting for worker in self._helper.workers.values())

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

    async def run(self, share: Share, at: Where, make: MakeJob, param: str | None) -> list[bytes]:
        job = make(next(self._job_ids))
        pauses_s = iter(HELPER_PAUSES_S)
        while True:
            try:
                return await self._tried(share, at, job, param)
            except WorkerDied as died:
                if (pause_s := next(pauses_s, None)) is None:
                    raise _failed(at[1], died.death, param) from None
                await asyncio.sleep(pause_s)

    async def run_grammar(self, share: Share, make: MakeJob, param: str, num_bytes: int) -> list[bytes]:
        place = self._grammars.take(share)
        if place is None:
            place = await self._grammars.turn(share, num_bytes)
        try:
            return await self.run(share, _GRAMMARS[place], make, param)
        except asyncio.CancelledError:  # the client is gone; the next grammar at this place must not wait for its check
            self._end_busy(_GRAMMARS[place][0])
            raise
        finally:
            self._grammars.leave(place, share)

    async def shared_table(self, model: ModelEntry) -> TokenTable:
        key, _ = where(model)
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
        return self._unreadable.get(where(model)[0], "")

    def open_ahead(self, model: ModelEntry) -> None:
        """Begins to parse the model's tokenizer in a worker and returns at once, unless a worker serves the model already. Called
        while the weights load: a vocabulary of 128k takes half a second or more, which the first request would have to wait for.
        Errors are not reported here, but to the requests that meet them."""
        if self._living(where(model)[0]) is not None:
            return
        task = self._tasks.once(f"opening the tokenizer of {model.name} ahead", self._opened(model))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _opened(self, model: ModelEntry) -> None:
        with suppress(HearthError, OSError):
            await self.table(model)
            await self.encode(model, "", False)  # starts a worker if the token table exists but the worker that made it has ended

    async def _build(self, model: ModelEntry) -> TokenTable:
        key, _ = where(model)
        try:
            parts = await self.run(NOBODY, where(model), BuildTable, "model")
        except BadRequest as error:
            self._unreadable[key] = error.message
            while len(self._unreadable) > MAX_FACTS:
                del self._unreadable[next(iter(self._unreadable))]
            raise
        self._unreadable.pop(key, None)
        return TokenTable(_table_decoder.decode(parts[0]), model.vocab_size)

    async def _tried(self, share: Share, at: Where, job: Job, param: str | None) -> list[bytes]:
        """Does a job in a worker and returns the parts of its answer. share: the share of the work of the tenant for whom the job
        is done. at: the worker: the key by which it is found, and the message that opens a new one. param: the request's field that
        the job is about, for errors. Raises HearthError if the job cannot be done. Raises WorkerDied if the text helper has ended,
        and its workers with it; no job caused that, so the caller tries again."""
        key, opening = at
        num_tries = 0
        while num_tries < SHARED_TRIES:
            self._check_not_paused(key, opening)
            worker = await self._worker(key, opening)
            try:
                parts = await worker.call(job, share)
            except WorkerDied as died:
                self._count(key, worker, died)
                if died.death.cause == HELPER:
                    raise
                if died.is_to_blame:
                    raise _failed(opening, died.death, param) from None
                if died.is_suspect:
                    break
                num_tries += not died.was_queued
            else:
                self._repeated.answered(key)
                return parts
        # in a worker of its own: shows whether this job kills workers, and keeps it from killing other jobs' worker
        place = self._alone.take(share)
        if place is None:
            place = await self._alone.turn(share, 0)
        try:
            return await self._run_alone(share, at, job, param)
        finally:
            self._alone.leave(place, share)

    async def _run_alone(self, share: Share, at: Where, job: Job, param: str | None) -> list[bytes]:
        key, opening = at
        self._check_not_paused(key, opening)
        worker = await self._helper.connect(opening)
        try:
            return await worker.call(job, share)
        except WorkerDied as died:
            self._count(key, worker, died)
            if died.death.cause == HELPER:
                raise
            raise _failed(opening, died.death, param) from None
        finally:
            self._helper.release(worker)

    def _count(self, key: Key, worker: WorkerConnection, died: WorkerDied) -> None:
        if worker.model and died.is_to_blame and not worker.has_answered:
            self._repeated.add(key, died.death)

    def _check_not_paused(self, key: Key, opening: Open) -> None:
        if (paused := self._repeated.pause(key)) is not None:
            left_s, death = paused
            message = f"{_about(opening)} {death.why}, as did that of others before; it is tried again in {left_s:.0f} s"
            raise NotNow("text_worker_ended", message, retry_after_s=max(1.0, left_s))

    def _living(self, key: Key) -> asyncio.Task[WorkerConnection] | None:
        """Returns the task that connects the model's worker, finished or not; None if there is no worker that can take jobs."""
        task = self._workers.get(key)
        if task is None or not task.done():
            return task
        worker = self._connected(key)
        return None if worker is None or not worker.alive else task

    async def _worker(self, key: Key, opening: Open) -> WorkerConnection:
        task = self._living(key)
        if task is None:
            task = self._workers[key] = asyncio.get_running_loop().create_task(self._helper.connect(opening))
            self._end_idle(key)
        self._workers.move_to_end(key)
        return task.result() if task.done() else await asyncio.shield(task)

    def _connected(self, key: Key) -> WorkerConnection | None:
        """Returns the connection to the worker with the key, even if the worker has died since; None if the worker is not connected
        yet."""
        task = self._workers.get(key)
        is_there = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and is_there else None

    def _end_busy(self, key: Key) -> None:
        """Kills the worker with the key if it has a job."""
        worker = self._connected(key)
        if worker is not None and worker.num_waiting:
            del self._workers[key]
            self._helper.release(worker)

    def _end_idle(self, but: Key) -> None:
        """Ends workers that have no job: all that hold an earlier state of the files of the model that the worker `but` serves, and
        others, the least recently used first, as long as there are more than max_workers workers. Workers for request bodies and
        grammars are neither counted nor ended. but: the key of a worker that is kept in any case."""
        for key, task in list(self._workers.items()):
            is_needed = key[0] != but[0] and len(self._workers.keys() - _STAYING) <= self._max_workers
            if is_needed or key == but or key in _STAYING or not task.done():
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
