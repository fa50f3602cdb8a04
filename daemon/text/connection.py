"""The daemon's connection to one text worker: it sends jobs, receives answers, and limits how long a job may take.

A worker does its jobs in the order in which it gets them, so only a few are sent before it has answered. The other jobs wait in the
daemon, where tenants get turns according to their shares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.text import deaths
from daemon.text.deaths import Death
from daemon.text.jobs import Deferred, Done, Failed, FromWorker, Job, Open, Proceed
from daemon.text.places import NOBODY, Share
from engine.protocol import FrameReader, encode
from scheduler.fair_queue import FairQueue

BYTES_PER_S = 256 << 10  # a job may take text_stall_s and its bytes at this rate; tokenizers are at least five times as fast
HELD_S = 2.0  # if a timer is later than this, the whole process stood still, and perhaps its workers too
# A worker is given further jobs while those that it has are of this size together. It is that of the longest text that is no long
# one, which takes some ten milliseconds: so long may a tenant's small job wait for those of another tenant.
AHEAD_BYTES = 64 << 10
JOB_BYTES = 2 << 10  # what a job takes besides the work on its bytes, in bytes
REPORT_WAIT_S = 2.0  # the longest wait between the end of a worker's socket and the helper's report of why it ended


class WorkerDied(Exception):
    """Raised when the worker ended before it answered a job. is_suspect: whether the job was in progress at that time, so that it
    may have caused the death. is_alone: whether only one job was in progress. was_queued: whether the job had not been sent to the
    worker yet, so that it cannot have caused the death."""

    def __init__(self, death: Death, is_suspect: bool, is_alone: bool, was_queued: bool = False) -> None:
        super().__init__(death.details)
        self.death, self.is_suspect, self.is_alone, self.was_queued = death, is_suspect, is_alone, was_queued

    @property
    def is_to_blame(self) -> bool:
        return self.is_suspect and self.is_alone and self.death.is_of_a_job


@dataclass(slots=True, eq=False)
class _Waiting:
    """An unanswered job. share: the share of the work of the tenant for whom the job is done. message: the message to send when the
    job's turn comes. since_s: when the job came (the event loop's time). is_counted: whether its size is counted as work done for
    its tenant."""

    kind: str
    num_bytes: int
    limit_s: float  # 0: no limit
    since_s: float
    answer: asyncio.Future[list[bytes]]
    share: Share
    message: bytes = b""
    is_counted: bool = False

    @property
    def size(self) -> int:
        return JOB_BYTES + self.num_bytes


class _Lane:
    """A sequence of jobs that the worker does one after the other. jobs: the unanswered jobs that were sent to the worker, by id;
    the first one is in progress. since_s: when the worker began the job in progress (the event loop's time). waiting: the jobs that
    are not sent yet, by id. ahead: the total size of the jobs that may be sent before the first one is answered; a single job may
    be larger."""

    __slots__ = ("_queue", "_size", "ahead", "jobs", "since_s", "waiting")

    def __init__(self, ahead: int) -> None:
        self.ahead, self.since_s, self._size = ahead, 0.0, 0
        self.jobs: dict[int, _Waiting] = {}
        self.waiting: dict[int, _Waiting] = {}
        self._queue = FairQueue()

    @property
    def first(self) -> _Waiting | None:
        return next(iter(self.jobs.values()), None)

    @property
    def unanswered(self) -> list[_Waiting]:
        return [*self.jobs.values(), *self.waiting.values()]

    def drained(self) -> list[_Waiting]:
        """Returns the unanswered jobs, when the worker has ended: first those that were sent to it, then the waiting ones in the
        order of their turns."""
        found = list(self.jobs.values())
        while (job_id := self._queue.first()) is not None:
            self._queue.take(job_id)
            found.append(self.waiting[job_id])
        return found

    def has_room(self, job: _Waiting) -> bool:
        """Returns whether a job that has just come may be sent to the worker at once."""
        return not self.jobs or (not self.waiting and self._size + job.size <= self.ahead)

    def begin(self, job_id: int, job: _Waiting, now: float) -> None:
        if not self.jobs:
            self.since_s = now
        self.jobs[job_id] = job
        self._size += job.size

    def end(self, job_id: int, now: float) -> _Waiting | None:
        job = self.jobs.pop(job_id, None)
        if job is not None:
            self.since_s = now
            self._size -= job.size
        return job

    def wait(self, job_id: int, job: _Waiting) -> None:
        if not self.waiting:  # jobs that met no queue are counted only now, which costs nothing where nothing waits
            for other_id, other in self.jobs.items():
                if not other.is_counted:
                    other.is_counted = True
                    self._add(other_id, other)
                    self._queue.take(other_id)
        self.waiting[job_id] = job
        self._add(job_id, job)

    def next(self) -> tuple[int, _Waiting] | None:
        """Removes the job whose turn it is from `waiting` and returns (id, job). Returns None if no job is waiting, or the worker
        has enough jobs."""
        job_id = self._queue.first()
        if job_id is None:
            return None
        job = self.waiting[job_id]
        if not job.answer.done():
            if self.jobs and self._size + job.size > self.ahead:
                return None
            self._queue.take(job_id)
            job.is_counted = True
        else:  # its client is gone, so it is no work for its tenant
            self._queue.withdraw(job_id)
        return job_id, self.waiting.pop(job_id)

    def _add(self, job_id: int, job: _Waiting) -> None:
        self._queue.add(job_id, job.size, job.share.tenant, job.share.weight)


class WorkerConnection(asyncio.Protocol):
    """The daemon's connection to one text worker. number: the worker's number in messages to the helper. model: the name of the
    worker's model, "" if it has none. stall_s: returns the setting text_stall_s in seconds, 0 for no limit. on_end: called once
    when the worker has ended, with this connection and the reason; the reason is None if `close` was called."""

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
        self._short, self._long = _Lane(AHEAD_BYTES), _Lane(0)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._death: Death | None = None  # set when the worker's end is reported before its socket ends
        # `close` was called · the socket has ended · `on_end` was called
        self._is_closed = self._is_lost = self._is_finished = False

    # ---- jobs

    @property
    def num_waiting(self) -> int:
        return sum(len(lane.jobs) + len(lane.waiting) for lane in self._lanes)

    def waiting(self) -> list[tuple[str, str, int, float]]:
        """Returns a tuple for each unanswered job: its kind, its tenant, its bytes, and the time since which it has waited (the
        event loop's time)."""
        return [(job.kind, job.share.tenant, job.num_bytes, job.since_s) for lane in self._lanes for job in lane.unanswered]

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._short, self._long

    def open(self, opening: Open) -> None:
        assert self._transport is not None
        self._transport.write(encode(opening))

    async def call(self, job: Job, share: Share = NOBODY) -> list[bytes]:
        """Sends a job when its turn comes and returns the parts of its answer. share: the share of the work of the tenant for whom
        the job is done. Raises HearthError if the job fails, WorkerDied if the worker ends before it answers."""
        if not self.alive or self._transport is None:
            raise WorkerDied(self._death or deaths.unknown(), False, False)
        data, stall_s, now = encode(job), self._stall_s(), self._loop.time()
        limit_s = stall_s + len(data) / BYTES_PER_S if stall_s > 0 else 0.0
        waiting = _Waiting(type(job).__name__, len(data), limit_s, now, self._loop.create_future(), share)
        if self._short.has_room(waiting):
            self._begin(self._short, job.job_id, waiting, data, now)
        else:
            waiting.message = data
            self._short.wait(job.job_id, waiting)
        # A client that disconnects cancels its wait. A job that was sent stays in its lane, because the worker goes on with it.
        return await waiting.answer

    def _begin(self, lane: _Lane, job_id: int, job: _Waiting, message: bytes, now: float) -> None:
        lane.begin(job_id, job, now)
        if job.limit_s and (self._timer is None or now + job.limit_s < self._due_s):
            self._arm(job.limit_s)
        assert self._transport is not None
        self._transport.write(message)

    def _begin_next(self, now: float) -> None:
        """Sends the jobs whose turn has come."""
        for lane in (self._long, self._short):  # the worker reads the messages in order, and between them does the short jobs
            while lane.waiting and (found := lane.next()) is not None:
                job_id, job = found
                message, job.message = job.message, b""
                if not job.answer.done():
                    self._begin(lane, job_id, job, message, now)
                elif lane is self._long and self._transport is not None:
                    self._transport.write(encode(Proceed(job_id, is_wanted=False)))

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = self._loop.time() + delay_s
        self._timer = self._loop.call_at(self._due_s, self._check)

    def _check(self) -> None:
        """Kills the worker if it has worked on one job for longer than the job's limit; otherwise sets the timer that calls this
        method again. The timer is not moved when a job ends, so it often fires before any limit is reached."""
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
                if (waiting := self._short.end(message.job_id, now)) is not None:
                    waiting.message = encode(Proceed(message.job_id))
                    self._long.wait(message.job_id, waiting)
                continue
            waiting = self._short.end(message.job_id, now) or self._long.end(message.job_id, now)
            self.has_answered = True
            if waiting is None or waiting.answer.done():  # the client is gone
                continue
            if isinstance(message, Done):
                waiting.answer.set_result(message.parts)
            else:
                waiting.answer.set_exception(_error(message))
        if (self._short.waiting or self._long.waiting) and self.alive:
            self._begin_next(now)

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
        """Fails all unanswered jobs and calls `on_end`; does nothing when called again. death: why the worker has ended; None after
        `close`. suspects: the jobs that may have caused the death."""
        if self._is_finished:
            return
        self._is_finished = True
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in self._lanes:
            for job in lane.drained():  # tried again with the next worker, they come there in this order
                if not job.answer.done():
                    is_suspect = any(job is one for one in suspects)
                    was_queued = job.message != b""
                    job.answer.set_exception(WorkerDied(death or deaths.unknown(), is_suspect, len(suspects) == 1, was_queued))
        if self._transport is not None:
            self._transport.abort()
        self._on_end(self, death)


def _error(failed: Failed) -> HearthError:
    kind = BadRequest if failed.family == "BadRequest" else ServerFault
    return kind(failed.code, failed.message, param=failed.param, status=failed.status)
