"""A real daemon on free ports below a temporary folder, for tests.

    with Node(tmp_path, devices=["cpu=64MiB"]) as node:
        make_model(node.models / "org" / "name")      # or before the start
        node.openai().chat.completions.create(model="org/name", ...)
        assert node.ps() == []

`runner="null"` needs no torch in the engine; nothing of the node outlives the `with`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import unittest.mock
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from daemon.cli import main as cli
from tests import kernel_cache, process_environment
from tests.e2e import daemon_forks, processes

ROOT = Path(__file__).resolve().parents[2]
# Far above what anything here takes: a hang fails the test instead of the job. An emulated processor needs more.
SAFETY_S = 60.0 * float(os.environ.get("HEARTHD_TESTS_SLOWER", "1"))

PROGRAM = ("-P", "-m", "daemon")

# commands that send one request over the control socket and print the answer
ASKS = {"ps", "models", "status", "load", "unload", "pin", "unpin", "enable", "disable", "why", "plan", "evict", "history", "queue"}
ASKS |= {"events", "drain", "resume", "reload", "config", "keys", "top", "experts"}


class Node:
    """url: http://127.0.0.1:PORT · control: socket path · models: the models folder · log: path of the daemon's stderr."""

    def __init__(
        self,
        folder: Path,
        *,
        models: Path | None = None,
        devices: Sequence[str] = ("cpu=256MiB",),
        runner: str = "null",
        null_step_ms: float = 2.0,
        config: str = "",
        flags: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        forked: bool = True,
    ) -> None:
        """forked: whether the daemon may be a fork of a process that has imported what it needs (daemon_forks.py)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.devices, self.runner = folder, list(devices), runner
        self.models = models or folder / "models"
        self.models.mkdir(exist_ok=True)
        self.control = str(folder / "c.sock")
        self.log = folder / "hearthd.log"
        self.config = folder / "node.toml"
        self.config.write_text(config)
        self.program = list(program)
        self.flags = ["--null-step-ms", str(null_step_ms), *flags]
        self.url = ""
        self.trusted: ssl.SSLContext | None = None  # for a node that speaks TLS
        self.process: subprocess.Popen[str] | daemon_forks.ForkedDaemon | None = None
        self._forked = forked

    # ---- life

    python = sys.executable

    def warm(self) -> None:
        if self.runner == "torch":
            kernel_cache.warm()

    def environment(self) -> dict[str, str]:
        return environment()

    def command(self) -> list[str]:
        return [
            *[self.python, *self.program, "--models", str(self.models), "--listen", "127.0.0.1:0"],
            *["--control", self.control, "--config", str(self.config), "--runner", self.runner],
            *["--state-dir", str(self.folder / "state"), "--cache-dir", kernel_cache.CACHE_DIR],
            *[part for device in self.devices for part in ("--device", device)],
            *self.flags,
        ]

    def start(self, ready: bool = True) -> Node:
        """Starts the daemon in its own session and waits for its address (and, with `ready`, for all of its engines)."""
        self.warm()
        with self.log.open("ab") as log:
            command, variables = self.command(), self.environment()
            is_usual = [*self.program] == [*PROGRAM] and self.python == sys.executable
            is_usual &= "--cache-dir" not in self.flags  # the process that forks has bound kernels to the folder of the tests
            is_usual &= variables == usual_environment()
            if self._forked and is_usual:
                self.process = daemon_forks.start(self.runner, command[1 + len(PROGRAM) :], variables, log.fileno())
            if self.process is None:
                self.process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=variables
                )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if " serves http" in line:
                self.url = next(word for word in line.split() if word.startswith("http"))
                break
        else:
            self.process.wait(SAFETY_S)
            raise AssertionError(f"hearthd ended with {self.process.returncode}:\n{self.log_text()}")
        if ready:
            try:
                self.wait_for(self.has_all_engines, "readyz")
            except BaseException:
                self.stop()  # there is no `with` yet that would
                raise
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal, and SIGKILL where that does not help. Returns the exit code; asserts that no engine is left."""
        process = self.process
        assert process is not None
        left = self.engine_pids()
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(SAFETY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self.process = None
        wait_gone(left)
        code = process.returncode
        assert code is not None
        return code

    def kill(self) -> list[int]:
        """kill -9 of the daemon alone. Returns the pids of the engines it had."""
        assert self.process is not None
        engines = self.engine_pids()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        return engines

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        assert self.process is not None
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def __enter__(self) -> Node:
        return self.start() if self.process is None else self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop()

    # ---- seen from outside

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON or text) of an HTTP path."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=SAFETY_S, context=self.trusted) as response:
                status, body = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read().decode()
        with contextlib.suppress(ValueError):
            return status, json.loads(body)
        return status, body

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/readyz")[0] == 200
        return False

    def has_all_engines(self) -> bool:
        """Whether it is ready with every engine up. /readyz itself is content with one, and names none to those without a key."""
        with contextlib.suppress(OSError):
            status, told = self.get("/readyz")
            return status == 200 and set(told.get("engines", {}).values()) <= {"up"}
        return False

    def openai(self, key: str = "unused", **options: Any) -> Any:
        """The official client; close it or use `with`."""
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=SAFETY_S, **options)

    def async_openai(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0, timeout=SAFETY_S, **options)

    def cli(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """`hearth --control SOCKET ARGS`. Commands that only ask the daemon run in this process where they can: another one costs a
        fifth of a second, and tests that wait ask again and again. tests/daemon/test_status_socket.py and tests/install start the
        program itself."""
        words = ["--control", self.control, *args]
        if self.python == sys.executable and args and args[0] in ASKS and threading.current_thread() is threading.main_thread():
            return run_here(words)
        command = [self.python, "-P", "-m", "daemon.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=SAFETY_S, env=self.environment())

    def json(self, *args: str) -> Any:
        """A command's `--json`; asserts that it worked."""
        result = self.cli(*args, "--json")
        assert result.returncode == 0, f"{args}: {result.returncode} {result.stdout} {result.stderr}\n{self.log_text()}"
        return json.loads(result.stdout)

    def ps(self) -> Any:
        return self.json("ps")

    def state(self, model: str) -> str:
        return next((row["state"] for row in self.json("models") if row["name"] == model), "absent")

    def engine_pids(self) -> list[int]:
        """Sorted pids of the engine processes that live."""
        assert self.process is not None
        return sorted(engine.pid for engine in processes.engines(self.process.pid))

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Polls until `condition()` is true and returns it."""
        begun = time.monotonic()
        while (waited_s := time.monotonic() - begun) < SAFETY_S:
            value = condition()
            if value:
                return value
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"hearthd ended with {self.process.returncode} before {what}:\n{self.log_text()}")
            time.sleep(0.02 if waited_s < 1 else 0.05)
        raise AssertionError(f"no {what} within {SAFETY_S} s:\n{self.log_text()}")


def program_with(constants: Mapping[str, float]) -> tuple[str, ...]:
    """Returns Node's program with other values of some of the daemon's constants, which are given by module and name. What is quick
    or early by the usual ones may take longer on a machine whose processors others have."""
    lines = ["import importlib, sys", "from daemon.main import main"]
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
        lines.append(f"importlib.import_module({module!r}).{name} = {value!r}")
    return ("-P", "-c", "\n".join([*lines, "sys.exit(main())"]))


def without_drafts(*models: str) -> str:
    """Returns configuration by which streams of these models take a step for each token, whatever they say, so that they last."""
    return "".join(f'[models."{model}"]\nspeculator = "none"\n' for model in models)


# Making it takes ten times as long as asking the daemon.
_parser = functools.cache(cli.make_parser)


def run_here(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `hearth WORDS` in this process. Nothing else may print meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            with unittest.mock.patch.object(cli, "make_parser", _parser):
                code = cli.run(words)
        except SystemExit as ended:  # of words that it does not understand
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), errors.getvalue())


def environment() -> dict[str, str]:
    """Returns the environment of daemons and commands: this process's, but without pytest's name of the running test, so that it is
    the same in all tests and daemons can be forked (daemon_forks.py)."""
    return _of_daemons(os.environ)


def usual_environment() -> dict[str, str]:
    """Returns what `environment` returns in a test that sets no variable."""
    return _of_daemons(process_environment.kept())


def _of_daemons(variables: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in variables.items() if name != "PYTEST_CURRENT_TEST"}, "PYTHONPATH": str(ROOT)}


def wait_gone(pids: Sequence[int]) -> None:
    """Asserts that these processes end; a zombie that waits for its parent counts as ended."""
    end = time.monotonic() + 20
    while left := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes outlived the daemon: {left}")
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
