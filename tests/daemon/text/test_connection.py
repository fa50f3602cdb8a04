"""A text worker's connection, with the test at the worker's end of the socket: which job is at fault, and when."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from daemon.text import connection, deaths
from daemon.text.connection import WorkerConnection, WorkerDied
from daemon.text.deaths import Death
from daemon.text.jobs import CheckGrammar, Deferred, Describe, Done, Job, Proceed, ToWorker
from daemon.text.places import Share
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

    async def messages(self, number: int) -> list[Job | Proceed]:
        """Reads at least so many messages, and those that have come with them."""
        messages: list[Job | Proceed] = []
        async with asyncio.timeout(30):
            while len(messages) < number:
                data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 20)
                messages += self._reader.feed(data)
        return messages

    async def jobs(self, number: int) -> list[int]:
        return [message.job_id for message in await self.messages(number)]

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
    assert await other.jobs(1) == [0], "it may proceed"
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


# ---- tenants' turns


A_LARGE_JOB = "x" * (connection.AHEAD_BYTES - 2 * connection.JOB_BYTES)
FLOOD, SMALL = Share("flood"), Share("small")


def ask(worker: WorkerConnection, at: int, share: Share, text: str = "x") -> asyncio.Task[list[bytes]]:
    return asyncio.create_task(worker.call(CheckGrammar(at, "f", text), share))


async def cancelled(*tasks: asyncio.Task[list[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_tenants_small_job_waits_for_one_large_job_of_another(other):
    other.stall_s = 60
    worker = await other.connect()
    large = [ask(worker, at, FLOOD, A_LARGE_JOB) for at in range(5)]
    small = [ask(worker, at, SMALL) for at in (5, 6)]
    assert await other.jobs(1) == [0]
    other.say(Done(0, []))
    assert await other.jobs(2) == [5, 6], "while the tenant has had less done for it"
    other.say(Done(5, [b"y"]), Done(6, [b"y"]))
    assert await asyncio.gather(*small) == [[b"y"]] * 2
    assert await other.jobs(1) == [1]
    assert [(tenant, kind) for kind, tenant, *_ in worker.waiting()] == [("flood", "CheckGrammar")] * 4
    await cancelled(*large[1:])


async def test_the_next_small_jobs_are_there_before_the_first_is_done(other):
    """The worker need not wait for the daemon between them."""
    other.stall_s = 60
    worker = await other.connect()
    num = connection.AHEAD_BYTES // connection.JOB_BYTES
    tasks = [ask(worker, at, FLOOD) for at in range(num)]
    sent = await other.jobs(num - 10)
    assert sent == list(range(len(sent)))
    assert len(sent) < num
    await cancelled(*tasks)


async def test_of_long_jobs_that_of_another_tenant_is_second(other):
    other.stall_s = 60
    worker = await other.connect()
    tasks = [ask(worker, at, FLOOD) for at in range(4)] + [ask(worker, 4, SMALL)]
    await other.jobs(5)
    other.say(*(Deferred(at) for at in range(5)))
    assert await other.jobs(1) == [0]
    other.say(Done(0, []))
    assert await other.jobs(1) == [4]
    other.say(Done(4, []))
    assert await other.jobs(1) == [1]
    await cancelled(*tasks)


async def test_a_job_whose_client_has_gone_before_its_turn_is_not_done(other):
    other.stall_s = 60
    worker = await other.connect()
    short = [ask(worker, at, FLOOD, A_LARGE_JOB) for at in range(3)]
    await other.jobs(1)
    await cancelled(short[1])
    other.say(Deferred(0))
    assert await other.messages(2) == [Proceed(0), CheckGrammar(2, "f", A_LARGE_JOB)]
    other.say(Deferred(2))
    await cancelled(short[2])
    other.say(Done(0, []))
    assert await other.messages(1) == [Proceed(2, is_wanted=False)]
    assert worker.num_waiting == 0


async def test_a_death_is_not_of_jobs_whose_turn_had_not_come_and_these_keep_their_turns(other):
    """Tried again, that of the other tenant comes first, so no tenant's jobs that kill workers keep it out."""
    other.stall_s = 60
    worker = await other.connect()
    large = [ask(worker, at, FLOOD, A_LARGE_JOB) for at in range(3)]
    small = ask(worker, 3, SMALL)
    assert await other.jobs(1) == [0]
    order: list[asyncio.Task[list[bytes]]] = []
    for task in (*large, small):
        task.add_done_callback(order.append)
    worker.died(Death(deaths.CRASHED, "crashed", "SIGSEGV"))
    other.theirs.close()
    ends = await asyncio.gather(*large, small, return_exceptions=True)
    how = [(end.is_to_blame, end.was_queued) for end in ends if isinstance(end, WorkerDied)]
    assert how == [(True, False), *[(False, True)] * 3]
    assert order == [large[0], small, large[1], large[2]]
