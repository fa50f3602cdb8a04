"""Tenants' turns at what the text workers do, with workers that answer when the test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from daemon.process.long_tasks import LongTasks
from daemon.text import service as service_module
from daemon.text.connection import WorkerConnection
from daemon.text.jobs import CheckGrammar, Job, Open
from daemon.text.places import Places, Share
from daemon.text.service import TextService

HOSTILE, OTHER, THIRD = Share("hostile"), Share("other"), Share("third")


class Worker:
    """A worker that answers a job when it is told to."""

    def __init__(self, opening: Open) -> None:
        self.alive = True
        self.model = opening.name
        self.jobs: dict[str, asyncio.Future[list[bytes]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.jobs)

    async def call(self, job: Job, share: Share) -> list[bytes]:
        assert isinstance(job, CheckGrammar)
        answer = self.jobs[job.grammar] = asyncio.get_running_loop().create_future()
        return await answer

    def answer(self, grammar: str) -> None:
        self.jobs.pop(grammar).set_result([])


class Workers:
    """Stands for the text helper."""

    def __init__(self) -> None:
        self.all: list[Worker] = []
        self.workers: dict[int, WorkerConnection] = {}

    async def connect(self, opening: Open) -> Worker:
        self.all.append(Worker(opening))
        return self.all[-1]

    def release(self, worker: Worker) -> None:
        worker.alive = False

    async def end(self) -> None:
        pass

    @property
    def at_work(self) -> list[str]:
        return sorted(grammar for worker in self.all if worker.alive for grammar in worker.jobs)

    def answer(self, grammar: str) -> None:
        (worker,) = [each for each in self.all if grammar in each.jobs]
        worker.answer(grammar)


Check = Callable[[Share, str], asyncio.Task[None]]


@pytest.fixture
async def workers():
    return Workers()


@pytest.fixture
async def service(workers):
    service = TextService(LongTasks())
    service._helper = workers
    yield service
    await service.close()


@pytest.fixture
async def check(service):
    tasks: list[asyncio.Task[None]] = []

    def begin(share: Share, grammar: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(service.of(share).check_grammar("f", grammar)))
        return tasks[-1]

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def settled() -> None:
    """Lets every task run until it waits for a worker or for its turn."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_tenants_grammars_are_checked_one_at_a_time_and_hold_up_no_other_tenant(workers, check: Check):
    for at in range(10):
        check(HOSTILE, f"hostile {at}")
    await settled()
    assert workers.at_work == ["hostile 0"]
    other = check(OTHER, "other")
    await settled()
    assert workers.at_work == ["hostile 0", "other"]
    workers.answer("other")
    await other
    assert len(workers.all) == 2, "each has a worker of its own"
    for at in range(9):
        workers.answer(f"hostile {at}")
        await settled()
        assert workers.at_work == [f"hostile {at + 1}"]


async def test_a_third_tenants_grammar_is_the_next_that_is_checked(workers, check: Check):
    for at in range(3):
        check(HOSTILE, f"hostile {at}")
        check(OTHER, f"other {at}")
    await settled()
    check(THIRD, "third")
    await settled()
    assert workers.at_work == ["hostile 0", "other 0"]
    workers.answer("hostile 0")
    await settled()
    assert workers.at_work == ["other 0", "third"]


async def test_a_check_whose_client_has_gone_is_ended_with_its_worker(workers, check: Check):
    """Only then is the place free for the tenant's next one."""
    gone, _ = check(HOSTILE, "gone"), check(HOSTILE, "next")
    await settled()
    gone.cancel()
    await settled()
    assert [worker.alive for worker in workers.all] == [False, True]
    assert workers.at_work == ["next"]


async def test_checks_that_wait_are_shown(service, check: Check, monkeypatch):
    monkeypatch.setattr(service_module, "SHOWN_AFTER_S", 0.0)
    check(HOSTILE, "at work")
    check(HOSTILE, "waits")
    await settled()
    (row,) = service.rows()
    assert (row["tenant"], row["work"], row["bytes"], service.num_waiting) == ("hostile", "checking the grammar", 5, 1)


async def test_a_place_whose_waiter_is_cancelled_goes_to_the_next() -> None:
    """Also if it was given to the waiter a moment before."""
    places = Places(1, 1)
    assert places.take(HOSTILE) == 0
    assert places.take(OTHER) is None
    early, late, last = [asyncio.create_task(places.turn(share, 0)) for share in (OTHER, THIRD, HOSTILE)]
    await settled()
    early.cancel()  # leaves the queue only when it runs again
    places.leave(0, HOSTILE)
    late.cancel()
    await asyncio.wait([early, late])
    assert early.cancelled()
    assert late.cancelled()
    assert await asyncio.wait_for(last, 30) == 0
    assert places.num_waiting == 0
    places.leave(0, HOSTILE)
    assert places.take(OTHER) == 0
