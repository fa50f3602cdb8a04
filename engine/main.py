"""`python -P -m engine --channel-fd N --journal-fd M [--host-tier-fd L] [--handover-fd K] [--exchange-fd X
--engine-number E --doorbell-fds A,B,…]` runs one engine process. It lives as long as its socketpair to the daemon.

SIGTERM and SIGINT, which reach a whole process group, are ignored: only the daemon decides when an engine ends.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.exchange import Exchange, Membership
from engine.host.orphan import end_with
from engine.host.process import import_torch_without_meta_kernels, name_process, prepare_process
from engine.loop.worker import Engine
from engine.memory.handover import Handover
from engine.memory.host_tier import HostTier
from engine.memory.out_of_memory import lacks_memory
from engine.protocol import JOURNAL_BYTES, SHOW_THREADS, Configure, EngineFault
from engine.serve.channel import Channel, ChannelClosed

if TYPE_CHECKING:  # engines of null models do not need torch
    from engine.contracts.backend import OpenDevice

log = logging.getLogger("engine")

EXIT_FAULT = 70
TELL_LIMIT_S = 1.0  # limit for handing a fault message to the daemon


def preload(runner: str, cache_dir: str) -> None:
    """Imports the modules that engines of cpu devices need, so that processes forked afterwards need not import them.
    runner: which implementation runs the models, torch or null (Configure.runner).
    cache_dir: the folder of compiled kernels (Configure.cache_dir)."""
    if runner != "torch":
        importlib.import_module("engine.null.runner")
        return
    prepare_process()
    import_torch_without_meta_kernels()
    from engine.cpu.ops import CpuOps

    for module in ("engine.cpu.backend", "engine.loading.runner"):
        importlib.import_module(module)
    CpuOps(cache_dir, deferred=True)  # imports the kernels without calling any


def open_device(configure: Configure, handover: Handover | None) -> OpenDevice:
    """Opens the device that configure.device names, and returns it. Imports torch. handover: the exchange with the daemon by which
    the device's memory outlives this engine and passes to the next one; None: the memory ends with this process. Raises the
    device's errors, such as MemoryError."""
    prepare_process()
    if configure.device.startswith("cuda"):
        from engine.cuda import backend as cuda

        return cuda.open_device(configure, handover)
    from engine.cpu import backend as cpu

    return cpu.open_device(configure, handover)


def make_engine(
    channel: Channel,
    journal: mmap.mmap,
    configure: Configure,
    tier: HostTier | None,
    handover: Handover | None,
    membership: Membership | None = None,
) -> Engine:
    """Returns a new engine, which runs models with the implementation that configure.runner names.
    tier: the host tier; None: there is none.
    handover: the exchange with the daemon by which the device's memory passes to the next engine; None: the memory ends with this
    process.
    membership: the engine's access to the memory that it shares with other engines; None: it shares none.
    Raises ValueError for an unknown runner, and the errors of open_device."""
    exchange = None if membership is None else membership.exchange
    if configure.runner == "null":
        from engine.null.runner import NullRunner

        return Engine(channel, journal, configure, NullRunner(configure, tier, exchange), None, tier, membership=membership)
    if configure.runner == "torch":
        device = open_device(configure, handover)
        from engine.loading.runner import TorchRunner

        runner, memory = TorchRunner(device.backend, device.configure, tier, exchange), device.backend.memory
        return Engine(channel, journal, device.configure, runner, memory, tier, device.left, membership)
    raise ValueError(f"Configure.runner {configure.runner!r}: allowed are torch and null")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an engine and returns its exit code. arguments: command-line arguments; None: those of this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # at a fault in native code the log shows where each thread was
    faulthandler.register(SHOW_THREADS, all_threads=True)  # and so before the daemon kills an engine that hangs
    parser = argparse.ArgumentParser(prog="engine")
    parser.add_argument("--channel-fd", type=int, required=True, help="socketpair to the daemon")
    parser.add_argument("--journal-fd", type=int, required=True, help="memfd for the step journal")
    parser.add_argument("--host-tier-fd", type=int, default=-1, help="memfd of Configure.host_tier_slots slots")
    parser.add_argument("--handover-fd", type=int, default=-1, help="socket for the device's memory to outlive this process")
    parser.add_argument("--exchange-fd", type=int, default=-1, help="memfd in which engines share steps (engine/exchange.py)")
    parser.add_argument("--engine-number", type=int, default=0, help="this engine's number there")
    parser.add_argument("--doorbell-fds", default="", help="the eventfds that wake engines 0, 1 and so on, separated by commas")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    channel = Channel(socket.socket(fileno=options.channel_fd))
    end_with(options.channel_fd)
    journal = mmap.mmap(options.journal_fd, JOURNAL_BYTES)
    try:
        first, *rest = channel.wait_for_message()
    except ChannelClosed:
        return 0
    if not isinstance(first, Configure):
        log.error("the first message must be Configure; got %s", type(first).__name__)
        return 2
    name_process(f"engine {first.device}")
    tier = None
    if first.host_tier_slots:
        if options.host_tier_fd < 0:
            log.error("Configure.host_tier_slots is %d, but there is no --host-tier-fd", first.host_tier_slots)
            return 2
        tier = HostTier(options.host_tier_fd, first.host_tier_slots, first.chunk_bytes)
    try:
        membership = None
        if options.exchange_fd >= 0:
            doorbells = [int(fd) for fd in options.doorbell_fds.split(",")]
            exchange = Exchange(options.exchange_fd, doorbells)
            membership = Membership(exchange, options.engine_number, doorbells[options.engine_number])
        handover = Handover(socket.socket(fileno=options.handover_fd)) if options.handover_fd >= 0 else None
        engine = make_engine(channel, journal, first, tier, handover, membership)
    except Exception as error:
        return _fault(channel, _kind_at_start(error), error)
    try:
        engine.run(rest)
    except Exception as error:
        return _fault(channel, "fault", error)
    return 0


def _kind_at_start(error: Exception) -> str:
    """Returns the kind (EngineFault.kind) of an error with which an engine could not start. On a GPU that others have filled, torch
    finds no room for the CUDA context, and raises a RuntimeError before any chunk is allocated."""
    return "no_memory" if lacks_memory(error) else "fault"


def _fault(channel: Channel, kind: str, error: Exception) -> int:
    """Reports a fault to the daemon and the log, and returns the process's exit code. kind: no_memory or fault (EngineFault.kind).
    The log has a traceback, except for lack of memory, errors of a CUDA device and missing packages: in the first two cases the
    call that raised the error is often not the one that caused it."""
    line = str(error).partition("\n")[0]
    is_known = lacks_memory(error)
    if isinstance(error, ModuleNotFoundError):
        line, is_known = f"the Python package {error.name} is not installed; `hearth doctor` says how it is", True
    log.error("engine fault: %s", line, exc_info=None if is_known or "CUDA" in line else error)
    until_s = time.monotonic() + TELL_LIMIT_S
    with contextlib.suppress(ChannelClosed):
        channel.send(EngineFault(kind, f"{type(error).__name__}: {line}"))
        while channel.backlog_bytes and time.monotonic() < until_s:
            channel.wait_for_room(TELL_LIMIT_S)
            channel.flush()
    return EXIT_FAULT


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the engine (`main`) and ends the process with the engine's exit code at once, without clean-up: loader threads may be in
    the middle of a read, and nothing needs to be tidied up."""
    try:
        code = main(arguments)
    except Exception:
        log.exception("engine fault")
        code = EXIT_FAULT
    sys.stderr.flush()
    os._exit(code)
