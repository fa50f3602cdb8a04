"""The reasons why text workers end, in words for the log and for the requests that fail with them."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.text.helper_messages import Ended
from daemon.text.jobs import GRAMMAR_CPU_S, LIMIT_BYTES, TEMPLATE_CPU_S
from loader.errors import shortened

# Causes, which are labels of a metric. Those in the first line come from a job, those in the second from elsewhere.
STALLED, MEMORY, CPU_TIME, CRASHED = "stalled", "memory", "cpu_time", "crashed"
KILLED, HELPER, UNKNOWN = "killed", "helper", "unknown"
_OF_A_JOB = frozenset({STALLED, MEMORY, CPU_TIME, CRASHED})


@dataclass(slots=True, frozen=True)
class Death:
    """The end of a text worker. cause: one of this module's constants, such as STALLED. why: the predicate of a sentence that
    begins with "the text of this request". details: text for the log, with the last lines that the worker wrote. has_waited:
    whether a stalled worker was not computing but waiting, such as for a file on a mount that hangs."""

    cause: str
    why: str
    details: str
    has_waited: bool = False

    @property
    def is_of_a_job(self) -> bool:
        """Returns whether the job in progress most likely caused the death, and would cause it again if it were repeated."""
        return self.cause in _OF_A_JOB


def stalled(limit_s: float, was_doing: str, pid: int) -> Death:
    """Returns the Death of a worker that is about to be killed because a job took too long. limit_s: the job's limit in seconds.
    was_doing: the job, in words for the log. pid: the worker's process id, by which it is found out whether the worker computes or
    waits."""
    why, details = f"took longer than {limit_s:.0f} s", f"it gave no answer for {limit_s:.0f} s ({was_doing}) and was killed"
    if _computes(pid):
        return Death(STALLED, why, details)
    waited = "its worker was waiting: the model's files do not answer, or somebody has stopped it"
    return Death(STALLED, f"{why}; {waited}", f"{details}; {waited}", has_waited=True)


def _computes(pid: int) -> bool:
    """Returns whether a thread of the process is running or ready to run; False if all of them wait."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def with_helper() -> Death:
    return Death(HELPER, "was lost with the text helper, which ended", "the text helper ended")


def unknown(details: str = "its socket closed, and nothing is known of why") -> Death:
    return Death(UNKNOWN, "was lost: its text worker ended", details)


def from_report(ended: Ended, model: str) -> Death:
    """Returns why a text worker ended, from the report of the helper, its parent process. model: the worker's model; "" for a
    worker for request bodies or grammars."""
    peak = f"{ended.peak_bytes >> 20} MiB at most"
    lines = [line.strip() for line in ended.last_words.splitlines()]
    words = shortened(" ".join(line for line in lines if line and not line.startswith("note: run with `RUST_BACKTRACE")))
    said = f"; it wrote: {words}" if words else ""
    if ended.exit_code >= 0:
        return Death(CRASHED, f"ended its text worker (exit code {ended.exit_code})", f"exit code {ended.exit_code}, {peak}{said}")
    number = -ended.exit_code
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    if number == signal.SIGABRT and "memory allocation" in ended.last_words:
        why = f"needs more than the {LIMIT_BYTES >> 20} MiB that a text worker may take"
        return Death(MEMORY, why, f"{name} for want of memory, {peak}{said}")
    if number == signal.SIGPROF:
        what = (
            f"{TEMPLATE_CPU_S:g} s of CPU time in the chat template" if model else f"{GRAMMAR_CPU_S:g} s of CPU time in its grammar"
        )
        return Death(CPU_TIME, f"took more than {what}", f"{name}, {peak}{said}")
    if number == signal.SIGKILL:
        return Death(KILLED, "was lost: its text worker was killed", f"{name} by somebody else or for want of memory, {peak}{said}")
    return Death(CRASHED, f"made its tokenizer or template crash ({name})", f"{name}, {peak}{said}")
