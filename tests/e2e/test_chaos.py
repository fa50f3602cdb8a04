"""Some chaos: nothing is lost that a client or a kill -9 of the daemon did not end. `make chaos` runs it longer."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import clients
from tests.chaos.__main__ import in_turn, run
from tests.chaos.acts import ACTS, Act
from tests.chaos.cast import FIRST, RED, SECOND, Cast
from tests.chaos.clients import Broken, Refused, Request, Told
from tests.chaos.holdings import MORE, leaks
from tests.chaos.world import World
from tests.conftest import REPORTED

SECONDS = 40.0


@pytest.mark.timeout(900)
def test_nothing_is_lost(tmp_path: Path, record_property: Callable[[str, str], None]) -> None:
    seed = random.randrange(10**6)
    lines = [f"python -m tests.chaos --runner null --seconds {SECONDS:g} --seed {seed}"]
    said = run(tmp_path, SECONDS, seed, say=lines.append)
    assert not said["faults"], "\n".join([*lines, *said["faults"]])
    assert said["requests"]["answered"] > 20
    assert len(said["acts"]) >= 4
    told = f"chaos, seed {seed}: {said['requests']} in {said['seconds']} s, {sum(said['acts'].values())} acts"
    record_property(REPORTED, f"{told}; skipped: {', '.join(said['skipped']) or 'nothing'}")


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    """Requests that end with the daemon are faults unless the clients know of it."""

    def kill(world: World) -> None:
        for _ in range(5):  # a request that is sent just then waits for the next daemon
            world.node.wait_for(lambda: world.clients.running, "a request")
            time.sleep(0.5)
            world.node.restart(signal.SIGKILL)
            if world.clients.faults:
                break

    said = run(tmp_path, 0.1, 1, num_clients=2, acts=[Act("kill -9 that nobody knows of", 1, kill)], say=lambda line: None)
    assert said["requests"]["lost"] >= 1
    assert any("RemoteDisconnected" in fault or "ended after" in fault or "Reset" in fault for fault in said["faults"])


def test_what_a_changed_file_may_bring_about_is_a_fault_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("rust", "why not", 20, 0, is_chat=False, is_stream=False)
    texts = {request: "one", request._replace(model="second"): "two"}
    told: list[Told | str] = []

    def answer(url: str, request: Request) -> str:
        now = told.pop(0)
        if isinstance(now, Told):
            raise now
        return now

    monkeypatch.setattr(clients, "ask", answer)
    asking = clients.Clients("", ["rust"], texts, random.Random(0), 0)
    refused, broken = Refused(0.0, "changed", "adapter_unavailable"), Broken("is broken", "adapter_unusable")
    with asking.changed("an act", {"rust"}, {"adapter_unavailable", "adapter_unusable"}, ("second",)):
        told += [refused, "one", broken, "two"]
        for _ in range(3):
            asking.one(request)
    assert not asking.faults
    assert asking.counts == {
        "refused": 1,
        "answered": 1,
        "told adapter_unusable: an act": 1,
        "answered as another version": 1,
    }
    told += [Refused(0.0, "busy", "queue_full"), "one", refused, broken, "two"]
    for _ in range(4):
        asking.one(request)
    stream = request._replace(is_stream=True)
    for names, count in (({"rust"}, 1), ({"other"}, 0)):
        with asking.changed("an act", names, clients.ANOTHER), asking.handed_over():
            told.append(Broken("the stream ended"))
            asking.one(stream)
        assert asking.counts.pop("ended by a restart: its adapter had changed", 0) == count
    assert not told
    assert [fault.split("): ")[-1].split(") ")[-1] for fault in asking.faults] == [
        "was refused though nobody had changed a file: changed",
        "Broken: is broken",
        "another text: 'two', not 'one'",
        "Broken: the stream ended",
    ]


def test_a_base_and_adapters_that_say_the_same_are_told() -> None:
    request = Request("ash", "why not", 20, 0, is_chat=False, is_stream=False)
    names = ("ash", RED, FIRST, SECOND, "oak")
    texts = {request._replace(model=name): name.replace("oak", "ash") for name in names}
    assert not Cast("torch").alike(texts)
    (told,) = Cast("torch").alike(texts | {request._replace(model=SECOND): RED})
    assert told.endswith(f"the same text as {RED}: {RED!r}")


def test_a_seed_repeats_the_acts_and_each_comes_before_any_comes_again() -> None:
    number = len(ACTS) + sum(act.weight for act in ACTS)
    first, again, other = (list(islice(in_turn(ACTS, random.Random(seed)), number)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first[: len(ACTS)]) == set(ACTS)
    assert first[len(ACTS) - 1].is_long
    assert Counter(first[len(ACTS) :]) == {act: act.weight for act in ACTS}


def test_leaks_of_the_daemon_and_of_engines_are_told() -> None:
    process = {"descriptors": 10, "mappings": 300, "threads": 2, "anonymous_mib": 40.0}
    counts = {"engines": 2, "fork_servers": 1, "text_processes": 0, "scans": 0, "other_processes": 0, "zombies": 0, "stored": 3}
    nothing = {"chunks_in_use": 0, "adapters_in_memory": 0, "host_tier_bytes": 0, "requests": 0}
    before = {"daemon": process, "engine cpu:0": process, **counts, "devices_filled": 2, **nothing}
    assert leaks(before, before) == []
    for name, kind in (("daemon", "daemon"), ("engine cpu:0", "engine")):
        for what, more in MORE[kind].items():
            assert leaks(before, before | {name: process | {what: process[what] + more}}) == []
            (told,) = leaks(before, before | {name: process | {what: process[what] + more + 1}})
            assert told.startswith(f"{what} of the {name}: {process[what]} before")
    for name in ("zombies", "other_processes", *nothing):
        assert leaks(before, before | {name: 1}) == [f"at the end {name} is 1"]
    assert leaks(before, before | {"engines": 1}) == ["engines: 2 before, 1 after"]
    assert leaks(before, before | {"devices_filled": 1}) == ["devices_filled: 2 before, 1 after"]
    assert leaks(before, before | {"scans": 2}) == ["at the end scans is 2, more than 1"]
    assert leaks(before, before | {"stored": 17}) == ["at the end stored is 17, more than 16"]
