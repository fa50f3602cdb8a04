"""What a check is, and running them: each begins with the service as installed, running, and leaves nothing behind."""

from __future__ import annotations

import importlib
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.vm.guest import service
from tests.vm.results import Result


class LeftOut(Exception):
    """This machine cannot show it; the message says why."""


@dataclass(slots=True, frozen=True)
class Check:
    part: str
    name: str
    why: str
    run: Callable[[], str | None]
    as_it_is: bool
    restarts: bool


_checks: list[Check] = []


def check(
    why: str, as_it_is: bool = False, restarts: bool = False
) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """A function that raises where what it shows is not so, and may return what it has seen. as_it_is: nothing is done before.
    restarts: it restarts the service at once, so that one that does not run, or with other settings, will do before."""

    def add(run: Callable[[], str | None]) -> Callable[[], str | None]:
        _checks.append(Check(run.__module__.rpartition(".")[2], run.__name__, why, run, as_it_is, restarts))
        return run

    return add


def expect(holds: object, what: object) -> None:
    """Raises AssertionError that says what was found. An assert statement would say nothing, without pytest."""
    if not holds:
        raise AssertionError(str(what))


def run(chosen: list[str]) -> Iterator[Result]:
    """Runs the checks of parts (`restart`), and single ones (`faults.watchdog`), in the order of the parts."""
    parts = list(dict.fromkeys(one.partition(".")[0] for one in chosen))
    for part in parts:
        importlib.import_module(f"tests.vm.guest.{part}")
    wanted = [one for one in _checks if one.part in chosen or f"{one.part}.{one.name}" in chosen]
    for one in sorted(wanted, key=lambda one: parts.index(one.part)):
        begin = time.monotonic()
        try:
            if not one.as_it_is:
                service.as_installed(start=not one.restarts)
            begin = time.monotonic()
            detail, ok = " ".join((one.run() or "").split()), True
        except LeftOut as reason:
            detail, ok = str(reason), None
        except Exception as error:
            detail, ok = " ".join(f"{type(error).__name__}: {error}".split())[:900], False
            traceback.print_exc()
            print(_state(), flush=True)
        yield Result(one.part, one.name, one.why, ok, round(time.monotonic() - begin, 1), detail)


def _state() -> str:
    """What helps to understand a failure, for the console's log."""
    shown = ["systemctl status --no-pager -n0 hearthd.service hearthd.socket", "journalctl -b --no-pager -n 80 -o short-monotonic"]
    return "\n".join(subprocess.run(one.split(), capture_output=True, text=True, check=False).stdout for one in shown)
