"""`python -P -m engine --channel-fd N --journal-fd M [--host-tier-fd L]`: one engine process. It lives as long as its socketpair.

Signals are the daemon's business: SIGTERM and SIGINT, which reach a whole process group, are ignored here.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import signal
import socket
import sys

import msgspec

from engine.channel import Channel, ChannelClosed
from engine.contracts import Runner
from engine.device import prepare_process
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.protocol import JOURNAL_BYTES, Configure
from engine.worker import Engine

log = logging.getLogger("engine")


def beside_work_space(configure: Configure) -> Configure:
    """On a GPU the chunks are taken at once, and torch takes the work space from what they leave; on the CPU pages exist once
    touched. The leases are the smaller by it in any case."""
    if not configure.device.startswith("cuda"):
        return configure
    work_chunks = -(-configure.work_space_bytes // configure.chunk_bytes)
    return msgspec.structs.replace(configure, num_chunks=configure.num_chunks - work_chunks, work_space_bytes=0)


def make_runner(configure: Configure, tier: HostTier | None) -> tuple[Runner, ChunkMemory | None]:
    """torch is imported only for the runner that computes. Raises ValueError for an unknown runner."""
    if configure.runner == "null":
        from engine.null_runner import NullRunner

        return NullRunner(configure, tier), None
    if configure.runner == "torch":
        prepare_process(configure.device)
        from engine.model_runner import TorchRunner

        memory: ChunkMemory
        if configure.device.startswith("cuda"):
            from engine.memory.cuda_memory import CudaMemory

            memory = CudaMemory(configure.num_chunks, configure.chunk_bytes)
        else:
            from engine.memory.cpu_memory import CpuMemory

            memory = CpuMemory(configure.num_chunks, configure.chunk_bytes)
        return TorchRunner(memory, configure, tier), memory
    raise ValueError(f"Configure.runner {configure.runner!r}: allowed are torch and null")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="engine")
    parser.add_argument("--channel-fd", type=int, required=True, help="socketpair to the daemon")
    parser.add_argument("--journal-fd", type=int, required=True, help="memfd for the step journal")
    parser.add_argument("--host-tier-fd", type=int, default=-1, help="memfd of Configure.host_tier_slots slots")
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
    first = beside_work_space(first)
    runner, memory = make_runner(first, tier)
    Engine(channel, journal, first, runner, memory, tier).run(rest)
    return 0


def _exit() -> None:
    """Ends at once: loader threads may be in the middle of a read, and there is nothing to tidy up."""
    try:
        code = main()
    except Exception:
        log.exception("engine fault")
        code = 70
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit()
