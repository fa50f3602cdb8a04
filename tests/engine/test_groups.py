"""Models that are split over engines: their steps, their ends, and what becomes of other models meanwhile. Engines are real
processes with null models, whose ranks wait for each other in every step as those of real ones do."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.exchange import RegionSizes
from engine.main import EXIT_FAULT
from engine.memory.group_region import open_region
from engine.null.runner import null_candidates, null_tokens
from engine.protocol import (
    FINISH_LENGTH,
    Abort,
    EngineFault,
    Group,
    LoadFailed,
    SetLease,
    Shutdown,
    Stats,
    TokensOut,
)
from tests.engine.engine_process import Node, load_message, null_checkpoint, null_configure, submit_message
from tests.engine.group_engines import LEASE, Engines


class NullEngines(Engines):
    """Engines of null models, whose tokens are known beforehand."""

    def __init__(self, number: int, step_ms: float = 0.2) -> None:
        super().__init__(number, null_configure(null_step_ms=step_ms))

    def check(self, number: int, request_id: int, num_tokens: int = 8, num_prompt: int = 3) -> None:
        """Waits for a request's end, and checks that it has got the tokens that its seed gives on any device."""
        engine = self.all[number]
        engine.wait_finished(request_id)
        assert engine.finished()[request_id] == FINISH_LENGTH
        assert engine.output()[request_id] == expected(request_id, num_prompt, num_tokens)

    def check_empty(self, path: str, number: int) -> None:
        """Checks that an engine without models has all its memory: a model that takes every chunk is loaded."""
        self.load_alone(path, "whole", number, weights_chunks=32, kv_reserved_chunks=32)
        self.evict_alone("whole", number)


def expected(request_id: int, num_prompt: int, num_tokens: int) -> list[int]:
    positions = np.arange(num_prompt, num_prompt + num_tokens, dtype=np.int32)
    tokens: list[int] = null_tokens(
        np.full(num_tokens, request_id, np.uint64), positions, null_candidates(1000, [300, 301])
    ).tolist()
    return tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return null_checkpoint(tmp_path_factory.mktemp("null") / "m")


@pytest.fixture(scope="module")
def three() -> Iterator[NullEngines]:
    """Three engines. Each test leaves them without models."""
    engines = NullEngines(3)
    yield engines
    engines.close()


def test_a_model_over_two_engines_says_what_it_says_on_one(three: NullEngines, path: str) -> None:
    three.load(path, "m", [1, 0])
    first, second = three.ask(1, "m", 20), three.ask(1, "m", 5, [5] * 40)
    three.check(1, first, 20)
    three.check(1, second, 5, 40)
    assert not three.all[0].of(TokensOut), "a follower reports tokens"
    three.evict("m")
    three.load(path, "m", [0, 1, 2])  # another one leads, in another region of the same memory
    three.check(0, three.ask(0, "m", 6), 6)
    three.evict("m")
    for number in range(3):
        three.check_empty(path, number)


def test_prefixes_are_found_and_the_lease_is_not_touched(three: NullEngines, path: str) -> None:
    """The KV of a split model is its own: nobody draws it, and it draws nothing."""
    leader = three.load(path, "m", [0, 1])
    prompt = list(range(10, 58))
    three.check(0, three.ask(0, "m", prompt=prompt), num_prompt=48)
    again = three.ask(0, "m", prompt=prompt)
    three.check(0, again, num_prompt=48)
    assert {again: 32} in [out.cached for out in leader.of(TokensOut)]
    running = three.ask(0, "m", 100)
    three.wait_tokens(0, running, 10)
    for engine in three.all:
        engine.send(SetLease(0))
    three.check(0, running, 100)
    assert leader.last_stats().preemptions == 0
    too_long = three.ask(0, "m", 200, [5] * 50)  # 64 KiB are 32 blocks of 16 tokens: four chunks are enough for all that is allowed
    three.check(0, too_long, 200, 50)
    three.evict("m")
    for engine in three.all:
        engine.send(SetLease(LEASE))


def test_overlapping_groups_and_single_models_at_random(three: NullEngines, path: str) -> None:
    """Each engine leads one group, follows in another and serves a model of its own: none waits for ever, and all say what they
    must, while groups come and go."""
    choose = random.Random(5)
    groups = {"a": [0, 1], "b": [1, 2], "c": [2, 0], "d": [2, 1, 0], "e": [0, 1], "f": [1, 0, 2]}
    stages = {"b": 2, "e": 2, "f": 3}
    for number in range(3):
        three.load_alone(path, f"alone {number}", number)
    for name, members in groups.items():
        three.load(path, name, members, num_stages=stages.get(name, 1))
    asked: list[tuple[int, str, int, int]] = []
    for _ in range(12):
        for _ in range(8):
            number = choose.randrange(3)
            model = choose.choice([f"alone {number}", *(name for name, members in groups.items() if members[0] == number)])
            num_tokens = choose.randint(1, 40)
            asked.append((number, model, three.ask(number, model, num_tokens), num_tokens))
        time.sleep(choose.random() * 0.02)
        leaving = choose.choice("abcdef")
        if choose.random() < 0.7:
            lost = [one for one in asked if one[1] == leaving]
            order = choose.sample(groups[leaving], len(groups[leaving]))
            three.evict(leaving, order, pause_s=choose.choice([0.0, 0.002]))
            three.load(path, leaving, groups[leaving], num_stages=stages.get(leaving, 1))
            asked = [one for one in asked if one not in lost]
            for number, model, request_id, num_tokens in lost:  # again, as the daemon does
                had = three.all[number].output().get(request_id, [])
                if request_id not in three.all[number].finished():
                    message = submit_message(request_id, model, prompt=[5, 6, 7], max_tokens=num_tokens, output=list(had))
                    three.all[number].send(message)
                asked.append((number, model, request_id, num_tokens))
        else:
            gone = asked.pop(choose.randrange(len(asked)))
            three.all[gone[0]].send(Abort([gone[2]]))
    for number, _, request_id, num_tokens in asked:
        three.check(number, request_id, num_tokens)
    for name in groups:
        three.evict(name)
    for number in range(3):
        three.evict_alone(f"alone {number}", number)
        three.check_empty(path, number)


@pytest.mark.parametrize("groups", [{"a": [0, 1], "b": [2, 1]}, {"a": [0, 1]}], ids=["two models", "a pipeline"])
def test_a_busy_follower_serves_its_own_models_and_answers(path: str, groups: dict[str, list[int]]) -> None:
    """With two models that others lead, or with several steps of a pipeline under way, its queue is never empty. A step of its own
    comes between two of theirs all the same, and so do messages."""
    engines = NullEngines(3, 10.0)
    try:
        num_stages = 2 if len(groups) == 1 else 1
        engines.load_alone(path, "own", 1)
        for name, members in groups.items():
            engines.load(path, name, members, num_stages=num_stages)
        streams = [(members[0], engines.ask(members[0], name, 100)) for name, members in groups.items() for _ in range(num_stages)]
        for leader, stream in streams:
            engines.wait_tokens(leader, stream, 3)
        engines.check(1, engines.ask(1, "own", 10), 10)
        engines.evict_alone("own", 1)
        for leader, stream in streams:
            while engines.all[leader].receive(0.0):  # takes in what has been sent so far
                pass
            assert stream not in engines.all[leader].finished()
        for leader, stream in streams:
            engines.check(leader, stream, 100)
    finally:
        engines.close()


def test_evictions_in_any_order_end_in_the_middle_of_steps(three: NullEngines, path: str) -> None:
    choose = random.Random(11)
    for _ in range(25):
        members = choose.sample(range(3), choose.choice([2, 3]))
        three.load(path, "m", members, num_stages=choose.choice([1, len(members)]))
        for _ in range(choose.randint(1, 3)):
            three.ask(members[0], "m", 200)
        time.sleep(choose.random() * 0.01)
        three.evict("m", choose.sample(members, len(members)), pause_s=choose.choice([0.0, 0.001, 0.004]))


def test_a_member_that_cannot_load_leaves_the_others_free(three: NullEngines, path: str) -> None:
    three.begin(path, "m", [0, 1], ranks=[0])
    three.wait_loaded(0)
    members, region = three.groups["m"]
    three.all[1].send(load_message(path, "m", 999, lease_chunks=LEASE, weights_chunks=80, group=Group(1, members, *region)))
    failed = three.all[1].wait_for(LoadFailed)
    assert not failed.permanent
    three.evict("m", [0, 1])  # also of one that has nothing
    three.begin(path, "m", [0, 1])
    three.evict("m")  # while it loads
    three.load(path, "m", [0, 1])
    three.check(0, three.ask(0, "m"))
    three.evict("m")
    for number in (0, 1):
        three.check_empty(path, number)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speculator": "mtp"}, "parallel: speculator mtp is not built"),
        ({"kv_slots": [1]}, "parallel: the host tier keeps no KV"),
        ({"kv_reserved_chunks": 0}, "parallel: a model that is split has no KV but what is reserved"),
        ({"max_sequences": 4000}, "parallel: region"),
    ],
)
def test_what_a_group_cannot_have_is_refused(three: NullEngines, path: str, changes: dict[str, Any], why: str) -> None:
    region = three.node.region(RegionSizes(2, 32, 256, 16))
    before = len(three.all[2].of(LoadFailed))
    three.all[2].send(load_message(path, "refused", 1000, group=Group(0, [2, 1], *region), **changes))
    failed = three.all[2].wait_for(LoadFailed, before + 1)
    assert why in failed.error
    three.node.give_back(region)


def test_two_engines_of_one_group_must_differ(three: NullEngines, path: str) -> None:
    before = len(three.all[2].of(LoadFailed))
    three.all[2].send(load_message(path, "refused", 1001, group=Group(0, [2, 2], 0, 0)))
    failed = three.all[2].wait_for(LoadFailed, before + 1)
    assert failed.permanent
    assert "must be two or more different ones" in failed.error


def test_a_plan_for_who_has_no_share_breaks_the_group(three: NullEngines, path: str) -> None:
    """Nobody waits for an engine that has nothing of the model, whatever went wrong."""
    three.begin(path, "m", [0, 1], ranks=[0])
    three.wait_loaded(0)
    region = three.groups["m"][1][0]
    three.ask(0, "m", 50)
    deadline_s = time.monotonic() + 10
    while not three.node.exchange.is_broken(region):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    three.load_alone(path, "alone", 0)
    three.check(0, three.ask(0, "alone"))
    three.evict("m")
    three.evict_alone("alone", 0)


def test_steps_of_different_sequences_are_in_all_stages(path: str) -> None:
    """A step takes each stage 10 ms. With one stream the stages take turns; with three all of them are busy."""
    engines = NullEngines(3, step_ms=10.0)
    try:
        engines.load(path, "m", [0, 1, 2], num_stages=3)
        took_s = []
        for number in (1, 3):
            begin_s = time.monotonic()
            for stream in [engines.ask(0, "m", 20) for _ in range(number)]:
                engines.check(0, stream, 20)
            took_s.append(time.monotonic() - begin_s)
        assert took_s[0] > 20 * 0.03, "a token passes through all stages"
        assert took_s[1] < 2 * took_s[0], "one step after the other would take three times as long"
    finally:
        engines.close()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_members_may_die(tmp_path: Path, path: str, num_stages: int) -> None:
    """What a killed follower, one that crashes in a step and one that is shut down leave behind."""
    engines = NullEngines(2)
    crashing = null_checkpoint(tmp_path / "crashing", crash_token=666, crash_rank=1)
    try:
        engines.load_alone(path, "alone", 0)
        for way in ("killed", "crashed", "shut down", "leader killed"):
            leader, follower = engines.load(crashing, "m", [0, 1], num_stages=num_stages), engines.all[1]
            region = engines.groups["m"][1][0]
            stream = engines.ask(0, "m", 250)
            engines.wait_tokens(0, stream, 5)
            alone = engines.ask(0, "alone", 100)
            if way == "leader killed":
                engines.load_alone(path, "its own", 1)
                leader.process.send_signal(signal.SIGKILL)
                leader.process.wait(10)
                engines.node.exchange.break_group(region)
                engines.evict("m", [1])
                engines.check(1, engines.ask(1, "its own"))
                engines.replace(0)
                continue
            if way == "killed":
                follower.process.send_signal(signal.SIGKILL)
                follower.process.wait(10)
                assert set(follower.running()) <= {stream}  # none between two steps
                time.sleep(0.05)  # the leader waits meanwhile
                engines.node.exchange.break_group(region)
            elif way == "crashed":
                guilty = engines.ask(0, "m", 8, [5, 666])
                follower.process.wait(10)
                assert guilty in follower.running()
            else:
                follower.send(Shutdown())
                follower.process.wait(10)
            assert engines.node.exchange.is_broken(region)
            engines.check(0, alone, 100)
            engines.ask(0, "m")  # was sent before the daemon knew
            before = len(leader.output()[stream])
            engines.evict("m", [0])
            assert len(leader.output()[stream]) == before < 250
            assert stream not in leader.finished(), "a request of a broken group was ended"
            engines.replace(1)
        engines.load(path, "m", [0, 1])
        engines.check(0, engines.ask(0, "m"))
    finally:
        engines.close()


def test_a_follower_tells_a_fault_of_its_device_although_no_step_comes(tmp_path: Path) -> None:
    """The follower meets the fault after it has launched the step, as that of a GPU, while the leader waits for its part. Its
    engine ends as by a fault of its own steps, the step's request is blamed for it, and the leader waits no longer."""
    engines = NullEngines(2)
    late = null_checkpoint(tmp_path / "late", crash_token=666, crash_rank=1, crash_late_s=0.1)
    try:
        leader, follower = engines.load(late, "m", [0, 1]), engines.all[1]
        engines.load_alone(late, "alone", 0)
        engines.check(0, engines.ask(0, "m"))
        guilty = engines.ask(0, "m", 8, [5, 666])
        assert follower.process.wait(10) == EXIT_FAULT
        assert follower.running() == (guilty,)
        follower.until(lambda: bool(follower.of(EngineFault)))
        assert follower.of(EngineFault)[0].error == "RuntimeError: m: crash_token 666 met"
        engines.check(0, engines.ask(0, "alone"))
        assert guilty not in leader.finished()
        engines.evict("m", [0])
    finally:
        engines.close()


def test_followers_sleep_when_nothing_comes(three: NullEngines, path: str) -> None:
    three.load(path, "m", [0, 1])
    three.load(path, "stages", [0, 1], num_stages=2)
    three.check(0, three.ask(0, "m"))
    three.check(0, three.ask(0, "stages"))
    time.sleep(0.1)
    before = _cpu_s(three.all[1].process.pid)
    time.sleep(0.5)
    assert _cpu_s(three.all[1].process.pid) - before < 0.1
    assert three.all[1].of(Stats)
    three.evict("m")
    three.evict("stages")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def test_an_engine_without_the_memory_refuses(path: str) -> None:
    with pytest.raises(ValueError, match="model m: parallel: this engine shares no memory with others"):
        open_region(None, load_message(path, group=Group(0, [0, 1], 4096, 1 << 20)), 16)


def test_a_mapped_region_holds_no_descriptor_and_leaves_with_its_last_view(path: str) -> None:
    node = Node(2)
    place = node.region(RegionSizes(2, 32, 256, 16))
    before = os.listdir("/proc/self/fd")
    leader, follower = (open_region(node.exchange, load_message(path, group=Group(rank, [0, 1], *place)), 16) for rank in range(2))
    assert os.listdir("/proc/self/fd") == before
    tokens = leader.table.tokens
    tokens[5, 7] = 11
    assert follower.table.tokens[5, 7] == 11
    assert _num_mapped(node, place[0]) == 2
    del leader, follower
    gc.collect()
    assert (int(tokens[5, 7]), _num_mapped(node, place[0])) == (11, 1)
    del tokens
    gc.collect()
    assert _num_mapped(node, place[0]) == 0
    with pytest.raises(ValueError, match=r"parallel: region .* ends behind the exchange memory"):
        open_region(node.exchange, load_message(path, group=Group(0, [0, 1], place[0] + (1 << 30), place[1])), 16)
    node.close()


def _num_mapped(node: Node, offset: int) -> int:
    """Returns how often this process has mapped a node's exchange memory at an offset."""
    inode = str(os.fstat(node.exchange.fd).st_ino)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(line[4] == inode and int(line[2], 16) == offset for line in lines)


def test_engines_end_with_their_daemon_whatever_they_wait_for(three: NullEngines, path: str) -> None:
    """Two wait in a step for a third that was killed, and the daemon is gone before it could break the group. The last test: the
    engines are gone afterwards."""
    three.load(path, "m", [0, 1, 2])
    stream = three.ask(0, "m", 250)
    three.wait_tokens(0, stream, 5)
    three.all[2].process.kill()
    three.all[2].process.wait(10)
    time.sleep(0.05)
    for engine in three.all:
        engine.sock.close()
    assert [engine.process.wait(10) for engine in three.all[:2]] == [0, 0]
