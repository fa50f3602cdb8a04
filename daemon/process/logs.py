"""Writes one line per event to stderr: what happened, then `name=value` pairs of what it concerns. Prompts, outputs and keys are
never logged.

The formats: `text` for people; `journal` is the same without the time but with the priority (`<6>`), which journald takes off;
`json` is one object a line. Callers add values with `extra=fields(model=..., device=...)`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import sys
import time
from functools import lru_cache
from typing import Any

log = logging.getLogger("hearthd")
ROOM_LIMIT_S = 0.2  # how long a line may wait for room, once, before lines are dropped
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))  # in syslog(3)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[^\s\"=\\]+\Z")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Returns the argument `extra` for a call of a logger: values such as request_id, cause, model and device, which are added to
    the line and by which the log can be searched. "" and None are left out."""
    return {"fields": {name: value for name, value in values.items() if value not in ("", None)}}


def _message(record: logging.LogRecord) -> str:
    """Returns the record's message on one line, with control characters escaped, whatever a file or a client has put into it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], record.getMessage())


def _logger(record: logging.LogRecord) -> str:
    return record.name.removeprefix("hearthd").lstrip(".")


class TextLines(logging.Formatter):
    """Formats records as `12:30:01.250 warning api: text model=a`. The date is left to the program that keeps the log."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_clock(int(record.created))}.{int(record.msecs):03d} {record.levelname.lower()} {self.text(record)}"

    def text(self, record: logging.LogRecord) -> str:
        name = _logger(record)
        line = f"{name}: {_message(record)}" if name else _message(record)
        for key, value in getattr(record, "fields", {}).items():
            if type(value) is int or type(value) is float:
                line += f" {key}={value}"
                continue
            text = str(value)
            line += f" {key}={text if _PLAIN.match(text) else json.dumps(text)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


@lru_cache(maxsize=1)
def _clock(unix_s: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


class JournalLines(TextLines):
    """Formats records as `<4>api: text model=a`, where 4 is the priority of syslog(3). Each line of a traceback begins with the
    priority of its record."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in self.text(record).split("\n"))


class JsonLines(logging.Formatter):
    """Formats records as `{"time": "2026-01-31T12:30:01.250Z", "level": "warning", "logger": "api", "message": "text", "model":
    "a"}`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": _logger(record),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "journal": JournalLines, "json": JsonLines}
_handler: logging.StreamHandler[Any] | None = None


class _Lines(logging.StreamHandler[Any]):
    """Writes lines to stderr, and drops lines while it takes none, as a pipe that nobody reads. The event loop writes lines, too,
    and would otherwise wait until somebody reads again. The next line that is written follows one with the number of those that
    are lost."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._num_lost = 0
        self._is_torn = False  # the last line was written in part
        self._poller: select.poll | None = None
        with contextlib.suppress(OSError):  # an object in this process collects what is written
            self._fd = sys.stderr.fileno()
            self._poller = select.poll()
            self._poller.register(self._fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._poller is None:
            super().emit(record)
            return
        try:
            lines = [self.format(record)]
            if self._num_lost:
                lost = "lines of the log that are lost, because nobody read them: %d"
                lines.insert(0, self.format(logging.LogRecord("hearthd", logging.ERROR, "", 0, lost, (self._num_lost,), None)))
            if self._write("\n".join(["", *lines, ""] if self._is_torn else [*lines, ""]), self._poller):
                self._num_lost = 0
            else:
                self._num_lost += 1
        except Exception:
            self.handleError(record)

    def _write(self, text: str, poller: select.poll) -> bool:
        """Writes to stderr and returns whether all of `text` was written. Waits ROOM_LIMIT_S for room, but not at all if the last
        line was lost. A pipe that has room takes PIPE_BUF bytes at once (pipe(7))."""
        left = memoryview(text.encode(errors="backslashreplace"))
        limit_s = 0.0 if self._num_lost else ROOM_LIMIT_S
        num_bytes = len(left)
        with contextlib.suppress(BlockingIOError):
            while left and poller.poll(limit_s * 1e3):
                left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]
        self._is_torn = 0 < len(left) < num_bytes or (self._is_torn and len(left) == num_bytes)
        return not left


def set_up(level: str, log_format: str = "") -> None:
    """Sets up logging to stderr; may be called again to change it. level: debug, info, warning or error, for hearthd's own
    messages. log_format: text, json, journal, or auto (journal if stderr is the journal, otherwise text); "": the format that is in
    use, or auto at the first call."""
    global _handler
    root = logging.getLogger()
    if _handler is None or _handler not in root.handlers:
        _handler = _Lines()
        root.addHandler(_handler)
        log_format = log_format or "auto"
    if log_format:
        name = ("journal" if stderr_is_journal() else "text") if log_format == "auto" else log_format
        _handler.setFormatter(_FORMATS[name]())
    # values that no format shows need not be looked up for each line
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # leaves out the caller's file and line, as the library's manual says
    root.setLevel(logging.WARNING)
    logging.getLogger("hearthd").setLevel(level.upper())


def stderr_is_journal() -> bool:
    """Returns whether stderr is connected to systemd's journal, that is, whether the environment variable JOURNAL_STREAM names
    stderr's device and inode."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
