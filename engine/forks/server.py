"""`python -P -m engine --fork-server N` imports what engines need, once, and forks each engine from itself.

Importing torch and the kernels takes three seconds of a core. A fork takes some 20 ms, and all engines share the pages of what was
imported. The daemon (daemon/engines/fork_client.py) asks for an engine with one packet on the socket N, and gets one packet back.
The exit status of each engine is written to a pipe of its own. The server computes nothing and starts no thread, because a fork
copies only the thread that calls it. The process ends when the daemon's end of the socket is closed.

Engines of cuda devices are not forked: the daemon starts each with exec."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.forks.messages import MAX_DESCRIPTORS, PACKET_BYTES, Forked, ForkEngine
from engine.host.process import name_process
from engine.main import preload
from engine.main import run as run_engine


@dataclass(slots=True)
class _Engine:
    """A running engine. pidfd: a descriptor that becomes readable when the engine ends. ended_fd: the pipe to which its exit status
    is written."""

    pid: int
    pidfd: int
    ended_fd: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine")
    parser.add_argument("--fork-server", type=int, required=True, help="socketpair to the daemon")
    parser.add_argument("--runner", required=True, help="Configure.runner of the engines")
    parser.add_argument("--cache-dir", default="", help="Configure.cache_dir of the engines")
    options = parser.parse_args()
    run(options.fork_server, options.runner, options.cache_dir)


def run(control_fd: int, runner: str, cache_dir: str) -> None:
    """Forks an engine for each request of the daemon, until the daemon closes its end of the socket. control_fd: this process's end
    of the socket. runner: what runs the models, torch or null; what engines of this kind need is imported before the first request.
    cache_dir: the folder of compiled kernels. Both are as in protocol.Configure."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in engines
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process("fork server")
    try:
        preload(runner, cache_dir)
    except Exception as error:  # an engine meets the same error and reports it
        print(f"WARNING engines start slowly: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # a collection in an engine would write to these objects' pages, and so copy them
    _Server(socket.socket(fileno=control_fd)).serve()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._engines: dict[int, _Engine] = {}  # pidfd -> running engine

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._engines:
                    self._reap(self._engines.pop(key.fd))
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        """Receives one ForkEngine from the daemon, forks the engine and sends Forked. Returns False if the daemon has closed the
        socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, MAX_DESCRIPTORS)
        except ConnectionResetError:
            return False
        if not data:
            return False
        request = msgspec.msgpack.decode(data, type=ForkEngine)
        ended_fd, *others = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            os.close(ended_fd)
            answer, sent = Forked(0, f"fork: {error.strerror}"), []
        else:
            if not pid:
                self._become_engine(request, ended_fd, others)
            pidfd = os.pidfd_open(pid)
            self._engines[pidfd] = _Engine(pid, pidfd, ended_fd)
            self._selector.register(pidfd, selectors.EVENT_READ)
            answer, sent = Forked(pid), [pidfd]
        for descriptor in others:
            os.close(descriptor)
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(answer)], sent)
        except OSError:  # the daemon is gone: engines end as their own sockets are closed
            return False
        return True

    def _reap(self, ended: _Engine) -> None:
        self._selector.unregister(ended.pidfd)
        _, status = os.waitpid(ended.pid, 0)
        with contextlib.suppress(OSError):  # the daemon is gone, or does not want to know
            os.write(ended.ended_fd, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(ended.ended_fd)
        os.close(ended.pidfd)

    def _become_engine(self, request: ForkEngine, ended_fd: int, descriptors: Sequence[int]) -> None:
        """Turns the forked process into the engine that the daemon asked for: closes the server's descriptors, moves `descriptors`
        to the numbers that the request names, and runs the engine. Does not return."""
        code = 1
        try:
            self._selector.close()
            for descriptor in (self._control.detach(), ended_fd):
                os.close(descriptor)
            for other in self._engines.values():
                os.close(other.pidfd)
                os.close(other.ended_fd)
            os.setpgid(0, 0)  # Ctrl-C in a terminal is for the daemon, which drains first
            name_process(request.name)
            numbers = [2, *request.numbers]
            for descriptor, number in zip(_above(descriptors, max(numbers) + 1), numbers, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            run_engine(request.arguments)
        except SystemExit as end:  # of bad arguments
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(code)


def _above(descriptors: Sequence[int], lowest: int) -> list[int]:
    """Moves descriptors to numbers of at least `lowest`, so that the numbers below `lowest` are free, and returns the new numbers
    in the same order. The original descriptors are closed."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return copies
