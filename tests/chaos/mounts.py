"""What a slow or hung mount below the models folder does to the node. These acts take their time, so they go on behind others."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator

from tests.chaos.clients import drawn
from tests.chaos.slow_mount import SlowMount
from tests.chaos.world import FAR, MODELS, STALL_S, World

LONGEST_SILENCE_S = 0.8 * STALL_S  # of a mount: an engine that waits for it is not to be taken for one that hangs
LISTED_S = 120.0  # a scan that was killed at a folder looks at it again after a minute


def slow_mount(world: World) -> None:
    """A model comes and goes with a mount whose reads are slow; its answers are those of the model that it is a copy of."""
    request, read_s = drawn(world.draw, MODELS[:1])._replace(model=FAR), world.draw.random() / 10

    def come_and_go() -> None:
        with _mounted(world) as mount:
            mount.read_s = read_s
            if _until_listed(world, True):
                world.clients.one(request)

    if world.may_mount:
        world.behind("mount", come_and_go)


def mount_that_hangs(world: World) -> None:
    """A mount stops to answer while it is scanned or a model is loaded from it, and then goes on or is taken away."""
    begin_s, hang_s, is_taken_away = world.draw.random() * 2, world.draw.random() * LONGEST_SILENCE_S, world.draw.random() < 0.5

    def hang() -> None:
        with _mounted(world) as mount:
            mount.read_s = 0.02
            world.behind("load", lambda: world.cli("load", FAR, codes=None))
            time.sleep(begin_s)
            with mount.hang():
                time.sleep(hang_s)
                if is_taken_away:
                    mount.close()

    if world.may_mount:
        world.behind("mount", hang)


@contextlib.contextmanager
def _mounted(world: World) -> Iterator[SlowMount]:
    """Yields a mount below the models folder on which there is a copy of the first model."""
    at = world.node.models / FAR
    _until_listed(world, False)  # an earlier one may still be, until the scan that finds it gone
    at.mkdir()
    mount = SlowMount(world.node.folder / FAR, at)
    try:
        (world.node.models / "told").mkdir()  # nothing else tells of a mount
        (world.node.models / "told").rmdir()
        yield mount
    finally:
        mount.close()
        at.rmdir()


def _until_listed(world: World, is_there: bool) -> bool:
    """Waits until the model on the mount is listed, or is not; returns False, with a complaint, if that does not come."""
    end = time.monotonic() + LISTED_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{world.clients.url}/v1/models", timeout=5) as answer:
            if (FAR in {each["id"] for each in json.load(answer)["data"]}) is is_there:
                return True
        time.sleep(0.2)
    world.complain(f"{FAR} was {'not listed' if is_there else 'still listed'} after {LISTED_S:g} s")
    return False
