"""What is done to the node. Each act leaves the node whole again, or in a state that it has to mend by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from daemon.engines.workers import START_LIMIT_S
from loader import threads
from tests.chaos import adapters
from tests.chaos.cast import OF_GUEST, SPARE
from tests.chaos.clients import CRASHED, KILLED, NO_MEMORY, drawn, hang_up, send_garbage
from tests.chaos.memory import no_more_mappings
from tests.chaos.mounts import mount_that_hangs, slow_mount
from tests.chaos.world import DEVICES, SCANNING, SMALLER_DEVICES, STALL_S, TEXT, World
from tests.e2e import processes
from tests.e2e.checkpoints import make_model
from tests.e2e.hostile_folders import make_hostile
from tests.loader.checkpoints import write_checkpoint

# The first steps of a size are given ten times as long, as nobody knows their length, and an engine that starts START_LIMIT_S.
LONGEST_HANG_S = max(11 * STALL_S, START_LIMIT_S + STALL_S)
LAST_TOLD_S = threads.UNSEEN_LIMIT_S + 0.5  # so long after memory is there again a thread may fail that had none
NOT_SAVED = 7  # a command's exit code: applied, but not saved
RESTART = signal.SIGUSR2  # what the unit's RestartKillSignal= is


class Act(NamedTuple):
    """One thing that goes wrong. weight: how often it is drawn. is_long: it may take minutes. of_adapters: it is left out where
    there are no adapters."""

    name: str
    weight: int
    do: Callable[[World], None]
    is_long: bool = False
    of_adapters: bool = False


def _ends_engines(world: World) -> None:
    """Waits until no request is left that ran when an engine ended before: one that has ended two engines is refused for that."""
    world.clients.wait_for_running(world.engines_ended_s)


def _everybody(world: World) -> set[str]:
    """Returns all names by which requests ask, also those of clients of single acts."""
    return {*world.cast.names, *OF_GUEST}


def engines(world: World) -> list[psutil.Process]:
    """Returns the living engines, also those whose fork server is gone."""
    pids = [device["pid"] for device in world.node.json("status")["devices"]]
    found = []
    for pid in filter(None, pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def kill_engine(world: World) -> None:
    _ends_engines(world)
    if living := engines(world):
        _kill(world.draw.choice(living))
        world.engines_ended_s = time.monotonic()


def stop_engine_for_a_while(world: World) -> None:
    """Shorter than what counts as a hang: the engine goes on, and is not ended."""
    if living := engines(world):
        with _stopped(world.draw.choice(living)):
            time.sleep(world.draw.random() * STALL_S / 4)


def hang_engine(world: World) -> None:
    _ends_engines(world)
    if living := engines(world):
        engine = world.draw.choice(living)
        engine.suspend()
        end = time.monotonic() + LONGEST_HANG_S
        while _runs(engine):
            if time.monotonic() > end:
                world.complain(f"a hung engine was not ended within {LONGEST_HANG_S:g} s")
                with contextlib.suppress(psutil.Error):
                    engine.resume()
                break
            time.sleep(0.1)
        world.engines_ended_s = time.monotonic()


def _runs(process: psutil.Process) -> bool:
    """Returns whether a process is there and is no zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_text_helper(world: World) -> None:
    if helpers := processes.with_word(world.pid, TEXT):
        _kill(world.draw.choice(helpers))


def kill_fork_server(world: World) -> None:
    """Its engines live on; the next engine is forked by another server."""
    for server in processes.fork_servers(world.pid):
        _kill(server)


def kill_scan(world: World) -> None:
    (world.node.models / "new").mkdir(exist_ok=True)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if scans := processes.with_word(world.pid, SCANNING):
            _kill(scans[0])
            break
        time.sleep(0.02)
    (world.node.models / "new").rmdir()


def restart(world: World) -> None:
    """Restarts the daemon as `systemctl restart` does. No client may notice."""
    _restart(world)


def kill_daemon(world: World) -> None:
    """kill -9 cuts the connections that are open; the next hearthd takes new ones from the same listener."""
    with world.clients.cut(KILLED):
        world.node.restart(signal.SIGKILL)


def another_version(world: World) -> None:
    """Restarts the daemon as an upgrade, or the way back, does. No client may notice, unless the two cannot read what each other
    hands over: then the connections end, and the rest is there."""
    before, after = world.version, world.draw.choice([one for one in world.versions if one != world.version])
    world.node.tree, world.version = after.tree, after
    is_read = not (before.is_far or after.is_far)
    with contextlib.nullcontext() if is_read else world.clients.cut("an upgrade that cannot go on with connections"):
        _restart(world)
    if (name := world.node.json("status")["version"]) != after.name:
        world.complain(f"version {after.name} was started, {name} runs")


def smaller_budgets(world: World) -> None:
    """Budgets are read at a start: the next daemon has less for its devices and for its host tier, the one after that as before."""
    flags = list(world.node.flags)
    world.node.devices = list(SMALLER_DEVICES)
    world.node.flags[flags.index("--host-tier-bytes") + 1] = "16MiB"
    try:
        _restart(world)
        time.sleep(world.draw.random() * 4)
    finally:
        world.node.devices, world.node.flags = list(DEVICES), flags
        _restart(world)


def short_memory(world: World) -> None:
    """The node and a process that takes all there is use up their control group's memory together. The kernel ends what the daemon
    has started, some of it again and again, and never the daemon."""
    if world.groups is None:
        return
    _ends_engines(world)
    daemon = psutil.Process(world.pid)
    pids = [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
    told = world.clients.changed("memory is short", _everybody(world), NO_MEMORY | CRASHED)
    with told:
        with world.groups.short_of_memory(pids, world.draw.choice((64 << 20, 128 << 20))):
            time.sleep(1 + world.draw.random() * 3)
        time.sleep(LAST_TOLD_S)
    world.engines_ended_s = time.monotonic()


def engine_without_mappings(world: World) -> None:
    """What it wants to map fails for a while. It may end by that, and is another engine then."""
    _ends_engines(world)
    if living := engines(world):
        told = world.clients.changed("an engine may map nothing more", _everybody(world), NO_MEMORY)
        with told:
            with contextlib.suppress(ProcessLookupError), no_more_mappings(world.draw.choice(living)):
                time.sleep(world.draw.random() * 2)
            time.sleep(LAST_TOLD_S)
        world.engines_ended_s = time.monotonic()


def reload(world: World) -> None:
    """Changes a setting that makes no difference to the clients."""
    world.node.config.write_text(world.config.replace("max_wait_s = 60", f"max_wait_s = {world.draw.randrange(60, 90)}"))
    world.cli("reload")


def reload_of_a_broken_file(world: World) -> None:
    before = world.node.config.read_text()
    try:
        for broken in ("[[[", "no_such_key = 1\n", "max_wait_s = -5\n"):
            world.node.config.write_text(broken + before)
            if world.cli("reload", codes=(1, 2, 3, 4, 5, 6)).returncode == 0:
                world.complain(f"hearth reload accepted {broken!r}")
    finally:
        world.node.config.write_text(before)
    world.cli("reload")


def unload(world: World) -> None:
    world.cli("unload", world.draw.choice(world.cast.models), "--to", world.draw.choice(("warm", "cold")), codes=(0, 4, 5))


def load_another(world: World) -> None:
    world.behind("load", lambda: world.cli("load", SPARE, codes=None))


def pin_and_unpin(world: World) -> None:
    name = world.draw.choice(world.cast.models)
    world.cli("pin", name, "--no-wait", codes=(0, 4, 5))
    time.sleep(world.draw.random())
    world.cli("unpin", name, codes=(0, 4, 5))


def full_state_disk(world: World) -> None:
    """What is changed meanwhile counts, and is saved later."""
    if not world.state_disk:
        return
    ballast = world.node.folder / "state" / "ballast"
    full, done = threading.Event(), threading.Event()

    def fill() -> None:
        """Takes what is free, and what others free meanwhile: responses in the background are kept on this disk, too."""
        with ballast.open("ab", buffering=0) as file:
            while not done.is_set():
                try:
                    file.write(b"0" * 4096)
                except OSError:
                    full.set()
                    done.wait(0.002)

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        full.wait()
        world.cli("disable", SPARE, codes=(NOT_SAVED,))
    finally:
        done.set()
        filling.join()
        ballast.unlink()
    world.cli("enable", SPARE)
    if list((world.node.folder / "state").glob("*.new")):
        world.complain("a half-written file stays in the state folder")


def broken_folders(world: World) -> None:
    draw = world.draw
    template = world.node.folder / "template"
    if not template.exists():
        write_checkpoint(template)
    with _removed(world, [world.node.models / f"bad-{at}" for at in range(5)]) as folders:
        for folder in folders:
            make_hostile(folder, template, draw.randrange(1 << 30))
        time.sleep(draw.random() * 2)


def hung_disk(world: World) -> None:
    """A pipe without a writer stands for a file on a mount that does not answer."""
    with _removed(world, [world.node.models / "hung"]) as (folder,):
        make_model(folder)
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).unlink()
            os.mkfifo(folder / name)
        time.sleep(world.draw.random() * 2)


def bad_clients(world: World) -> None:
    for _ in range(10):
        send_garbage(world.clients.url, world.draw)
    for _ in range(5):
        request = drawn(world.draw, world.cast.names)._replace(is_stream=True)
        hang_up(world.clients.url, request, world.draw.choice((1, 400, 2000)))


def silent_clients(world: World) -> None:
    """Connections on which nothing comes, or the begin of a head."""
    host, _, port = world.clients.url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for at in range(30):
            connection = stack.enter_context(socket.create_connection((host, int(port)), 3))
            if at % 2:
                connection.sendall(b"POST /v1/chat/comp")
        time.sleep(world.draw.random() * 2)


ACTS = (
    Act("kill -9 of an engine", 4, kill_engine),
    Act("an engine stands still for a while", 2, stop_engine_for_a_while),
    Act("an engine hangs", 1, hang_engine, is_long=True),
    Act("kill -9 of a text process", 3, kill_text_helper),
    Act("kill -9 of the fork server", 1, kill_fork_server),
    Act("kill -9 of a scan", 2, kill_scan),
    Act("restart", 4, restart),
    Act("kill -9 of the daemon", 1, kill_daemon),
    Act("another version", 3, another_version),
    Act("smaller budgets", 1, smaller_budgets),
    Act("memory is short", 2, short_memory),
    Act("an engine may map nothing more", 1, engine_without_mappings),
    Act("a slow mount", 2, slow_mount),
    Act("a mount that hangs", 2, mount_that_hangs),
    Act("reload", 2, reload),
    Act("reload of a broken file", 2, reload_of_a_broken_file),
    Act("unload", 4, unload),
    Act("load of another model", 3, load_another),
    Act("pin and unpin", 3, pin_and_unpin),
    Act("full state disk", 2, full_state_disk),
    Act("broken model folders", 2, broken_folders),
    Act("a disk that hangs", 2, hung_disk),
    Act("bad clients", 4, bad_clients),
    Act("silent clients", 2, silent_clients),
    Act("load of an adapter", 3, adapters.load_adapter, of_adapters=True),
    Act("an adapter is broken", 2, adapters.break_adapter, of_adapters=True),
    Act("an adapter is cut short", 2, adapters.cut_adapter_short, of_adapters=True),
    Act("an adapter is swapped", 3, adapters.swap_adapter, of_adapters=True),
    Act("an adapter is removed", 2, adapters.remove_adapter, of_adapters=True),
    Act("an adapter hangs", 1, adapters.hang_adapter, is_long=True, of_adapters=True),
    Act("unload under adapters", 3, adapters.unload_under_adapters, of_adapters=True),
)


def _restart(world: World) -> None:
    with world.clients.handed_over():
        world.node.restart(RESTART)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@contextlib.contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@contextlib.contextmanager
def _removed(world: World, folders: list[Path]) -> Iterator[list[Path]]:
    """Has these folders below the models folder removed at the end."""
    try:
        yield folders
    finally:
        for folder in folders:
            if folder.is_symlink() or not folder.is_dir():
                folder.unlink(missing_ok=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
