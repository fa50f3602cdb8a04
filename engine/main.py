"""`python -P -m engine --channel-fd N --journal-fd M [--host-tier-fd L] [--handover-fd K]` runs one engine process. It lives as
long as its socketpair to the daemon.

SIGTERM and SIGINT, which reach a whole process group, are ignored: only the daemon decides when an engine ends.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import mmap
import os
import signal
import socket
import sys
import time

import msgspec

from engine.channel import Channel, ChannelClosed
from engine.contracts import Runner
from engine.device import prepare_process
from engine.handover import Handover
from engine.memory import handles
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.protocol import JOURNAL_BYTES, Configure, EngineFault, WeightsHeld
from engine.worker import Engine

log = logging.getLogger("engine")

EXIT_FAULT = 70
TELL_LIMIT_S = 1.0  # limit for handing a fault message to the daemon


def beside_work_space(configure: Configure) -> Configure:
    """Returns the configuration with the work space's chunks taken out of num_chunks on a GPU: chunks are allocated at once there,
    and torch takes the work space from the memory they leave. On the CPU nothing changes, because pages exist only once touched.
    The leases are smaller by the work space in either case."""
    if not configure.device.startswith("cuda"):
        return configure
    work_chunks = -(-configure.work_space_bytes // configure.chunk_bytes)
    return msgspec.structs.replace(configure, num_chunks=configure.num_chunks - work_chunks, work_space_bytes=0)


def make_runner(
    configure: Configure, tier: HostTier | None, work_space_bytes: int, handover: Handover | None
) -> tuple[Runner, ChunkMemory | None, list[WeightsHeld] | None]:
    """Returns the runner, its memory, and the weights an earlier engine left in it, as Engine takes them. torch is imported only
    for the runner that computes. work_space_bytes: what torch may take of a GPU on top of the chunks. handover: None if the memory
    ends with this process. Raises ValueError for an unknown runner."""
    if configure.runner == "null":
        from engine.null_runner import NullRunner

        return NullRunner(configure, tier), None, None
    if configure.runner == "torch":
        prepare_process()
        from engine.model_runner import TorchRunner

        given, left = handover.ask(configure.num_chunks, configure.chunk_bytes) if handover is not None else ([], None)
        memory: ChunkMemory
        if configure.device.startswith("cuda"):
            from engine.memory.cuda_memory import CudaMemory, DeviceError
            from engine.work_space import limit_torch

            size = (configure.num_chunks, configure.chunk_bytes)
            try:
                memory = CudaMemory(*size, exportable=handover is not None, handles=given)
            except DeviceError as error:
                if handover is None or given:
                    raise
                log.warning("this engine's memory does not outlive it: %s", error)
                handover, left, memory = None, None, CudaMemory(*size)
            limit_bytes = limit_torch(work_space_bytes)
            log.info("torch is held to %.2f GiB of work space", limit_bytes / 2**30)
        else:
            from engine.memory.cpu_memory import CpuMemory

            memory = CpuMemory(configure.num_chunks, configure.chunk_bytes, given)
        handles.close(given)
        if handover is not None and not given:
            handover.give(memory)
        return TorchRunner(memory, configure, tier), memory, left
    raise ValueError(f"Configure.runner {configure.runner!r}: allowed are torch and null")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="engine")
    parser.add_argument("--channel-fd", type=int, required=True, help="socketpair to the daemon")
    parser.add_argument("--journal-fd", type=int, required=True, help="memfd for the step journal")
    parser.add_argument("--host-tier-fd", type=int, default=-1, help="memfd of Configure.host_tier_slots slots")
    parser.add_argument("--handover-fd", type=int, default=-1, help="socket for the device's memory to outlive this process")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    channel = Channel(socket.socket(fileno=options.channel_fd))
    journal = mmap.mmap(options.journal_fd, JOURNAL_BYTES)
    try:
        first, *rest = channel.wait_for_message()
    except ChannelClosed:
        return 0
    if not isinstance(first, Configure):
        log.error("the first message must be Configure; got %s", type(first).__name__)
        return 2
    tier = None
    if first.host_tier_slots:
        if options.host_tier_fd < 0:
            log.error("Configure.host_tier_slots is %d, but there is no --host-tier-fd", first.host_tier_slots)
            return 2
        tier = HostTier(options.host_tier_fd, first.host_tier_slots, first.chunk_bytes)
    work_space_bytes, first = first.work_space_bytes, beside_work_space(first)
    try:
        handover = Handover(socket.socket(fileno=options.handover_fd)) if options.handover_fd >= 0 else None
        runner, memory, left = make_runner(first, tier, work_space_bytes, handover)
    except Exception as error:
        return _fault(channel, "no_memory" if isinstance(error, MemoryError) else "fault", error)
    try:
        Engine(channel, journal, first, runner, memory, tier, left).run(rest)
    except Exception as error:
        return _fault(channel, "fault", error)
    return 0


def _fault(channel: Channel, kind: str, error: Exception) -> int:
    """Reports a fault to the daemon and the log, and returns the exit code. A device's error is raised by any call after the one
    that caused it, so its traceback would say nothing and is left out of the log."""
    line, is_known = str(error).partition("\n")[0], kind == "no_memory"
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


def run() -> None:
    """Runs `main` and ends the process at once, without clean-up: loader threads may be in the middle of a read, and there is
    nothing to tidy up."""
    try:
        code = main()
    except Exception:
        log.exception("engine fault")
        code = EXIT_FAULT
    sys.stderr.flush()
    os._exit(code)
