"""The daemon's connection to one text worker: it sends jobs, receives answers, and limits how long a job may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.text import deaths
from daemon.text.deaths import Death
from daemon.text.jobs import Deferred, Done, Failed, FromWorker, Job, Open
from engine.protocol import FrameReader, encode

BYTES_PER_S = 256 << 10  # a job may take text_stall_s and its bytes at this rate; tokenizers are at least five times as fast
HELD_S = 2.0  # if a timer is later than this, the whole process stood still, and perhaps its workers too
REPORT_WAIT_S = 2.0  # the longest wait between the end of a worker's socket and the helper's report of why it ended


class WorkerDied(Exception):
    """Raised when the worker ended before it answered the job. is_suspect: whether the job may have caused the death, because it
    was in progress at that time. is_alone: whether only one job was in progress then."""

    def __init__(self, death: Death, is_suspect: bool, is_alone: bool) -> None:
        super().__init__(death.details)
        self.death, self.is_suspect, self.is_alone = death, is_suspect, is_alone

    @property
    def is_to_blame(self) -> bool:
        return self.is_suspect and self.is_alone and self.death.is_of_a_job


@dataclass(slots=True, eq=False)
class _Waiting:
    kind: str
    num_bytes: int
    limit_s: float  # 0: no limit
    since_s: float
    answer: asyncio.Future[list[bytes]]


@dataclass(slots=True)
class _Lane:
    """A queue of jobs that the worker does one after the other. jobs: the unanswered jobs by id, the one in progress first.
    since_s: when the worker began that job (the event loop's time)."""

    jobs: dict[int, _Waiting] = field(default_factory=dict)
    since_s: float = 0.0

    @property
    def first(self) -> _Waiting | None:
        return next(iter(self.jobs.values()), None)

    def add(self, job_id: int, waiting: _Waiting, now: float) -> None:
        if not self.jobs:
            self.since_s = now
        self.jobs[job_id] = waiting

    def take(self, job_id: int, now: float) -> _Waiting | None:
        waiting = self.jobs.pop(job_id, None)
        if waiting is not None:
            self.since_s = now
        return waiting


class WorkerConnection(asyncio.Protocol):
    """The daemon's connection to one text worker. number: the worker's number in messages to the helper. model: its model's name,
    "" for none. stall_s: returns the setting text_stall_s in seconds, 0 for no limit. on_end: called once, when the worker has
    ended, with this connection and why it ended; None after `close`."""

    def __init__(
        self, number: int, model: str, stall_s: Callable[[], float], on_end: Callable[[WorkerConnection, Death | None], None]
    ) -> None:
        self.number, self.model, self.pid = number, model, 0
        self.alive = False
        self.has_answered = False
        self._stall_s, self._on_end = stall_s, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(FromWorker)
        self._short, self._long = _Lane(), _Lane()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._death: Death | None = None  # set when the worker's end is reported before its socket ends
        # `close` was called · the socket has ended · `on_end` was called
        self._is_closed = self._is_lost = self._is_finished = False

    # ---- jobs

    @property
    def num_waiting(self) -> int:
        return len(self._short.jobs) + len(self._long.jobs)

    def waiting(self) -> list[tuple[str, int, float]]:
        """Returns a tuple for each unanswered job: its kind, its bytes, and the time since which it has waited (the event loop's
        time)."""
        return [(job.kind, job.num_bytes, job.since_s) for lane in self._lanes for job in lane.jobs.values()]

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._short, self._long

    def open(self, opening: Open) -> None:
        assert self._transport is not None
        self._transport.write(encode(opening))

    async def call(self, job: Job) -> list[bytes]:
        """Sends a job and returns the parts of its answer. Raises HearthError if the job fails, WorkerDied if the worker ends
        before it answers."""
        if not self.alive or self._transport is None:
            raise WorkerDied(self._death or deaths.unknown(), False, False)
        data, stall_s, now = encode(job), self._stall_s(), self._loop.time()
        limit_s = stall_s + len(data) / BYTES_PER_S if stall_s > 0 else 0.0
        waiting = _Waiting(type(job).__name__, len(data), limit_s, now, self._loop.create_future())
        self._short.add(job.job_id, waiting, now)
        if limit_s and (self._timer is None or now + limit_s < self._due_s):
            self._arm(limit_s)
        self._transport.write(data)
        # a client that disconnects cancels its wait; the worker goes on with the job, so it stays in its lane
        return await waiting.answer

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = self._loop.time() + delay_s
        self._timer = self._loop.call_at(self._due_s, self._check)

    def _check(self) -> None:
        """Kills the worker if it has worked on one job for longer than the job's limit. Called by a timer, which is not moved for
        each job: it often fires early and is set again."""
        self._timer = None
        now = self._loop.time()
        was_held = now - self._due_s > HELD_S
        left_s = []
        for lane in self._lanes:
            job = lane.first
            if job is None or not job.limit_s:
                continue
            if was_held:
                lane.since_s = now
            left_s.append(lane.since_s + job.limit_s - now)
            if left_s[-1] <= 0:
                self._finish(deaths.stalled(job.limit_s, f"{job.kind}, {job.num_bytes} bytes", self.pid), [job])
                return
        if left_s:
            self._arm(min(left_s) + 0.001)  # the loop's timer may be early, by less than that

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.alive = True

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        for message in self._reader.feed(data):
            if isinstance(message, Deferred):
                if (waiting := self._short.take(message.job_id, now)) is not None:
                    self._long.add(message.job_id, waiting, now)
                continue
            waiting = self._short.take(message.job_id, now) or self._long.take(message.job_id, now)
            self.has_answered = True
            if waiting is None or waiting.answer.done():  # the client is gone
                continue
            if isinstance(message, Done):
                waiting.answer.set_result(message.parts)
            else:
                waiting.answer.set_exception(_error(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._is_lost = True
        if self._death is not None:
            self._fail(self._death)
        elif self._is_closed:
            self._finish(None, [])
        else:
            self._loop.call_later(REPORT_WAIT_S, self._wait_no_longer)

    # ---- the worker's end

    def died(self, death: Death) -> None:
        """Takes note of the end of the worker's process and its cause. Jobs without an answer fail once everything that the worker
        sent before its end was read."""
        self.alive = False
        if not self._is_closed:
            self._death = death
        if self._is_lost:
            self._fail(death)
        else:
            self._loop.call_later(REPORT_WAIT_S, self._wait_no_longer)

    def close(self) -> None:
        """Closes the connection. The worker's process ends when it has done the jobs that it was sent; the answers are lost."""
        self.alive = False
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self, death: Death) -> None:
        """Fails all unanswered jobs and closes the connection at once."""
        self._finish(death, [])

    def _wait_no_longer(self) -> None:
        self._fail(self._death or deaths.unknown())

    def _fail(self, death: Death) -> None:
        self._finish(death, [job for lane in self._lanes if (job := lane.first) is not None])

    def _finish(self, death: Death | None, suspects: list[_Waiting]) -> None:
        """Fails all unanswered jobs and calls `on_end`, once. suspects: the jobs that may have caused the death. death: None after
        `close`."""
        if self._is_finished:
            return
        self._is_finished = True
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in [job for lane in self._lanes for job in lane.jobs.values()]:
            if not job.answer.done():
                is_suspect = any(job is one for one in suspects)
                job.answer.set_exception(WorkerDied(death or deaths.unknown(), is_suspect, len(suspects) == 1))
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self, death)


def _error(failed: Failed) -> HearthError:
    kind = BadRequest if failed.family == "BadRequest" else ServerFault
    return kind(failed.code, failed.message, param=failed.param, status=failed.status)
