"""Starts daemons by a fork of a process that has imported what they need. Imports take most of a small node's start, and the suite
starts hundreds. `python -P -m tests.e2e.daemon_forks FD RUNNER` is that process; `start` asks it for a daemon.

A forked daemon has the environment, the limits and the folder that Popen would have given it. Because imports read the environment,
all daemons that are forked have the same one; a daemon with another one is started with exec (node.py). A forked daemon differs
from such a one in its command line, in that it holds what engines import and the kernels of most tests' models, and in that it
frees no modules when it ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import pkgutil
import random
import resource
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

PACKET_BYTES = 1 << 16
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK, resource.RLIMIT_FSIZE)
NOT_IN_A_DAEMON = ("daemon.cli", "daemon.simulate", "daemon.text.__main__", "daemon.scanning.__main__", "daemon.lending")


class ForkedDaemon:
    """A running daemon, as subprocess.Popen would describe it. ended_fd: a pipe with its exit code, once it has ended."""

    def __init__(self, pid: int, pidfd: int, ended_fd: int, stdout: TextIO) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._pidfd, self._ended_fd = pidfd, ended_fd

    def poll(self) -> int | None:
        self._take(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._take(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked daemon", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, timeout: float | None) -> None:
        if self.returncode is None and select.select([self._ended_fd], [], [], timeout)[0]:
            self.returncode = int(os.read(self._ended_fd, 16))
            os.close(self._ended_fd)
            os.close(self._pidfd)


def start(runner: str, arguments: Sequence[str], environment: Mapping[str, str], stderr_fd: int) -> ForkedDaemon:
    """Starts `hearthd ARGUMENTS` with an engine of this runner. environment: the same in all calls. stderr_fd: where its log
    goes."""
    if runner not in _forks:
        _forks[runner] = _Forks(runner, environment)
    return _forks[runner].fork([*arguments], stderr_fd)


class _Forks:
    """The process that forks daemons with an engine of this runner, as a test's process sees it."""

    def __init__(self, runner: str, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "tests.e2e.daemon_forks", str(theirs.fileno()), runner]
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        atexit.register(self._end)

    def fork(self, arguments: Sequence[str], stderr_fd: int) -> ForkedDaemon:
        ended_fd, ended_end = os.pipe()
        stdout_fd, stdout_end = os.pipe()
        try:
            limits = [resource.getrlimit(each) for each in LIMITS]
            request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "limits": limits}).encode()
            socket.send_fds(self._control, [request], [ended_end, stdout_end, stderr_fd])
        finally:
            os.close(ended_end)
            os.close(stdout_end)
        data, (pidfd,), _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        return ForkedDaemon(int(data), pidfd, ended_fd, os.fdopen(stdout_fd))

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


_forks: dict[str, _Forks] = {}  # by runner


# ---- in the process that forks


def _serve(control: socket.socket) -> list[str]:
    """Forks a daemon for each request, and returns its arguments in each of them. Ends this process when that of the tests ends."""
    selector, running = selectors.DefaultSelector(), dict[int, tuple[int, int]]()  # pidfd -> pid and ended_fd
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                selector.unregister(key.fd)
                pid, ended_fd = running.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                os.write(ended_fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ended_fd)
                os.close(key.fd)
                continue
            data, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
            if not data:
                os._exit(0)
            request = json.loads(data)
            ended_fd, *others = descriptors
            pid = os.fork()
            if not pid:
                selector.close()
                control.detach()
                _become_daemon(request["folder"], request["limits"], *others)
                arguments: list[str] = request["arguments"]
                return arguments
            for descriptor in others:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, ended_fd
            selector.register(pidfd, selectors.EVENT_READ)
            socket.send_fds(control, [str(pid).encode()], [pidfd])


def _become_daemon(folder: str, limits: Sequence[tuple[int, int]], stdout_fd: int, stderr_fd: int) -> None:
    from daemon.upstreams import via

    random.seed()
    via.OWN = f"{via.OWN[:-16]}{secrets.token_hex(8)}"  # by which nodes tell each other from themselves
    os.setsid()
    os.chdir(folder)
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.closerange(3, 1 << 12)
    for each, (soft, hard) in zip(LIMITS, limits, strict=True):
        resource.setrlimit(each, (soft, hard))


def _fork_engines(runner: str, variables: Mapping[str, str]) -> None:
    """Has the daemon's first process that forks engines be a fork of the daemon itself. variables: the environment with which this
    process has imported what engines need; with another one that process is started with exec."""
    from daemon.process import socket_child
    from engine.forks import server
    from engine.host.child_process import end_before_daemon

    spawn = socket_child.spawn

    def fork(module: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], **own: Any) -> Any:
        socket_child.spawn = spawn
        if [*module] != ["engine", "--fork-server"] or any(environment.get(name) != value for name, value in variables.items()):
            return spawn(module, arguments, environment, **own)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            end_before_daemon(pid)
            return _Child(pid), ours
        try:
            os.setpgid(0, 0)
            os.chdir("/")
            os.environ.clear()
            os.environ.update(environment)
            null = os.open(os.devnull, os.O_RDWR)
            control = os.dup2(theirs.detach(), 3)
            for number in (0, 1):
                os.dup2(null, number)
            os.closerange(4, 1 << 12)
            given = dict(zip(arguments[::2], arguments[1::2], strict=True))
            server.run(control, given["--runner"], given["--cache-dir"])
        finally:
            os._exit(0)

    socket_child.spawn = fork


class _Child:
    """A child process of the daemon, as subprocess.Popen would describe it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        pidfd = os.pidfd_open(self.pid) if self.poll() is None else -1
        if pidfd >= 0:
            ended = select.select([pidfd], [], [], timeout)[0]
            os.close(pidfd)
            if not ended:
                raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _preload(runner: str, cache_dir: str) -> dict[str, str]:
    """Imports what a daemon and its engines need. Returns the variables of the environment that were set for the engines'
    libraries."""
    from engine import main as engine

    cores = str(len(os.sched_getaffinity(0)))
    variables = {"OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores, "OPENBLAS_NUM_THREADS": "1"}
    os.environ.update(variables)
    engine.preload(runner, cache_dir)
    if runner == "torch" and importlib.util.find_spec("numba") is not None:
        _load_kernels()
    importlib.import_module("engine.forks.server")
    importlib.import_module("uvloop")
    daemon = importlib.import_module("daemon")
    for module in pkgutil.walk_packages(daemon.__path__, "daemon.", onerror=lambda name: None):
        if not module.name.startswith(NOT_IN_A_DAEMON) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return variables


def _load_kernels() -> None:
    """Loads the kernels that most tests' models need, which takes an engine half a second."""
    from engine.cpu.kernel_units import prepare_calls, units
    from engine.host.process import num_cores
    from loader.configs.kernel_sets import OF_DECODERS, KernelSet

    wanted = [unit for name in OF_DECODERS for unit in units(KernelSet("float32", name), num_cores() > 1)]
    prepare_calls([unit for unit in wanted if unit.load()])


def main() -> None:
    from hearthd import commands
    from tests import kernel_cache

    gc.disable()
    control, runner, environment = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], dict(os.environ)
    variables = _preload(runner, kernel_cache.CACHE_DIR)
    gc.collect()
    gc.freeze()
    sys.argv[1:] = _serve(control)
    os.environ.clear()
    os.environ.update(environment)
    _fork_engines(runner, variables)
    try:
        commands.hearthd()
    except SystemExit as ended:
        # as an interpreter ends, but without freeing every module, which takes a quarter of a second
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else bool(ended.code))


if __name__ == "__main__":
    main()
