"""The exchange memory: the order of its queues, its lock, and its regions."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields

import numpy as np
import pytest

from engine.exchange import (
    PAGE_BYTES,
    QUEUE_ENTRIES,
    TABLE_COLUMNS,
    Exchange,
    ExchangeFull,
    Poster,
    RegionSizes,
    first_region,
    make_exchange,
    region_bytes,
)
from engine.memory.group_region import GroupRegion
from engine.protocol import Group
from loader.reading.range_plan import Read
from loader.reading.shared_reads import Offer
from scheduler.batch.plan import BatchPlan, make_sequence_table
from tests.engine.engine_process import ROOT

SIZES = RegionSizes(num_ranks=2, max_sequences=4, max_model_len=100, block_tokens=16, num_kv_groups=2)


@contextmanager
def exchange_of(num_engines: int) -> Iterator[tuple[int, list[int], Exchange]]:
    """Yields the descriptor of an exchange memory, its doorbells and a view of it."""
    fd = make_exchange(num_engines)
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_engines)]
    exchange = Exchange(fd, bells)
    try:
        yield fd, bells, exchange
    finally:
        exchange.close()
        for each in (fd, *bells):
            os.close(each)


def taken(exchange: Exchange, number: int) -> list[int]:
    found = []
    while (region := exchange.queue(number).take()) is not None:
        found.append(region)
    return found


def regions(number: int) -> list[int]:
    return [first_region(8) + at * PAGE_BYTES for at in range(number)]


def test_members_see_an_entry_and_others_do_not() -> None:
    with exchange_of(3) as (_, bells, exchange):
        (region,) = regions(1)
        assert exchange.post([2, 0], region)
        assert [taken(exchange, number) for number in range(3)] == [[region], [], [region]]
        assert taken(exchange, 0) == []
        assert os.eventfd_read(bells[0]) == 1
        for bell in bells[1:]:  # what reads one that nobody rang raises, instead of waiting
            with pytest.raises(BlockingIOError):
                os.eventfd_read(bell)


POSTER = """
import random, sys
from engine.exchange import Exchange
fd, seed, bells = int(sys.argv[1]), int(sys.argv[2]), [int(bell) for bell in sys.argv[3].split(",")]
exchange, choose = Exchange(fd, bells), random.Random(seed)
for number in range(int(sys.argv[4])):
    members = choose.sample(range(len(bells)), choose.randint(2, len(bells)))
    while True:
        try:
            exchange.post(members, int(sys.argv[5]) + 4096 * (seed * 1000 + number))
            break
        except Exception as error:
            assert type(error).__name__ == "ExchangeFull"
"""


def test_every_engine_sees_the_entries_of_all_posters_in_one_order() -> None:
    """Threads and processes post to random overlapping groups; engines take in other threads meanwhile."""
    num_engines, num_posts = 4, 300
    with exchange_of(num_engines) as (fd, bells, exchange):
        seen: list[list[int]] = [[] for _ in range(num_engines)]
        over = threading.Event()

        def take(number: int) -> None:
            own = Exchange(fd)
            while not over.is_set():
                seen[number] += taken(own, number)
                time.sleep(0.001)
            seen[number] += taken(own, number)
            own.close()

        def post(seed: int) -> None:
            choose = random.Random(seed)
            for number in range(num_posts):
                members = choose.sample(range(num_engines), choose.randint(2, num_engines))
                while True:
                    try:
                        assert exchange.post(members, first_region(8) + 4096 * (seed * 1000 + number))
                        break
                    except ExchangeFull:
                        time.sleep(0.001)

        takers = [threading.Thread(target=take, args=(number,)) for number in range(num_engines)]
        posters = [threading.Thread(target=post, args=(seed,)) for seed in (1, 2)]
        what = (",".join(map(str, bells)), str(num_posts), str(first_region(8)))
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", POSTER, str(fd), str(seed), *what],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=(fd, *bells),
            )
            for seed in (3, 4)
        ]
        for thread in takers + posters:
            thread.start()
        for thread in posters:
            thread.join()
        assert [process.wait(60) for process in processes] == [0, 0]
        over.set()
        for thread in takers:
            thread.join()
        choosers = [random.Random(seed) for seed in (1, 2, 3, 4)]
        members = [[set(c.sample(range(4), c.randint(2, 4))) for _ in range(num_posts)] for c in choosers]
        for number in range(num_engines):
            assert len(seen[number]) == len(set(seen[number])) == sum(number in group for row in members for group in row)
        for one in range(num_engines):
            for other in range(one):
                both = set(seen[one]) & set(seen[other])
                assert len(both) > num_posts
                assert [r for r in seen[one] if r in both] == [r for r in seen[other] if r in both]


HOLDER = """
import sys, time
from engine.exchange import Exchange
exchange = Exchange(int(sys.argv[1]))
with exchange.locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_freed() -> None:
    with exchange_of(2) as (fd, _, exchange):
        command = [sys.executable, "-P", "-c", HOLDER, str(fd)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=env, pass_fds=(fd,), stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            posted: list[bool] = []
            poster = threading.Thread(target=lambda: posted.append(exchange.post([0, 1], regions(1)[0])))
            poster.start()
            poster.join(0.1)
            assert poster.is_alive(), "the other process did not keep this one out"
            holder.send_signal(signal.SIGKILL)
            poster.join(10)
            assert posted == [True]


def test_threads_exclude_each_other() -> None:
    with exchange_of(2) as (fd, _, exchange):
        other = Exchange(fd)
        inside: list[int] = []

        def work(own: Exchange) -> None:
            for _ in range(50):
                with own.locked():
                    inside.append(1)
                    assert len(inside) == 1
                    time.sleep(0)
                    inside.pop()

        threads = [threading.Thread(target=work, args=(own,)) for own in (exchange, exchange, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not inside
        other.close()


def test_half_a_post_is_not_seen() -> None:
    """A leader that dies before it has told all members leaves nothing behind that the next entry would not replace."""
    with exchange_of(2) as (_, _, exchange):
        first, second = regions(2)
        exchange._words[exchange._entry(1, 0)] = first
        assert exchange.queue(1).take() is None
        assert exchange.post([0, 1], second)
        assert taken(exchange, 1) == [second]


def test_an_entry_may_be_left_in_its_place() -> None:
    with exchange_of(2) as (_, _, exchange):
        first, second, third = regions(3)
        for region in (first, second, third):
            assert exchange.post([0, 1], region)
        assert exchange.queue(1).take({second}) == first
        assert exchange.queue(1).take({second, third}) is None
        assert exchange.queue(1).take({third}) == second
        exchange.leave(1, third)
        assert exchange.post([0, 1], second)
        assert exchange.queue(1).take({second}) is None, "what was left behind by a group is not an entry"
        assert exchange.queue(1).take() == second


def test_a_wait_for_entries_ends_with_one_or_after_its_time() -> None:
    with exchange_of(2) as (fd, bells, exchange):
        (region,) = regions(1)
        assert not exchange.queue(1).comes_within(0.01)
        assert exchange.post([0, 1], region)
        assert exchange.queue(1).comes_within(0.0)
        assert exchange.queue(1).take() == region
        later = threading.Timer(0.02, lambda: Exchange(fd, bells).post([0, 1], region))
        later.start()
        assert exchange.queue(1).comes_within(30.0)
        assert exchange.queue(1).take() == region
        later.join()


def test_a_full_queue_is_an_error_that_names_it() -> None:
    with exchange_of(3) as (_, _, exchange):
        (region,) = regions(1)
        for _ in range(QUEUE_ENTRIES):
            assert exchange.post([0, 2], region)
            assert exchange.queue(0).take() == region
        with pytest.raises(ExchangeFull, match="queue of engine 2 is full"):
            exchange.post([0, 2], region)
        assert exchange.queue(0).take() is None, "a post that failed was seen"
        assert exchange.queue(2).take() == region
        assert exchange.post([0, 2], region)
        exchange.reset(2)
        assert exchange.queue(2).take() is None


def test_nothing_is_posted_to_a_broken_group() -> None:
    with exchange_of(2) as (_, _, exchange):
        broken, other = regions(2)
        exchange.clear(broken, PAGE_BYTES)
        exchange.clear(other, PAGE_BYTES)
        assert not exchange.is_broken(broken)
        exchange.break_group(broken)
        assert exchange.is_broken(broken)
        assert not exchange.is_broken(other)
        assert not exchange.post([0, 1], broken)
        assert exchange.post([0, 1], other)
        assert [taken(exchange, number) for number in (0, 1)] == [[other], [other]]
        exchange.clear(broken, PAGE_BYTES)
        assert exchange.post([0, 1], broken)


def test_a_poster_reads_the_flag_that_its_process_has_mapped() -> None:
    """The flag is set by a system call, as the daemon does, and seen through the mapping."""
    with exchange_of(2) as (fd, _, exchange):
        (region,) = regions(1)
        exchange.clear(region, PAGE_BYTES)
        with mmap.mmap(fd, PAGE_BYTES, offset=region) as pages, memoryview(pages).cast("q") as words:
            poster = Poster(exchange, [0, 1], region, words)
            for _ in range(3 * QUEUE_ENTRIES):
                assert poster.post()
                assert [exchange.queue(number).take() for number in (0, 1)] == [region, region]
            exchange.break_group(region)
            assert not poster.post()
            assert [exchange.queue(number).take() for number in (0, 1)] == [None, None]


def test_who_leaves_keeps_no_entry() -> None:
    """Its region may be another group's when all have left: an old entry would be taken for one of that."""
    with exchange_of(2) as (_, _, exchange):
        left, other = regions(2)
        for region in (left, other, left):
            assert exchange.post([0, 1], region)
        exchange.leave(1, left)
        assert exchange.is_broken(left)
        assert taken(exchange, 1) == [other]
        assert taken(exchange, 0) == [left, other, left]
        assert not exchange.post([0, 1], left)


def test_what_is_no_exchange_memory_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        with pytest.raises(ValueError, match="not of an exchange memory"):
            Exchange(fd)
    finally:
        os.close(fd)
    with exchange_of(2) as (own, bells, exchange):
        with pytest.raises(ValueError, match="1 doorbells for an exchange memory of 2 engines"):
            Exchange(own, bells[:1])
        with pytest.raises(ValueError, match="engine 2 is not among"):
            exchange.queue(2).take()
        with pytest.raises(ValueError, match="region 0 of"):
            exchange.clear(0, PAGE_BYTES)


def test_a_region_has_a_whole_sequence_table_and_plan() -> None:
    """Followers read columns that a leader writes in another process: each column of a table must be in the region."""
    with exchange_of(2) as (_, _, exchange):
        offset = first_region(2)
        exchange.clear(offset, region_bytes(SIZES))
        leader, follower = (GroupRegion(exchange, Group(rank, [1, 0], offset, region_bytes(SIZES)), SIZES) for rank in (0, 1))
        table = leader.empty_table()
        expected = make_sequence_table(4, 100, 7, 2)
        for column in fields(expected):
            own, seen, want = (getattr(each, column.name) for each in (table, follower.table, expected))
            if column.name == "params":
                assert own == want
                continue
            columns = zip(own, seen, want, strict=True) if isinstance(own, list) else [(own, seen, want)]
            for mine, theirs, made in columns:
                assert (mine.dtype, mine.shape) == (made.dtype, made.shape), column.name
                assert (mine == made).all(), column.name
                mine[:] = 1
                assert (theirs == 1).all(), column.name
        assert set(TABLE_COLUMNS) == {c.name for c in fields(expected)} - {"tokens", "block_tables", "params"}
        slots = np.array([3, 1], np.int32)
        plan = BatchPlan(7, "m", slots, slots * 2, slots + 1, np.array([True, False]), False, True)
        assert leader.post(plan)
        assert [taken(exchange, number) for number in (0, 1)] == [[offset], [offset]]
        read = follower.read_plan("m")
        for name in ("slots", "num_computed", "num_new", "samples"):
            assert (getattr(read, name) == getattr(plan, name)).all()
        assert (read.step_id, read.model, read.all_decode, read.drafted, read.to_propose) == (7, "m", False, True, None)
        assert not leader.is_broken
        assert leader.post(plan)
        follower.leave()
        assert [taken(exchange, number) for number in (0, 1)] == [[], [offset]]
        assert not leader.post(plan)
        assert leader.is_broken
        assert follower.is_broken


def test_a_region_that_is_too_small_is_refused() -> None:
    with exchange_of(2) as (_, _, exchange):
        offset, num_bytes = first_region(2), region_bytes(SIZES)
        exchange.clear(offset, num_bytes)
        with pytest.raises(ValueError, match="parallel: region"):
            GroupRegion(exchange, Group(0, [0, 1], offset, num_bytes - PAGE_BYTES), SIZES)


def test_the_memory_for_shared_reads_is_given_back_after_the_load() -> None:
    """The rest of the region stays as it is."""
    with exchange_of(2) as (fd, _, exchange):
        offset, num_bytes = first_region(2), region_bytes(SIZES)
        exchange.clear(offset, num_bytes)
        members = [GroupRegion(exchange, Group(rank, [1, 0], offset, num_bytes), SIZES) for rank in (0, 1)]
        members[0].table.tokens[:] = 7
        sharing = [ExitStack() for _ in members]
        reads = [stack.enter_context(member.sharing_reads()) for stack, member in zip(sharing, members, strict=True)]
        before = os.fstat(fd).st_blocks
        read = Read("f", 0, 1 << 20, (), num_readers=2)
        for (view,) in reads:
            view.offer(0, read, memoryview(bytes(1 << 20)))
        assert os.fstat(fd).st_blocks >= before + (2 << 20) // 512
        for stack in sharing:
            assert os.fstat(fd).st_blocks > before
            stack.close()
        assert os.fstat(fd).st_blocks <= before
        assert (members[1].table.tokens == 7).all()


@pytest.mark.parametrize(
    ("ranks", "num_stages", "hosts", "shares"),
    [
        (4, 2, ["", "", "b", "b"], [True] * 4),
        (4, 1, ["", "", "b", "b"], [False] * 4),
        (4, 2, ["", "b", "", ""], [False, False, True, True]),
        (2, 2, [], [False, False]),
        (2, 1, [], [True, True]),
    ],
)
def test_only_members_of_a_stage_on_one_host_share_reads(ranks: int, num_stages: int, hosts: list[str], shares: list[bool]) -> None:
    sizes = SIZES._replace(num_ranks=ranks, num_stages=num_stages, handed_bytes=1024)
    with exchange_of(4) as (_, _, exchange), ExitStack() as sharing:
        offset, num_bytes = first_region(4), region_bytes(sizes)
        exchange.clear(offset, num_bytes)
        views = []
        for rank in range(ranks):
            group = Group(rank, list(range(ranks)), offset, num_bytes, num_stages=num_stages, hosts=hosts)
            views.append(sharing.enter_context(GroupRegion(exchange, group, sizes).sharing_reads()))
        assert [len(shared) == 1 for shared in views] == shares
        if num_stages == 2 and all(shares):  # stages share nothing with each other
            read = Read("f", 0, 4096, (), num_readers=2)
            views[0][0].offer(0, read, memoryview(bytes(4096)))
            seen = [view.look(0, 0, read) for (view,) in views[1:]]
            assert seen == [Offer.READY, Offer.COMING, Offer.COMING]
