"""What a slow or hung mount below the models folder does to the node. These acts take their time, so they go on behind others."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import urllib.request
from collections.abc import Iterator

from tests.chaos.cast import FAR, FAR_ADAPTER, MODELS
from tests.chaos.clients import BROKEN, MISSING, Request, drawn
from tests.chaos.slow_mount import SlowMount
from tests.chaos.world import STALL_S, World

LONGEST_SILENCE_S = 0.8 * STALL_S  # of a mount: an engine that waits for it is not to be taken for one that hangs
LISTED_S = 120.0  # a scan that was killed at a folder looks at it again after a minute


def slow_mount(world: World) -> None:
    """A model comes and goes with a mount whose reads are slow, an adapter in its folder with it; its answers are those of the
    model that it is a copy of."""
    request, read_s = drawn(world.draw, MODELS[:1])._replace(model=FAR), world.draw.random() / 10
    of_adapter = _of_adapter(world)

    def come_and_go() -> None:
        with mounted(world, FAR) as mount:
            mount.read_s = read_s
            if until_listed(world, FAR, True):
                world.clients.one(request)
            for each in of_adapter:
                if until_listed(world, FAR_ADAPTER, True):
                    world.clients.one(each)

    if world.may_mount:
        world.behind("mount", come_and_go)


def mount_that_hangs(world: World) -> None:
    """A mount stops to answer while it is scanned, or a model or an adapter is loaded from it, and then goes on or is taken
    away."""
    begin_s, hang_s, is_taken_away = world.draw.random() * 2, world.draw.random() * LONGEST_SILENCE_S, world.draw.random() < 0.5
    of_adapter = _of_adapter(world)

    def hang() -> None:
        with mounted(world, FAR) as mount, world.clients.changed("a mount that hangs", {FAR_ADAPTER}, BROKEN | MISSING):
            mount.read_s = 0.02
            world.behind("load", lambda: world.cli("load", FAR, codes=None))
            for each in of_adapter:
                world.behind("load of an adapter", functools.partial(world.clients.one, each))
            time.sleep(begin_s)
            with mount.hang():
                time.sleep(hang_s)
                if is_taken_away:
                    mount.close()
            world.join_one("load of an adapter")

    if world.may_mount:
        world.behind("mount", hang)


def _of_adapter(world: World) -> list[Request]:
    """Returns a request for the adapter on the mount; none where there are no adapters."""
    return [drawn(world.draw, (FAR_ADAPTER,))] if world.cast.has_adapters else []


@contextlib.contextmanager
def mounted(world: World, name: str) -> Iterator[SlowMount]:
    """Yields a mount below the models folder that shows the folder of this name beside it."""
    at = world.node.models / name
    until_listed(world, name, False)  # an earlier one may still be, until the scan that finds it gone
    at.mkdir()
    mount = SlowMount(world.node.folder / name, at)
    try:
        told = world.node.models / f"{name}-told"  # nothing else tells of a mount
        told.mkdir()
        told.rmdir()
        yield mount
    finally:
        mount.close()
        at.rmdir()


def until_listed(world: World, name: str, is_there: bool) -> bool:
    """Waits until the model or adapter of this name is listed, or is not; returns False, with a complaint, if that does not
    come."""
    end = time.monotonic() + LISTED_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{world.clients.url}/v1/models", timeout=5) as answer:
            if (name in {each["id"] for each in json.load(answer)["data"]}) is is_there:
                return True
        time.sleep(0.2)
    world.complain(f"{name} was {'not listed' if is_there else 'still listed'} after {LISTED_S:g} s")
    return False
