"""Some chaos: nothing is lost that a client or a kill -9 of the daemon did not end. `make chaos` runs it longer."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.__main__ import run
from tests.chaos.acts import Act
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
    record_property(REPORTED, f"chaos, seed {seed}: {said['requests']} in {said['seconds']} s, {sum(said['acts'].values())} acts")


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
