"""The audit log: who did what to the node, a JSON object a line, in a file or in hearthd's own log.

Acts are put into a bounded queue and written by a thread, so a slow disk delays nothing else. Acts that do not fit into the queue,
or cannot be written, are dropped and counted, and a line in the file tells how many acts are missing. Prompts, outputs and keys are
never written; of a key only the first digits of its SHA-256.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pwd
import queue
import threading
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from config.load import AUDIT_IN_LOG, ConfigError, located_setting
from daemon.record.line_file import LineFile
from loader.threads import Thread

log = logging.getLogger("hearthd")
own_log = logging.getLogger("hearthd.audit")
MAX_WAITING = 8192  # the most acts in the queue
AT_ONCE = 256  # the most acts in one write
REFUSALS_A_MINUTE = 100  # of one kind; further ones are only counted, because strangers must not be able to fill the disk
TELL_EVERY_S = 60.0
THREAD_AGAIN_S = 60.0  # after the thread could not be started; each try may hold the event loop for a second
CLOSE_S = 2.0  # how long the stop of the daemon waits for the disk


def check(audit_log: str, source: str) -> None:
    """Raises ConfigError if the folder of the audit log's file does not exist. audit_log: the configured value: a path, one of
    AUDIT_IN_LOG, or "" for no audit log. source: the settings file, for the error."""
    if audit_log and audit_log not in AUDIT_IN_LOG and not os.path.isdir(os.path.dirname(audit_log)):
        raise located_setting(ConfigError(source, "audit_log", f"{audit_log}: there is no folder {os.path.dirname(audit_log)}"))


class _Entry(NamedTuple):
    """An act in the queue. target: the configured target at the time of the act, to which the act is written. act: the fields of
    the act's line."""

    target: str
    act: dict[str, Any]


class _Minute:
    """Counts the refusals of one kind in one minute. num: all of them. num_left_out: those that were not written. start_s: the
    minute's beginning (monotonic)."""

    __slots__ = ("num", "num_left_out", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s, self.num, self.num_left_out = start_s, 0, 0


class AuditLog:
    """The audit log of one node. It is off until `use` names a target. The public methods are called on the event loop; a thread
    writes the file.

    with_requests: whether each request of a client is recorded as an act. num_dropped: the number of acts that are missing in the
    log. problem: why the log cannot be written, "" if it can."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.with_requests = False
        self.problem = ""
        self._target = ""
        self._queue: queue.Queue[_Entry | None] = queue.Queue(max_waiting)
        self._thread: Thread | None = None  # None: there is none yet, or no memory for it
        self._tried_s = -THREAD_AGAIN_S
        self._closing = self._cannot_open = False
        self._reopen = threading.Event()
        self._minutes: dict[str, _Minute] = {}
        self._num_crowded_out = 0  # acts that did not fit into the queue; counted on the event loop
        self._num_not_written = 0  # acts that could not be written; counted by the thread
        self._num_told = 0  # dropped acts of both kinds that the log itself reports as missing
        self._told_s = -TELL_EVERY_S

    @property
    def is_on(self) -> bool:
        return bool(self._target)

    @property
    def num_dropped(self) -> int:
        return self._num_crowded_out + self._num_not_written

    def use(self, target: str, with_requests: bool) -> None:
        """Sets where acts are written from now on: to the file at a path, to hearthd's own log (one of AUDIT_IN_LOG), or nowhere
        (""). The file is reopened even if the path is the same, as log rotation requires. with_requests: whether each request of a
        client is recorded as an act."""
        self._target, self.with_requests = target, with_requests and bool(target)
        if target in AUDIT_IN_LOG:
            own_log.setLevel(logging.INFO)  # whatever log_level is
        if self._thread is None and (target or self.problem):
            self._start_thread()
        self.reopen()

    def _start_thread(self) -> None:
        self._tried_s = time.monotonic()
        thread = Thread(target=self._run, name="audit log")
        try:
            thread.start()
        except MemoryError as error:
            problem = f"has no thread that writes it: {error}"
            if problem != self.problem:
                log.error("audit_log %s; up to %d acts wait for one", problem, self._queue.maxsize)
            self.problem, self._cannot_open = problem, True  # until the thread has opened the file
        else:
            self._thread = thread

    def reopen(self) -> None:
        """Asks the writing thread to reopen the file after it has written the acts in the queue."""
        self._reopen.set()
        with contextlib.suppress(queue.Full):  # the thread looks at the flag soon in any case
            self._queue.put_nowait(None)

    def write(self, act: str, result: str = "ok", **about: Any) -> None:
        """Puts an act into the queue, from which the thread writes it; drops it if the queue is full. act: its name. result: "ok",
        or the code of an error. about: further fields of the act; None, "" and [] are left out."""
        if not self._target:
            return
        line = {"time": _utc(), "act": act, **{name: value for name, value in about.items() if value not in (None, "", [])}}
        try:
            self._queue.put_nowait(_Entry(self._target, line | {"result": result}))
        except queue.Full:
            self._num_crowded_out += 1
            now = time.monotonic()
            if now - self._told_s >= TELL_EVERY_S:
                self._told_s = now
                why = "its disk is too slow" if self._thread is not None else "it has no thread that writes it"
                log.error("audit log: %d acts dropped so far, for %s", self.num_dropped, why)
        if self._thread is None and time.monotonic() - self._tried_s >= THREAD_AGAIN_S:
            self._start_thread()

    def write_refusal(self, kind: str, act: str, result: str, **about: Any) -> None:
        """Writes an act that reports a refusal. Strangers can cause any number of refusals, so at most REFUSALS_A_MINUTE of each
        `kind` are written in a minute, followed by one act with the number of refusals left out. act, result, about: as in
        `write`."""
        if not self._target:
            return
        now = time.monotonic()
        minute = self._minutes.get(kind)
        if minute is None or now - minute.start_s >= 60:
            self._tell_left_out(kind)
            minute = self._minutes[kind] = _Minute(now)
        minute.num += 1
        if minute.num <= REFUSALS_A_MINUTE:
            self.write(act, result, **about)
        else:
            minute.num_left_out += 1

    def _tell_left_out(self, kind: str) -> None:
        minute = self._minutes.pop(kind, None)
        if minute is not None and minute.num_left_out:
            self.write("more_refused", kind, count=minute.num_left_out)

    def problems(self) -> list[str]:
        """Returns a list for `hearth status`: a sentence on why the log cannot be written; [] if it can."""
        return [f"audit_log {self.problem}; {self.num_dropped} acts were dropped"] if self.problem else []

    async def close(self) -> None:
        """Waits until the thread has written the acts in the queue, but for at most CLOSE_S, because the disk may hang."""
        for kind in list(self._minutes):
            self._tell_left_out(kind)
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread is None and self.problem:
            self._start_thread()
        if self._thread is None:
            if num_left := sum(entry is not None for entry in self._queue.queue):
                log.error("audit log: it has no thread that writes it; %d acts were not written", num_left)
        else:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                log.error("audit log: its disk hangs; %d acts were not written", self._queue.qsize())

    # ---- on the thread

    def _run(self) -> None:
        sink: LineFile | None = None
        while True:
            entries = [self._queue.get()]
            while len(entries) < AT_ONCE and not self._queue.empty():
                entries.append(self._queue.get_nowait())
            sink = self._write_out([entry for entry in entries if entry is not None], sink)
            if self._closing and self._queue.empty():
                return
            if self._reopen.is_set():
                self._reopen.clear()
                if sink is not None:
                    sink.close()
                sink = self._opened(self._target, None)

    def _write_out(self, entries: list[_Entry], sink: LineFile | None) -> LineFile | None:
        """Writes entries of the queue, in groups of one target each. sink: the file that is open, None for none. Returns the file
        that is open afterwards."""
        for target in dict.fromkeys(entry.target for entry in entries):
            acts = [entry.act for entry in entries if entry.target == target]
            if target in AUDIT_IN_LOG:
                for act in acts:
                    own_log.info("%s", _line(act))
                continue
            sink = self._opened(target, sink)
            if sink is None:
                self._num_not_written += len(acts)
            else:
                self._append(acts, sink)
        return sink

    def _append(self, acts: list[dict[str, Any]], sink: LineFile) -> None:
        """Writes acts to the file. If acts were dropped since the log last said so, a line with their number comes first."""
        num_dropped = self.num_dropped
        gap = []
        if num_dropped > self._num_told:
            gap = [{"time": _utc(), "act": "dropped", "count": num_dropped - self._num_told, "result": "lost"}]
        num_written = sink.write([_line(act).encode() + b"\n" for act in [*gap, *acts]])
        if gap and num_written:
            self._num_told = num_dropped
        self._num_not_written += len(acts) - max(0, num_written - len(gap))
        self._found(f"{sink.path}: {sink.problem}" if sink.problem else "")

    def _opened(self, target: str, sink: LineFile | None) -> LineFile | None:
        """Returns the open file of a target; None if the target is not a file or cannot be opened. sink: the file that is open now,
        or None; it is closed unless it is the target's."""
        if sink is not None:
            if sink.path == target:
                return sink
            sink.close()
        if not target or target in AUDIT_IN_LOG:
            self._cannot_open = False
            self._found("")
            return None
        try:
            opened = LineFile(target)
        except OSError as error:
            self._cannot_open = True
            self._found(f"{target}: {error.strerror or error}")
            return None
        if self._cannot_open:  # that the file can be opened does not mean that it can be written
            self._cannot_open = False
            self._found("")
        return opened

    def _found(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("audit_log %s; acts are dropped until it can be written", problem)
        elif self.problem and not problem:
            log.info("the audit log is written again; %d acts were dropped so far", self.num_dropped)
        self.problem = problem


def _line(act: dict[str, Any]) -> str:
    if "uid" in act:
        act = act | {"user": _user(act["uid"])}
    return json.dumps(act, default=str)


@lru_cache(maxsize=256)
def _user(uid: int) -> str:
    """Returns the name of the user with this id, "" if there is none. Called on the writing thread, because the look-up may ask a
    server."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
