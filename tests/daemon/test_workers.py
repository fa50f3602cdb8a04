"""Engine processes: killed, stopped, broken. Null runner."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from config.schema import DeviceBudget, NodeConfig
from daemon.engines import workers
from daemon.engines.engine_process import Spawned
from daemon.engines.exchange_memory import ExchangeMemory
from daemon.engines.fork_client import threads_per_engine
from daemon.engines.left_memory import LeftMemory
from daemon.engines.workers import EngineSpec, EngineWorker
from daemon.process.long_tasks import LongTasks
from engine import protocol
from engine.host import child_process
from tests.daemon.no_thread import no_thread
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


def test_an_engine_killed_under_streams_costs_none_of_them(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=5) as node:
        expected = [Stream(node, "a", f"{i}", 200, seed=i + 1).join().text for i in range(3)]
        streams = [Stream(node, "a", f"{i % 3}", 200, seed=i % 3 + 1) for i in range(50)]
        for stream in streams:
            stream.wait_for_chunks(5)
        (first,) = node.engine_pids()
        os.kill(first, signal.SIGKILL)
        for at, stream in enumerate(streams):
            stream.join()
            assert (stream.error, stream.finish_reason) == ("", "length")
            assert stream.text == expected[at % 3]
        (second,) = node.engine_pids()
        assert first != second
        device = node.json("status")["devices"][0]
        assert (device["up"], device["pid"], device["restarts"]) == (True, second, 1)
        engine_events = [
            event for event in map(parse, node.cli("events", "--json").stdout.splitlines()) if event["event"] == "engine"
        ]
        assert [event["state"] for event in engine_events] == ["up", "down", "up"]
        assert "SIGKILL" in engine_events[1]["reason"]
        assert 'hearth_engine_restarts_total{device="cpu:0"} 1.0' in node.get("/metrics")[1]


def parse(line: str) -> dict[str, str]:
    import json

    value: dict[str, str] = json.loads(line)
    return value


def test_the_other_devices_streams_do_not_notice(tmp_path: Path) -> None:
    for name in "ab":
        make_model(tmp_path / "n" / "models" / name)
    config = '[models.a]\ndevices = ["cpu:0"]\n[models.b]\ndevices = ["cpu:1"]\n'
    with Node(tmp_path / "n", devices=["cpu:0=64MiB", "cpu:1=64MiB"], null_step_ms=5, config=config) as node:
        streams = {name: Stream(node, name, "x", 300) for name in "ab"}
        for stream in streams.values():
            stream.wait_for_chunks(5)
        device = {row["name"]: row["device"] for row in node.ps()}
        assert device == {"a": "cpu:0", "b": "cpu:1"}
        pids = {row["name"]: row["pid"] for row in node.json("status")["devices"]}
        os.kill(pids["cpu:0"], signal.SIGKILL)
        for stream in streams.values():
            assert (stream.join().error, stream.finish_reason) == ("", "length")
        gaps = [after - before for before, after in zip(streams["b"].stamps, streams["b"].stamps[1:], strict=False)]
        assert max(gaps) < 1.0, "the other engine's stream stood still"
        assert {row["name"]: row["pid"] for row in node.json("status")["devices"]}["cpu:1"] == pids["cpu:1"]


def test_an_engine_that_ignores_terminate_and_interrupt(tmp_path: Path) -> None:
    with Node(tmp_path / "n") as node:
        before = node.engine_pids()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(before[0], number)
        assert node.cli("status").returncode == 0
        assert node.engine_pids() == before
        assert os.getpgid(before[0]) == before[0]


def test_not_ready_while_no_engine_is_up(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n") as node:
        os.kill(node.engine_pids()[0], signal.SIGSTOP)
        os.kill(node.engine_pids()[0], signal.SIGKILL)
        node.wait_for(lambda: not node.is_ready(), "not ready")
        assert node.get("/healthz")[0] == 200
        node.wait_for(node.is_ready, "ready again")


@pytest.mark.parametrize(("threads", "num_devices"), [(0, 1), (0, 64), (3, 2)])
def test_threads(threads: int, num_devices: int) -> None:
    devices = [DeviceBudget(f"cpu:{index}", 1 << 26) for index in range(num_devices)]
    cores = len(os.sched_getaffinity(0))
    assert threads_per_engine(NodeConfig(threads=threads), devices) == (threads or max(1, cores // num_devices))


def test_configure_covers_the_budget() -> None:
    spec = EngineSpec(DeviceBudget("cpu:0", (7 << 20) + 5), 1 << 20, NodeConfig(chunk_bytes=2 << 20), 2)
    message = spec.configure()
    assert (message.device, message.num_chunks, message.work_space_bytes, message.threads) == ("cpu:0", 3, 1 << 20, 2)


class Told:
    """What a worker tells; each kind can be waited for."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[protocol.EngineReady] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[tuple[int, ...], str]] = asyncio.Queue()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.ends: list[str] = []

    def engine_up(self, device: str, message: protocol.EngineReady) -> None:
        self.ups.put_nowait(message)

    def engine_ended(self, device: str) -> None:
        assert self.downs.empty()
        self.ends.append("ended")

    def engine_lost(self, device: str) -> None:
        assert self.downs.empty()
        self.ends.append("lost")

    def engine_down(self, device: str, running: tuple[int, ...], reason: str) -> None:
        self.downs.put_nowait((running, reason))

    def engine_message(self, device: str, message: Any) -> None:
        self.messages.put_nowait(message)
        if self.ends[-1:] == ["lost"]:
            self.ends.append("a message of a lost engine")


@pytest.fixture
async def pair() -> AsyncIterator[tuple[EngineWorker, Told]]:
    told = Told()
    config = NodeConfig(runner="null", chunk_bytes=2 << 20, null_step_ms=1.0)
    spec = EngineSpec(DeviceBudget("cpu:0", 64 << 20), 0, config, 1)
    worker = EngineWorker("cpu:0", 1, lambda: spec, told, LongTasks())
    worker.start()
    worker.configure()
    async with asyncio.timeout(60):
        yield worker, told
    await worker.stop()


EXCHANGE_WORDS = (("--exchange-fd", 0), ("--doorbell-fds", 0), ("--doorbell-fds", 1))


def proc_file(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


@pytest.mark.parametrize("is_last", [False, True])
async def test_an_engine_that_is_started_with_exec_shares_the_exchange_memory(is_last: bool) -> None:
    """Checks this for GPUs, whose engines have all doorbells each, and a number and a GPU of their own."""
    exchange, told, names = ExchangeMemory(["cuda:0", "cuda:1"]), Told(), ["cuda:0", "cuda:1"]
    name, config = names[is_last], NodeConfig(runner="null", chunk_bytes=2 << 20)
    spec = EngineSpec(DeviceBudget(name, 64 << 20, "GPU-a"), 0, config, 1)
    worker = EngineWorker(name, 1, lambda: spec, told, LongTasks(), gpu="GPU-a", exchange=exchange)
    worker.start()
    worker.configure()
    async with asyncio.timeout(60):
        pid = (await told.ups.get()).pid
        cmdline, variables = [proc_file(pid, name) for name in ("cmdline", "environ")]
        words = cmdline.split("\0")
        assert words[words.index("--engine-number") + 1] == f"{int(is_last)}"
        own, *bells = (int(words[words.index(flag) + 1].split(",")[at]) for flag, at in EXCHANGE_WORDS)
        assert os.path.samestat(os.stat(f"/proc/{pid}/fd/{own}"), os.fstat(exchange.fd))
        for bell, here in zip(bells, exchange.doorbells, strict=True):
            assert os.readlink(f"/proc/{pid}/fd/{bell}") == os.readlink(f"/proc/self/fd/{here}") == "anon_inode:[eventfd]"
        assert "CUDA_VISIBLE_DEVICES=GPU-a" in variables.split("\0")
    await worker.stop()
    exchange.close()


async def test_a_death_is_told_with_the_step_it_happened_in(pair: tuple[EngineWorker, Told], tmp_path: Path) -> None:
    worker, told = pair
    ready = await told.ups.get()
    assert (ready.pid, worker.up) == (worker.pid, True)
    make_model(tmp_path / "a", hearthd_null={"crash_token": 77})
    eos = [1]
    worker.send(protocol.LoadModel(1, "a", str(tmp_path / "a"), "float32", "f", 1, 1, 8, 512, 4, eos))
    while type(await told.messages.get()) is not protocol.LoadDone:
        pass
    worker.send(protocol.Submit(41, "a", [77], protocol.SamplingParams(max_tokens=4)))
    running, reason = await told.downs.get()
    assert running == (41,)
    assert "exit code" in reason
    assert (await told.ups.get()).pid != ready.pid
    assert worker.restarts == 1


async def test_who_looks_after_an_engine_does_not_end_unseen() -> None:
    """A device without an engine for ever is what an error in the handling of a death would mean."""

    class Failing(Told):
        has_failed = False

        def engine_down(self, device: str, running: tuple[int, ...], reason: str) -> None:
            super().engine_down(device, running, reason)
            if not self.has_failed:
                self.has_failed = True
                raise KeyError("a bug")

    told, tasks = Failing(), LongTasks(pause_s=0.01)
    spec = EngineSpec(DeviceBudget("cpu:0", 64 << 20), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker("cpu:0", 1, lambda: spec, told, tasks)
    worker.start()
    worker.configure()
    async with asyncio.timeout(60):
        first = await told.ups.get()
        worker.restart("for a test")
        assert (await told.ups.get()).pid != first.pid
    assert tasks.problems() == [
        "looking after the engine of cpu:0 failed 1 times in a row, at last with KeyError: 'a bug'; it was started again"
    ]
    await worker.stop()


async def test_restart_is_a_death_with_that_reason(pair: tuple[EngineWorker, Told]) -> None:
    worker, told = pair
    await told.ups.get()
    worker.restart("a load is stuck")
    assert await told.downs.get() == ((), "a load is stuck")
    await told.ups.get()


async def test_a_stuck_engine_logs_where_its_threads_are(pair: tuple[EngineWorker, Told], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker, told = pair
    await told.ups.get()
    worker.restart_stuck("gave no sign of life")
    worker.restart_stuck("was told twice")
    assert await told.downs.get() == ((), "gave no sign of life")
    shown = [record.getMessage() for record in caplog.records if record.name == "hearthd.engine"]
    assert any("most recent call first" in line for line in shown)
    assert any("engine/loop/worker.py" in line and line.endswith(" in run") for line in shown)
    await told.ups.get()


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT])
async def test_a_fault_in_native_code_is_logged_with_its_place(
    pair: tuple[EngineWorker, Told], caplog: pytest.LogCaptureFixture, fault: signal.Signals
) -> None:
    caplog.set_level(logging.INFO)
    _, told = pair
    os.kill((await told.ups.get()).pid, fault)
    assert await told.downs.get() == ((), f"was ended by {fault.name}")
    assert any("engine/loop/worker.py" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("how", ["restarted", "its connection ends"])
async def test_an_engine_that_does_not_end_is_told_as_dead(
    pair: tuple[EngineWorker, Told], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A process that waits in a driver does not end on SIGKILL. One that is stopped and gets no SIGKILL stands for it."""
    worker, told = pair
    pid = (await told.ups.get()).pid
    monkeypatch.setattr(workers, "END_LIMIT_S", 0.05)
    assert worker._process is not None
    assert worker._channel is not None
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(worker._process, "kill", lambda: None)
        why = "gave no sign of life" if how == "restarted" else "closed its connection"
        try:
            if how == "restarted":
                worker.restart(why)
            else:
                worker._channel.close()
            async with asyncio.timeout(20):
                down = await told.downs.get()
            assert down == ((), f"{why}; it was killed and has not ended yet")
            assert worker.problem == f"the engine {why}; it was killed and has not ended yet"
            assert (told.ends, worker.up, worker.pulse(), worker.restarts) == (["lost"], False, None, 0)
            worker.send(protocol.SetLease(4))
        finally:
            os.kill(pid, signal.SIGCONT)  # it may go on, and answer, before it ends
            os.kill(pid, signal.SIGKILL)
    assert (await told.ups.get()).pid != pid
    assert told.ends == ["lost", "ended"]
    assert told.downs.empty(), "its death was told already"
    assert (worker.up, worker.problem, worker.restarts) == (True, "", 1)


async def test_stop_ends_an_engine_that_does_not_listen(pair: tuple[EngineWorker, Told], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, told = pair
    pid = (await told.ups.get()).pid
    monkeypatch.setattr(workers, "STOP_LIMIT_S", 0.3)
    os.kill(pid, signal.SIGSTOP)
    await worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert told.downs.empty()


async def test_a_start_is_timed_anew_after_a_pause_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    told, is_timed = Told(), asyncio.Event()
    expect_ready = EngineWorker._expect_ready

    def noted(worker: EngineWorker) -> None:
        expect_ready(worker)
        is_timed.set()

    monkeypatch.setattr(EngineWorker, "_expect_ready", noted)
    spec = EngineSpec(DeviceBudget("cpu:0", 64 << 20), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker("cpu:0", 1, lambda: spec, told, LongTasks())
    worker.start()
    async with asyncio.timeout(60):
        await is_timed.wait()  # it is spawned, and gets ready once it is configured
        timer = worker._ready_timer
        assert timer is not None
        timer.cancel()
        worker._too_slow(time.monotonic() - 60.0)
        assert worker._ready_timer is not timer, "it has as long again"
        assert worker.pulse() is None
        worker.configure()
        ready = await told.ups.get()
        assert (ready.pid, told.downs.empty()) == (worker.pid, True)
        assert worker.pulse() is not None
    await worker.stop()


async def test_an_engine_that_does_not_get_ready_is_restarted(
    pair: tuple[EngineWorker, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, told = pair
    await told.ups.get()
    monkeypatch.setattr(workers, "START_LIMIT_S", 0.0)
    worker.restart("for a test")
    await told.downs.get()
    assert await told.downs.get() == ((), "was not ready within 0 s")
    monkeypatch.setattr(workers, "START_LIMIT_S", 120.0)
    await told.ups.get()


async def test_back_off_grows_while_an_engine_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # an engine that cannot start; it comes before the one that may be installed
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    (tmp_path / "engine" / "__main__.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(child_process, "PACKAGES", tmp_path)
    monkeypatch.setattr(workers, "BACK_OFF_S", 0.01)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay: float, result: Any = None) -> Any:
        pauses.append(delay)
        return await sleep(0, result)

    monkeypatch.setattr(workers.asyncio, "sleep", noted)
    told = Told()
    spec = EngineSpec(DeviceBudget("cpu:0", 64 << 20), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker("cpu:0", 1, lambda: spec, told, LongTasks())
    worker.start()
    worker.configure()
    async with asyncio.timeout(60):
        reasons = [(await told.downs.get())[1] for _ in range(4)]
    await worker.stop()
    assert reasons == ["ended with exit code 1"] * 4
    assert pauses[:3] == [0.01, 0.02, 0.04]


async def test_no_thread_to_hand_memory_over_with_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BACK_OFF_S", 0.01)
    told, spec = Told(), EngineSpec(DeviceBudget("cpu:0", 64 << 20), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker("cpu:0", 1, lambda: spec, told, LongTasks(), left=LeftMemory("cpu:0", True))
    worker.configure()
    async with asyncio.timeout(60):
        with no_thread():
            worker.start()
            reasons = [(await told.downs.get())[1]]
            opened = len(os.listdir("/proc/self/fd"))
            reasons += [(await told.downs.get())[1] for _ in range(2)]
            assert len(os.listdir("/proc/self/fd")) == opened
        await told.ups.get()
    assert set(reasons) == {"could not be started: thread memory of cpu:0: it did not begin within 1 s, as where no memory is left"}
    await worker.stop()


async def test_a_stop_while_an_engine_is_being_started_leaves_its_descriptors_open_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the engine may inherit what other files have got its numbers meanwhile."""
    begun, may_go_on, pids, seen = threading.Event(), threading.Event(), list[int](), list[list[str]]()

    def slow(arguments: Sequence[str], descriptors: Sequence[int], *about: Any) -> Spawned:
        seen.append([os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors])
        begun.set()
        assert may_go_on.wait(60)
        seen.append([os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors])
        process = Spawned(arguments, descriptors, *about)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(workers, "Spawned", slow)
    spec = EngineSpec(DeviceBudget("cuda:0", 64 << 20), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker("cuda:0", 1, lambda: spec, Told(), LongTasks())
    worker.start()
    async with asyncio.timeout(60):
        await asyncio.to_thread(begun.wait)
        stopping = asyncio.ensure_future(worker.stop())
        await asyncio.sleep(0)  # it has cancelled the start
        await asyncio.sleep(0)
        may_go_on.set()
        await stopping
    assert seen[0] == seen[1]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def test_a_device_out_of_memory_is_explained_by_who_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # an engine that says so and ends, as the real one does where its device refuses
    fault = protocol.encode(protocol.EngineFault("no_memory", "MemoryError: cuMemCreate"))
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    seen = "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-a'"
    source = f"import os, sys\n{seen}\nos.write(int(sys.argv[2]), {fault!r})\nos._exit(70)\n"
    (tmp_path / "engine" / "__main__.py").write_text(source)
    monkeypatch.setattr(child_process, "PACKAGES", tmp_path)
    told = Told()
    spec = EngineSpec(DeviceBudget("cuda:0", 1 << 30, "GPU-a"), 0, NodeConfig(runner="null", chunk_bytes=2 << 20), 1)
    worker = EngineWorker(
        "cuda:0", 1, lambda: spec, told, LongTasks(), gpu="GPU-a", no_memory=lambda error: f"{error}, held by pid 7"
    )
    worker.start()
    worker.configure()
    async with asyncio.timeout(60):
        _, reason = await told.downs.get()
    assert reason == "could not start: MemoryError: cuMemCreate, held by pid 7"
    assert worker.problem == f"the engine {reason}"
    await worker.stop()
