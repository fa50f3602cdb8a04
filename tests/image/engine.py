"""Calls a container engine of this machine, and gives it the commands of docs/install.md."""

from __future__ import annotations

import resource
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clone import ROOT
from tests.vm import documents

NAME = "hearthd-test"  # of the image, of the containers and, with a suffix, of the volumes
PAGE = (ROOT / "docs/install.md").read_text()
ENGINES = ("podman", "docker")


class Failed(Exception):
    """Raised if a command ends with another status than it should; the message has what it wrote."""


@dataclass(slots=True, frozen=True)
class Engine:
    """A container engine. program: podman or docker. port: the port of this machine at which containers serve. models: a folder of
    this machine. flags: more flags for each `run`."""

    program: str
    port: int
    models: Path
    flags: tuple[str, ...]

    def translated(self, command: str) -> list[str]:
        """Returns a command of the docs with this engine, and names, a port, a folder and sizes that leave the machine's own
        containers alone."""
        words = {
            "docker": self.program,
            "hearthd": NAME,
            "127.0.0.1:8000:8000": f"127.0.0.1:{self.port}:8000",
            "/srv/models:/models": f"{self.models}:/models",
            "hearthd-cache:/var/cache/hearthd": f"{NAME}-cache:/var/cache/hearthd",
            "hearthd-state:/var/lib/hearthd": f"{NAME}-state:/var/lib/hearthd",
            "cpu=12GiB": "cpu=1GiB",
            "nofile=65536:65536": f"nofile={open_files()}:{open_files()}",
        }
        argv = [words.get(word, word) for word in shlex.split(command, comments=True)]
        return [*argv[:2], *self.flags, *argv[2:]] if argv[1] == "run" else argv

    def do(self, argv: Sequence[str], status: int = 0, limit_s: float = 120.0, both: bool = False) -> str:
        """Runs a command and returns what it wrote. both: with its errors, which podman mixes with complaints of its own. Raises
        Failed for another exit status."""
        errors = subprocess.STDOUT if both else subprocess.PIPE
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{shlex.join(argv)}: no end after {limit_s:.0f} s") from error
        if done.returncode != status:
            wrote = f"{done.stdout}{done.stderr or ''}"
            raise Failed(f"{shlex.join(argv)}: ended with {done.returncode}, not {status}: {wrote[-2000:]}")
        return done.stdout

    def call(self, *words: str) -> str:
        return self.do([self.program, *words])

    def inside(self, *words: str) -> str:
        """Runs a command in the running container."""
        return self.call("exec", NAME, *words)

    def log(self) -> str:
        return self.do([self.program, "logs", NAME], both=True)

    def one_off(self, *words: str, status: int = 0, both: bool = False) -> str:
        """Runs the image with flags before its name and arguments behind it, and returns what that wrote when it has ended."""
        return self.do([self.program, "run", "--rm", *self.flags, *words], status, both=both)

    def remove(self) -> None:
        """Removes the container, and nothing if there is none."""
        subprocess.run([self.program, "rm", "-f", NAME], capture_output=True, timeout=120)

    def remove_all(self) -> None:
        self.remove()
        for name in ("cache", "state"):
            subprocess.run([self.program, "volume", "rm", f"{NAME}-{name}"], capture_output=True, timeout=120)


def open_files() -> int:
    """Returns the number of open files of docs/install.md, or what this machine allows if that is less."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)


def found(asked: str) -> str:
    """Returns the engine to use: the asked one, or the first that answers. "": none does."""
    for program in [asked] if asked else ENGINES:
        if shutil.which(program) and not subprocess.run([program, "info"], capture_output=True, timeout=60).returncode:
            return program
    return ""


def documented_build(program: str) -> str:
    """Returns the command of docs/install.md that builds the image."""
    command = documents.commands(documents.block(PAGE, "docker build -f Containerfile -t hearthd ."))[0]
    # podman leaves the health check out of its own format
    return command.replace(" build ", " build --format=docker ") if program == "podman" else command


def documented_run() -> tuple[str, list[str]]:
    """Returns the command of docs/install.md that runs the image without GPUs, and those that look at it."""
    shown = documents.block(PAGE, "hearthd --insecure --device cpu=12GiB").replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in shown.splitlines()]
    return lines[0], lines[1:]


def documented(beginning: str) -> str:
    """Returns the one command, or the one list of flags, that stands in the points below those commands and begins so."""
    (span,) = {span for span in documents.spans(PAGE, "- **Ahead.**") if span.startswith(beginning)}
    return span
