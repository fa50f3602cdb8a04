"""Engines that are forked from one process: how they start and end, and what happens when that process ends, hangs or refuses."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from config.schema import DeviceBudget, NodeConfig
from daemon.engines import fork_client
from daemon.engines.engine_process import EngineProcess
from daemon.engines.fork_client import ForkServer
from daemon.errors import EXIT_USAGE
from daemon.main import main
from engine import protocol
from engine.host import child_process
from tests.daemon.no_thread import no_thread
from tests.e2e import processes
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    made = ForkServer("null", "", 1)
    yield made
    await made.end()


class Forked:
    """An engine with its socketpair and its journal. It waits for Configure."""

    def __init__(self, process: EngineProcess, channel: socket.socket) -> None:
        self.process, self.channel = process, channel

    @classmethod
    async def by(cls, server: ForkServer, name: str = "engine cpu:0", arguments: tuple[str, ...] = ()) -> Forked:
        ours, theirs = socket.socketpair()
        journal = os.memfd_create("journal")
        os.ftruncate(journal, protocol.JOURNAL_BYTES)
        numbers = [theirs.fileno(), journal]
        try:
            own = ["--channel-fd", str(numbers[0]), "--journal-fd", str(journal), *arguments]
            return cls(await server.fork(name, own, numbers), ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(journal)

    async def ended(self) -> tuple[int | None, str]:
        """Waits for its end. Returns its exit code and what it wrote to its stderr."""
        async with asyncio.timeout(30):
            said = await asyncio.to_thread(self.process.stderr.read)
            code = await asyncio.to_thread(self.process.wait)
        self.process.stderr.close()
        self.process.close()
        self.channel.close()
        return code, said.decode()


def parent_of(process: EngineProcess) -> psutil.Process:
    parent = psutil.Process(process.pid).parent()
    assert parent is not None
    return parent


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def opened_by(pid: int) -> list[str]:
    """Returns the kinds of what a process has open besides stdin, stdout and stderr."""
    opened = Path(f"/proc/{pid}/fd")
    return sorted(os.readlink(one).partition(":")[0] for one in opened.iterdir() if int(one.name) > 2)


async def test_a_server_that_is_ended_while_it_is_started_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, spawn = ForkServer("null", "", 1), fork_client.socket_child.spawn

    def spawn_at_end(*arguments: Any, **options: Any) -> Any:
        made = spawn(*arguments, **options)
        server._ended = True
        server._kill()
        return made

    monkeypatch.setattr(fork_client.socket_child, "spawn", spawn_at_end)
    with pytest.raises(OSError, match="stopping"):
        await Forked.by(server)
    assert server._process is None
    server._thread.shutdown()


async def test_no_signal_goes_to_a_process_that_got_the_id_of_a_server_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reaps the server as it ends. Its id may be another process's when Popen sends the signal."""
    server, strayed = ForkServer("null", "", 1), []
    engine = await Forked.by(server)
    process = server._process
    assert process is not None

    def kill(pid: int, number: int) -> None:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        wait_until(lambda: process.returncode is not None)
        strayed.append(pid)

    ended = os.pidfd_open(process.pid)
    monkeypatch.setattr(os, "kill", kill)
    await server.end()
    os.close(ended)
    engine.channel.close()
    await engine.ended()
    assert not strayed
    assert process.returncode == -signal.SIGKILL


async def test_engines_have_one_parent_names_and_groups_of_their_own(server: ForkServer) -> None:
    first, second = await Forked.by(server, "engine cpu:0"), await Forked.by(server, "engine cpu:1/a/b/c/d")
    assert parent_of(first.process) == parent_of(second.process)
    names = ["engine cpu:0", "engine cpu:1/a/"]  # which they give themselves
    pids = [one.process.pid for one in (first, second)]
    await asyncio.to_thread(wait_until, lambda: [psutil.Process(pid).name() for pid in pids] == names)
    assert [os.getpgid(pid) for pid in pids] == pids
    first.channel.close()
    assert await first.ended() == (0, "")
    second.process.kill()
    second.process.kill()  # one that has ended may be killed
    assert await second.ended() == (-signal.SIGKILL, "")


async def test_how_an_engine_ends_and_what_it_says_is_its_own(server: ForkServer) -> None:
    wrong = await Forked.by(server, arguments=("--nonsense",))
    right = await Forked.by(server)
    code, said = await wrong.ended()
    assert code == 2
    assert "--nonsense" in said
    right.channel.close()
    assert await right.ended() == (0, "")


async def test_no_descriptors_or_processes_are_left(server: ForkServer) -> None:
    async def round_of_three() -> None:
        engines = [await Forked.by(server) for _ in range(3)]
        for engine in engines:
            engine.channel.close()
        for engine in engines:
            await engine.ended()

    engine = await Forked.by(server)
    parent = parent_of(engine.process)
    await round_of_three()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await round_of_three()
    assert len(os.listdir("/proc/self/fd")) == before
    await asyncio.to_thread(wait_until, lambda: parent.num_fds() == 7 and len(parent.children()) == 1)  # the last are reaped, too
    # besides stdin, stdout and stderr: its socketpair, its journal and the journal's mapping; nothing of the server's
    assert opened_by(engine.process.pid) == ["/memfd", "/memfd", "socket"]
    engine.channel.close()
    await engine.ended()


async def test_a_killed_server_is_replaced_and_its_engines_live_on(server: ForkServer) -> None:
    old = await Forked.by(server)
    parent = parent_of(old.process)
    parent.kill()
    new = await Forked.by(server)
    assert parent_of(new.process) != parent
    assert psutil.Process(old.process.pid).is_running()
    old.process.kill()
    assert (await old.ended())[0] is None, "nobody can tell"
    new.channel.close()
    assert await new.ended() == (0, "")


async def test_a_killed_server_is_no_zombie_until_the_next_engine(server: ForkServer) -> None:
    engine = await Forked.by(server)
    parent = parent_of(engine.process)
    parent.kill()
    async with asyncio.timeout(10):
        while psutil.pid_exists(parent.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    engine.process.kill()
    engine.channel.close()
    await engine.ended()


async def test_a_server_that_hangs_is_replaced(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "ANSWER_LIMIT_S", 0.3)
    first = await Forked.by(server)
    parent_of(first.process).suspend()
    second = await Forked.by(server)
    for engine in (first, second):
        engine.channel.close()
        await engine.ended()


async def test_the_end_of_an_engine_is_known_while_the_server_hangs(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "ANSWER_LIMIT_S", 0.3)
    first = await Forked.by(server)
    parent_of(first.process).suspend()
    first.process.kill()
    assert (await first.ended())[0] is None, "nobody can tell"
    second = await Forked.by(server)
    second.channel.close()
    assert await second.ended() == (0, "")


async def test_a_cancelled_call_leaves_neither_descriptors_nor_an_engine(server: ForkServer) -> None:
    engine = await Forked.by(server)
    parent, opened, queue = parent_of(engine.process), len(os.listdir("/proc/self/fd")), server._thread._work_queue
    for began in (False, True):  # the thread is busy with another call, or with this one
        busy = threading.Event()
        waiting = server._thread.submit(busy.wait, 60)
        if began:
            parent.suspend()
            busy.set()
            waiting.result(60)
        forked = asyncio.ensure_future(Forked.by(server))
        await asyncio.sleep(0)
        if began:
            await asyncio.to_thread(wait_until, queue.empty)
        forked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forked
        busy.set()
        parent.resume()
        await asyncio.wrap_future(server._thread.submit(int))  # the call has ended
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: len(parent.children()) == 1)
        assert len(os.listdir("/proc/self/fd")) == opened
    engine.channel.close()
    assert await engine.ended() == (0, "")


@pytest.mark.parametrize("lacking", ["copy", "pipe", "pidfd"])
async def test_no_descriptors_are_left_where_one_is_lacking(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    engine = await Forked.by(server)
    opened, calls = len(os.listdir("/proc/self/fd")), itertools.count()

    def second_refused(call: Callable[..., Any], *arguments: Any) -> Any:
        if next(calls) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return call(*arguments)

    def without_descriptors(sock: socket.socket, *sizes: int) -> tuple[bytes, list[int], int, Any]:
        data, received, flags, address = receive(sock, *sizes)  # the kernel drops those for which there is no number
        for descriptor in received:
            os.close(descriptor)
        return data, [], flags, address

    receive = socket.recv_fds
    with monkeypatch.context() as patched:
        if lacking == "copy":
            patched.setattr(os, "dup", partial(second_refused, os.dup))
        elif lacking == "pipe":
            patched.setattr(os, "pipe", partial(second_refused, os.pipe))
        else:
            patched.setattr(socket, "recv_fds", without_descriptors)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            await Forked.by(server)
    assert len(os.listdir("/proc/self/fd")) == opened
    engine.channel.close()
    assert await engine.ended() == (0, "")


async def test_one_that_is_stopped_while_it_starts_keeps_nobody_waiting(server: ForkServer) -> None:
    forked = asyncio.ensure_future(Forked.by(server))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        await server.end()
        (ended,) = await asyncio.gather(forked, return_exceptions=True)
    if isinstance(ended, Forked):  # it was there already
        ended.channel.close()
        await ended.ended()
    else:
        assert str(ended) in ("hearthd is stopping", "the fork server of engines has ended")


async def test_one_that_was_started_ahead_forks_the_first_engine() -> None:
    config = NodeConfig(runner="null", threads=1)
    assert ForkServer.ahead(config, [DeviceBudget("cuda:0", 1 << 30)]) is None
    server = ForkServer.ahead(config, [DeviceBudget("cpu:0", 1 << 30)])
    assert server is not None
    assert server._process is not None
    pid = server._process.pid
    engine = await Forked.by(server)
    assert parent_of(engine.process).pid == pid
    engine.channel.close()
    await engine.ended()
    await server.end()


def test_one_that_was_started_ahead_for_nothing_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings turn out to be wrong, and hearthd ends at once."""
    before = psutil.Process().children()
    flags = ["--models", str(tmp_path), "--keys-file", str(tmp_path / "missing"), "--runner", "null"]
    assert main(flags) == EXIT_USAGE
    assert "missing" in capsys.readouterr().err
    assert psutil.Process().children() == before


async def test_a_refusal_and_a_server_that_cannot_start_are_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    source = """
import socket, sys
import msgspec
control = socket.socket(fileno=int(sys.argv[2]))
control.recv(65536)
control.send(msgspec.msgpack.encode([0, "fork: Cannot allocate memory"]))
control.recv(1)
"""
    (tmp_path / "engine" / "__main__.py").write_text(source)
    monkeypatch.setattr(child_process, "PACKAGES", tmp_path)
    server = ForkServer("null", "", 1)
    with pytest.raises(OSError, match="fork: Cannot allocate memory"):
        await Forked.by(server)
    await server.end()
    (tmp_path / "engine" / "__main__.py").write_text("raise SystemExit(3)\n")
    server = ForkServer("null", "", 1)
    with pytest.raises(OSError, match="fork server of engines has ended"):
        await Forked.by(server)
    await server.end()


async def test_one_whose_end_no_thread_can_wait_for_is_ended(server: ForkServer) -> None:
    children, opened = psutil.Process().children(), len(os.listdir("/proc/self/fd"))
    with no_thread(), pytest.raises(OSError, match="thread fork server's end: it did not begin"):
        await Forked.by(server)
    assert (psutil.Process().children(), len(os.listdir("/proc/self/fd"))) == (children, opened)
    engine = await Forked.by(server)
    engine.channel.close()
    assert await engine.ended() == (0, "")


async def test_no_thread_for_one_that_is_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert ForkServer.ahead(NodeConfig(runner="null", threads=1), [DeviceBudget("cpu:0", 1 << 30)]) is None
    with pytest.raises(OSError, match="threads for fork server: can't start new thread"):
        ForkServer("null", "", 1)


def test_a_node_without_its_fork_server_serves_on(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", devices=["cpu:0=64MiB", "cpu:1=64MiB"], null_step_ms=5) as node:
        assert node.process is not None
        stream = Stream(node, "a", "x", 600)
        stream.wait_for_chunks(5)
        (server,) = processes.fork_servers(node.process.pid)
        server.kill()
        stream.wait_for_chunks(10)
        device = node.ps()[0]["device"]
        engine = next(int(one["pid"]) for one in node.json("status")["devices"] if one["name"] == device)
        os.kill(engine, signal.SIGKILL)
        assert stream.join().error == ""
        (server,) = processes.fork_servers(node.process.pid)
        assert node.process.pid == server.ppid()
