"""Runs one engine process per device or carve-out: spawns it, supervises it, and restarts it with back-off when it ends. The end of
an engine is reported with the ids of the requests in its last, unfinished step. If an engine was killed and does not end, because
it waits in a driver, its end is reported all the same, but the next engine is started only when it has ended.

An engine ends when its socketpair is closed, so it cannot outlive the daemon, however the daemon ends.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from config.schema import DeviceBudget, NodeConfig
from daemon.engines.engine_process import EngineProcess, Spawned, describe, end, make_journal, variables_of
from daemon.engines.engine_stderr import EngineStderr
from daemon.engines.engine_watch import HELD_S
from daemon.engines.exchange_memory import ExchangeMemory
from daemon.engines.fork_client import ForkServer
from daemon.engines.left_memory import LeftMemory
from daemon.engines.worker_channel import WorkerChannel
from daemon.metrics.swaps import KernelKills
from daemon.process.logs import fields
from daemon.process.long_tasks import LongTasks
from daemon.process.started import started
from engine import protocol
from engine.loop.pulse import Pulse, read_pulse
from loader.configs.kernel_sets import KernelSet
from loader.threads import Thread

BACK_OFF_S, MAX_BACK_OFF_S, HEALTHY_AFTER_S = 0.2, 10.0, 60.0
START_LIMIT_S = 120.0  # from spawn to EngineReady; importing torch takes a while if the disk's cache is cold
STOP_LIMIT_S = 3.0
SHOW_S = 0.3  # for a stuck engine to log where its threads are, before it is killed
END_LIMIT_S = 5.0  # from SIGKILL to the end of the process

# CUDA's names for errors of the device's memory (cuGetErrorString: ECC uncorrectable, contained, hardware stack error).
FAULTY_MEMORY = re.compile(r"\bECC\b|contained|hardware", re.IGNORECASE)

log = logging.getLogger("hearthd.engine")


class WorkerEvents(Protocol):
    """Receives what happens to the engines of all devices; its methods are always called on the event loop."""

    def engine_up(self, device: str, message: protocol.EngineReady) -> None: ...

    def engine_ended(self, device: str) -> None:
        """Called when the device's engine process has just ended. Its last messages may still arrive after this call; engine_down
        is called after the last of them."""
        ...

    def engine_lost(self, device: str) -> None:
        """Called when the device's engine was killed but its process does not end. None of its messages arrives any more.
        engine_down is called at once, and engine_ended when the process has ended after all."""
        ...

    def engine_down(self, device: str, running: tuple[int, ...], reason: str) -> None: ...

    def engine_message(self, device: str, message: Any) -> None: ...


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """The configuration of one engine, which is the same whenever its process is started. kernels: the kernels that its models
    need. host_tier_slots: the slots of the host tier."""

    device: DeviceBudget
    work_space_bytes: int
    config: NodeConfig
    threads: int
    kernels: tuple[KernelSet, ...] = ()  # as in protocol.Configure
    host_tier_slots: int = 0

    def configure(self) -> protocol.Configure:
        chunk_bytes = int(self.config.chunk_bytes)
        return protocol.Configure(
            device=self.device.hardware,
            # address space for the whole budget; the ledger's leases and the work space limit how much of it is used
            num_chunks=self.device.budget_bytes // chunk_bytes,
            chunk_bytes=chunk_bytes,
            work_space_bytes=self.work_space_bytes,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_tokens=self.config.block_tokens,
            turn_budget_ms=self.config.turn_budget_ms,
            max_step_stretch=self.config.max_step_stretch,
            threads=self.threads,
            runner=self.config.runner,
            null_step_ms=self.config.null_step_ms,
            cache_dir=self.config.cache_dir,
            kernels=list(self.kernels),
            host_tier_slots=self.host_tier_slots,
            test_disk_bytes_per_s=self.config.test_disk_bytes_per_s,
            test_copy_bytes_per_s=self.config.test_copy_bytes_per_s,
        )


@dataclass(slots=True, frozen=True)
class LentBy:
    """The host on which the engine of a borrowed device runs. host: the name of that host. address: the address at which `hearth
    lend` listens on that host. key_file: the file with the secret that both hosts share. device: the device's name on that host.
    models_dir: the models folder of this host."""

    host: str
    address: str
    key_file: str
    device: str
    models_dir: str

    def arguments(self) -> list[str]:
        """Returns the command-line arguments of a proxy (engine/remote) besides those of an engine."""
        return [
            *("--device", self.device, "--host", self.host, "--address", self.address),
            *("--key-file", self.key_file, "--models", self.models_dir),
        ]


class EngineWorker:
    """Runs the engine process of one device, and starts it again each time it ends.

    spec: returns the engine's configuration; it is not called before the process was started. forks: the fork server that forks the
    engine; None: the engine is started with exec, as for cuda devices. lent_by: the other host on which the engine runs, in which
    case this worker runs the engine's proxy; None: the engine runs on this host.

    host_tier_fd: the host tier's memfd, -1 if there is none. gpu: UUID of the only GPU that the engine sees, "" for a cpu device.
    no_memory: takes the engine's error and returns one line that explains why the device lacks the memory; called in a thread.
    left: keeps the device's memory between two engines; None if an engine's memory ends with it. exchange: the memory that engines
    share to run split models; None: there is none.

    problem: why no engine runs now, "" while one runs."""

    def __init__(
        self,
        device: str,
        threads: int,
        spec: Callable[[], EngineSpec],
        events: WorkerEvents,
        tasks: LongTasks,
        host_tier_fd: int = -1,
        gpu: str = "",
        no_memory: Callable[[str], str] = str,
        left: LeftMemory | None = None,
        exchange: ExchangeMemory | None = None,
        forks: ForkServer | None = None,
        lent_by: LentBy | None = None,
    ) -> None:
        self._tasks, self._exchange, self._forks, self._lent_by = tasks, exchange, forks, lent_by
        self.device, self._threads, self._spec, self._events = device, threads, spec, events
        self._host_tier_fd, self._gpu, self._no_memory, self._left = host_tier_fd, gpu, no_memory, left
        self._kernel_kills = KernelKills()
        self._came_up = self._distrusted = self._is_lost = False  # facts about the current process
        self._overdue: asyncio.Future[None] | None = None  # done once the process was killed and has not ended in time
        self._kill_timer: asyncio.TimerHandle | None = None  # while the process shows its threads before it is killed
        self._end_timer: asyncio.TimerHandle | None = None
        self.problem = ""
        self._fault: protocol.EngineFault | None = None
        self.pid = 0
        self.restarts = 0
        self.up = False
        self._configurable = asyncio.Event()
        self._channel: WorkerChannel | None = None
        self._journal: mmap.mmap | None = None
        self._ready_timer: asyncio.TimerHandle | None = None
        self._process: EngineProcess | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._kill_reason = ""

    def start(self) -> None:
        self._task = self._tasks.start(f"looking after the engine of {self.device}", self._live)

    def configure(self) -> None:
        """Allows this worker to send its engine the message Configure, which holds the engine's configuration. Called when the size
        of the work space is known."""
        self._configurable.set()

    def pulse(self) -> Pulse | None:
        """Returns the last sign of life of the engine's loop; None while there is no engine or it is starting."""
        return read_pulse(self._journal) if self.up and self._journal is not None else None

    def send(self, message: protocol.Message) -> None:
        if self._channel is not None:
            if self._left is not None:
                self._left.sent(message)
            self._channel.send(message)

    def restart(self, reason: str, distrust_memory: bool = False) -> None:
        """Kills the engine process; as after any death, a new one is started. reason: is reported as the cause of the death.
        distrust_memory: whether the new process must not reuse the device's memory."""
        self._kill_reason, self._distrusted = reason, distrust_memory
        self._kill()

    def restart_stuck(self, reason: str) -> None:
        """Kills the engine process like `restart`, but first lets it log where each of its threads is, for which it gets SHOW_S
        seconds."""
        if self._process is None or self._kill_timer is not None:
            return
        self._kill_reason, self._distrusted = reason, False
        self._process.show_threads()
        self._kill_timer = asyncio.get_running_loop().call_later(SHOW_S, self._kill)

    async def stop(self) -> None:
        """Ends the engine for good: sends Shutdown and closes the socketpair, then sends SIGKILL if the process has not ended
        within STOP_LIMIT_S seconds."""
        self._stopping = True
        process, channel = self._process, self._channel
        if channel is not None:
            channel.send(protocol.Shutdown())
            channel.close()
        if self._task is not None:
            if process is None:
                self._task.cancel()
            done, _ = await asyncio.wait([self._task], timeout=STOP_LIMIT_S)
            if not done:
                log.warning("engine did not end within %.0f s: killed", STOP_LIMIT_S, extra=fields(device=self.device))
                self._kill()
                await asyncio.wait([self._task], timeout=STOP_LIMIT_S)

    def kill_now(self) -> None:
        self._stopping = True
        self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        if self._overdue is not None and self._end_timer is None:
            self._end_timer = asyncio.get_running_loop().call_later(END_LIMIT_S, self._overdue.set_result, None)

    async def _live(self) -> None:
        back_off_s = BACK_OFF_S
        while not self._stopping:
            started = time.monotonic()
            try:
                reason, running = await self._one_life()
            except OSError as error:
                reason, running = f"could not be started: {error}", ()
            except Exception as error:  # a bug in this module must not leave the device without an engine for ever
                log.exception("looking after an engine failed", extra=fields(device=self.device))
                reason, running = f"could not be looked after: {error}", ()
            if self._left is not None and not self._stopping:
                killed, lasted_s = self._kernel_kills.look() and "SIGKILL" in reason, time.monotonic() - started
                distrusted = self._distrusted or FAULTY_MEMORY.search(reason) is not None
                await asyncio.to_thread(self._left.ended, self._came_up, lasted_s, distrusted, killed)
            if self._stopping:
                return
            if time.monotonic() - started > HEALTHY_AFTER_S:
                back_off_s = BACK_OFF_S
            self.problem = f"the engine {reason}"
            log.warning("engine %s; starting again in %.1f s", reason, back_off_s, extra=fields(device=self.device))
            if not self._is_lost:  # else it was told
                self._events.engine_down(self.device, running, reason)
            self.restarts += 1
            await asyncio.sleep(back_off_s)
            back_off_s = min(MAX_BACK_OFF_S, 2 * back_off_s)

    async def _one_life(self) -> tuple[str, tuple[int, ...]]:
        """Runs one engine process from its start to its death. Returns why it ended, and the ids of the requests in its last,
        unfinished step. Raises OSError if it cannot be started."""
        loop = asyncio.get_running_loop()
        self._came_up = self._distrusted = self._is_lost = False
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        handover, journal_fd = None, -1
        try:
            if self._left is not None:
                handover = _Handover(self._left, self.device)
            journal_fd, journal = make_journal(self.device)
            process = await self._start_process(theirs.fileno(), journal_fd, handover.fd if handover else -1)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if journal_fd >= 0:
                os.close(journal_fd)
            if handover is not None:
                handover.spawned()
        self._process, self.pid, self._kill_reason, self._fault = process, process.pid, "", None
        exited, overdue = loop.create_future(), loop.create_future()
        self._overdue = overdue

        def on_exit() -> None:
            loop.remove_reader(process.pidfd)
            self._events.engine_ended(self.device)
            if not exited.done():
                exited.set_result(None)

        loop.add_reader(process.pidfd, on_exit)
        channel = WorkerChannel(self._on_message, lambda error: self.restart(f"sent what is no message: {error}"))
        stderr = EngineStderr(process.stderr, self.device)
        try:
            await loop.create_connection(lambda: channel, sock=ours)
            self._channel, self._journal = channel, journal
            self._expect_ready()
            await self._configurable.wait()
            channel.send(self._spec().configure())
            # the stream and the process end together, but either end may be noticed first
            await asyncio.wait([exited, channel.closed, overdue], return_when=asyncio.FIRST_COMPLETED)
            if not exited.done() and not overdue.done():
                await asyncio.wait([exited], timeout=1.0)
                self._kill()
                await asyncio.wait([exited, overdue], return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                self._lose(channel, journal)
                await exited
            await asyncio.wait([channel.closed], timeout=1.0)
        finally:
            self._channel, self._process, self._journal, self.pid, self.up = None, None, None, 0, False
            for timer in (self._ready_timer, self._kill_timer, self._end_timer):
                if timer is not None:
                    timer.cancel()
            self._overdue = self._kill_timer = self._end_timer = None
            loop.remove_reader(process.pidfd)
            channel.close()
            process.kill()
            code = await asyncio.to_thread(process.wait)
            process.close()
            if handover is not None:
                await asyncio.to_thread(handover.join)
            stderr.close()
        running = protocol.read_journal(journal)
        journal.close()
        return self._kill_reason or await self._why(code), running

    def _lose(self, channel: WorkerChannel, journal: mmap.mmap) -> None:
        """Gives up an engine that was killed and does not end: reports its death, and ignores all its further messages. Its device
        memory, and its queue in the memory that engines share, are not used until it has ended."""
        self._channel, self._journal, self.up = None, None, False
        channel.close()
        if self._ready_timer is not None:
            self._ready_timer.cancel()
        if self._stopping:
            return
        self._is_lost = True
        reason = f"{self._kill_reason or 'closed its connection'}; it was killed and has not ended yet"
        self.problem = f"the engine {reason}"
        log.error("engine %s; another one is started when it has", reason, extra=fields(device=self.device))
        self._events.engine_lost(self.device)
        self._events.engine_down(self.device, protocol.read_journal(journal), reason)

    async def _why(self, code: int | None) -> str:
        if self._fault is None:
            return describe(code)
        if self._fault.kind == "no_memory":
            return f"could not start: {await asyncio.to_thread(self._no_memory, self._fault.error)}"
        return f"{describe(code)}: {self._fault.error}"

    async def _start_process(self, channel_fd: int, journal_fd: int, handover_fd: int) -> EngineProcess:
        command = ["--channel-fd", str(channel_fd), "--journal-fd", str(journal_fd)]
        passed = [channel_fd, journal_fd]
        if self._lent_by is not None:
            assert self._exchange is not None
            arguments, shared = self._exchange.arguments(self.device)
            command += arguments + self._lent_by.arguments()
            return await self._spawn(command, passed + shared, {}, "engine.remote")
        if self._host_tier_fd >= 0:
            command += ["--host-tier-fd", str(self._host_tier_fd)]
            passed.append(self._host_tier_fd)
        if handover_fd >= 0:
            command += ["--handover-fd", str(handover_fd)]
            passed.append(handover_fd)
        if self._exchange is not None:
            arguments, shared = self._exchange.arguments(self.device)
            command += arguments
            passed += shared
        if self._forks is not None:
            return await self._forks.fork(f"engine {self.device}", command, passed)
        return await self._spawn(command, passed, variables_of(self._threads, self._gpu))

    @staticmethod
    async def _spawn(command: list[str], passed: list[int], variables: dict[str, str], module: str = "engine") -> EngineProcess:
        # in a thread, because fork and exec of a large process may block the loop too long
        return await started(end, Spawned, command, passed, variables, module)

    def _on_message(self, message: Any) -> None:
        if type(message) is protocol.EngineReady:
            if message.version != protocol.PROTOCOL_VERSION:
                self.restart(f"speaks protocol {message.version}, the daemon {protocol.PROTOCOL_VERSION}")
                return
            self.up, self._came_up, self.problem = True, True, ""
            self._events.engine_up(self.device, message)
        elif type(message) is protocol.EngineFault:
            self._fault = message
        elif type(message) is protocol.WeightsHeld:
            if self._left is not None:
                self._left.told(message)
        else:
            self._events.engine_message(self.device, message)

    def _expect_ready(self) -> None:
        due_s = time.monotonic() + START_LIMIT_S
        self._ready_timer = asyncio.get_running_loop().call_later(START_LIMIT_S, self._too_slow, due_s)

    def _too_slow(self, due_s: float) -> None:
        if self.up:
            return
        if time.monotonic() - due_s > HELD_S:  # the daemon stood still: the engine may have, too, or its message was not read yet
            self._expect_ready()
        else:
            self.restart_stuck(f"was not ready within {START_LIMIT_S:.0f} s")


class _Handover:
    """The daemon's end of the socketpair over which an engine asks for the memory that the previous engine left. A thread answers
    the engine (LeftMemory.exchange). fd: the engine's end. Raises OSError if the system allows no further descriptor or thread."""

    def __init__(self, left: LeftMemory, device: str) -> None:
        ours, self._theirs = socket.socketpair()
        self.fd = self._theirs.fileno()
        self._thread = Thread(target=left.exchange, args=(ours,), name=f"memory of {device}")
        try:
            self._thread.start()
        except MemoryError as error:
            ours.close()
            self._theirs.close()
            raise OSError(str(error)) from None

    def spawned(self) -> None:
        """Closes the daemon's copy of the engine's end. Called once the engine has a copy of its own, or could not be started."""
        self._theirs.close()

    def join(self) -> None:
        self._thread.join()
