"""A text worker's connection, with the test at the worker's end of the socket: which job is at fault, and when."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from daemon.text import connection, deaths
from daemon.text.connection import WorkerConnection, WorkerDied
from daemon.text.deaths import Death
from daemon.text.jobs import CheckGrammar, Deferred, Describe, Done, ToWorker
from engine.protocol import FrameReader, encode


class Other:
    """The worker's end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        for one in (self.ours, self.theirs):
            one.setblocking(False)
        self.stall_s = 0.1
        self.ended: list[Death | None] = []
        self._reader = FrameReader(ToWorker)

    async def connect(self) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        worker = WorkerConnection(1, "m", lambda: self.stall_s, lambda worker, death: self.ended.append(death))
        await loop.create_unix_connection(lambda: worker, sock=self.ours)
        return worker

    async def jobs(self, number: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < number:
            data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 16)
            ids += [message.job_id for message in self._reader.feed(data)]
        return ids

    def say(self, *messages: Done | Deferred) -> None:
        self.theirs.send(b"".join(map(encode, messages)))


@pytest.fixture
async def other():
    other = Other()
    yield other
    other.theirs.close()
    other.ours.close()


async def started(other: Other, worker: WorkerConnection, number: int) -> list[asyncio.Task[list[bytes]]]:
    tasks = [asyncio.create_task(worker.call(Describe(at))) for at in range(number)]
    assert await other.jobs(number) == list(range(number))
    return tasks


async def outcome(task: asyncio.Task[list[bytes]]) -> tuple[str, bool, bool]:
    with pytest.raises(WorkerDied) as died:
        await asyncio.wait_for(task, 30)
    return died.value.death.cause, died.value.is_suspect, died.value.is_to_blame


async def test_a_job_that_takes_too_long_is_blamed_and_those_behind_it_are_not(other):
    tasks = await started(other, await other.connect(), 3)
    other.say(Done(0, [b"x"]))
    assert await tasks[0] == [b"x"]
    assert await outcome(tasks[1]) == (deaths.STALLED, True, True)
    assert await outcome(tasks[2]) == (deaths.STALLED, False, False)
    assert [death and death.cause for death in other.ended] == [deaths.STALLED]


async def test_the_time_counts_from_when_a_job_is_begun(other):
    other.stall_s = 0.4
    tasks = await started(other, await other.connect(), 4)
    for at, task in enumerate(tasks):  # each in its time, together not
        await asyncio.sleep(0.2)
        other.say(Done(at, [b"x"]))
        assert await task == [b"x"]


async def test_a_deferred_job_has_a_time_of_its_own(other):
    worker = await other.connect()
    tasks = await started(other, worker, 2)
    other.say(Deferred(0), Done(1, [b"y"]))
    assert await tasks[1] == [b"y"]
    third = asyncio.create_task(worker.call(Describe(2)))
    await other.jobs(1)
    other.say(Done(2, [b"z"]))
    assert await third == [b"z"]
    assert await outcome(tasks[0]) == (deaths.STALLED, True, True)


async def test_a_long_job_is_given_longer(other):
    other.stall_s = 0.05
    worker = await other.connect()
    long = asyncio.create_task(worker.call(CheckGrammar(0, "f", "x" * (2 * connection.BYTES_PER_S))))
    received = 0
    while received < 2 * connection.BYTES_PER_S:
        received += len(await asyncio.get_running_loop().sock_recv(other.theirs, 1 << 20))
    await asyncio.sleep(0.5)
    assert not long.done()
    assert await outcome(long) == (deaths.STALLED, True, True)


async def test_no_limit_if_none_is_set(other):
    other.stall_s = 0
    (task,) = await started(other, await other.connect(), 1)
    await asyncio.sleep(0.3)
    other.say(Done(0, []))
    assert await task == []


async def test_nothing_is_held_against_a_worker_after_the_daemon_itself_stood_still(other, monkeypatch):
    monkeypatch.setattr(connection, "HELD_S", 0.2)
    other.stall_s = 0.5
    (task,) = await started(other, await other.connect(), 1)
    time.sleep(1.5)  # noqa: ASYNC251
    await asyncio.sleep(0)
    other.say(Done(0, []))
    assert await task == []


async def test_a_job_whose_client_has_gone_is_still_limited(other):
    worker = await other.connect()
    (task,) = await started(other, worker, 1)
    task.cancel()
    async with asyncio.timeout(30):
        while not other.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert other.ended[0] is not None
    assert (other.ended[0].cause, worker.alive) == (deaths.STALLED, False)


@pytest.mark.parametrize("is_report_first", [True, False])
async def test_an_answer_sent_before_the_end_arrives_and_the_job_at_work_is_blamed(other, is_report_first):
    other.stall_s = 60
    worker = await other.connect()
    tasks = await started(other, worker, 3)
    other.say(Done(0, [b"x"]))
    death = Death(deaths.CRASHED, "crashed", "SIGSEGV")
    if is_report_first:
        worker.died(death)
        other.theirs.close()
    else:
        other.theirs.close()
        async with asyncio.timeout(30):
            while worker.alive:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        worker.died(death)
    assert await tasks[0] == [b"x"]
    assert await outcome(tasks[1]) == (deaths.CRASHED, True, True)
    assert await outcome(tasks[2]) == (deaths.CRASHED, False, False)
    assert other.ended == [death]


async def test_of_two_jobs_that_were_at_work_neither_is_blamed_for_a_crash(other):
    other.stall_s = 60
    worker = await other.connect()
    tasks = await started(other, worker, 2)
    other.say(Deferred(0))
    worker.died(Death(deaths.CRASHED, "crashed", "SIGSEGV"))
    other.theirs.close()
    for task in tasks:
        assert await outcome(task) == (deaths.CRASHED, True, False)


async def test_a_worker_that_nobody_reports_on_is_given_up(other, monkeypatch):
    monkeypatch.setattr(connection, "REPORT_WAIT_S", 0.05)
    other.stall_s = 60
    (task,) = await started(other, await other.connect(), 1)
    other.theirs.close()
    assert await outcome(task) == (deaths.UNKNOWN, True, False)


async def test_one_that_is_closed_is_no_death(other):
    worker = await other.connect()
    worker.close()
    async with asyncio.timeout(30):
        while not other.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert other.ended == [None]
