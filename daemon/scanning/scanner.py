"""The daemon's end of the scanning process: starts it when needed, and ends it when it is idle or does not answer."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from daemon.process.started import started
from daemon.scanning.messages import Finished, Found, FromScanner, Looking, Same, Scan
from engine.host.child_process import child_environment, end_before_daemon, malloc_tunables
from engine.protocol import FrameReader, encode
from loader.models.adapter import Adapter
from loader.models.catalog import Checkpoint, Seen, merged

log = logging.getLogger("hearthd.models")
ANSWER_LIMIT_S = 10.0  # the limit without a sign of life while it examines a path
NEXT_LIMIT_S = 2.0  # the limit after another path of the same scan did not answer: both are probably on one file system
MAX_SILENT = 64  # the most paths of one scan that may fail to answer
IDLE_S = 15.0
ENOUGH_S = 2.0  # how long a killed process may take to end; one that waits for a file system may take any time
LOOK_AGAIN_S, LOOK_AGAIN_AT_MOST_S = 60.0, 3600.0  # pauses before a path that did not answer is examined again; doubled each time


@dataclass(slots=True)
class _Silent:
    """A path in the models folder whose examination hung or killed the scanning process. why: the reason, as the predicate of a
    sentence about the path. until_s: when it may be examined again, on the monotonic clock. pause_s: the seconds between the failed
    examination and that time. process: the process that waited for the path, and may still wait."""

    why: str
    until_s: float
    pause_s: float
    process: _Process


class NoAnswer(Exception):
    """Raised when the scanning process gave no sign of life for too long, or died. path: the path that it was examining. why: the
    reason, as the predicate of a sentence about the path."""

    def __init__(self, process: _Process, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.process, self.path, self.why = process, path, why


class ModelScanner:
    """Scans the models folder in another process, with the same results as loader.models.catalog.scan. If a path hangs that process
    or makes it die, a model there is reported as incomplete, or as the last scan found it, and the path is examined again later."""

    def __init__(self, answer_limit_s: float = ANSWER_LIMIT_S, look_again_s: float = LOOK_AGAIN_S) -> None:
        self._answer_limit_s, self._look_again_s = answer_limit_s, look_again_s
        self._lock = asyncio.Lock()
        self._process: _Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._silent: dict[str, _Silent] = {}
        # the models folder that did not answer at all, and the process that waited for it
        self._stuck: tuple[str, _Process] | None = None
        self._signatures: dict[str, str] = {}
        self._warned: list[str] = []  # the last scan's warnings, which are not repeated
        self._closed = False
        self.is_model = False  # whether the models folder is a model's own folder
        self.looked_into: Callable[[list[str]], None] = lambda folders: None  # called after each scan with the folders to watch

    @property
    def look_again_in_s(self) -> float | None:
        """Returns the seconds until a path that did not answer in an earlier scan is to be examined again; None if there is no such
        path."""
        if not self._silent:
            return None
        return max(0.0, min(one.until_s for one in self._silent.values()) - time.monotonic())

    def signature_of(self, path: str) -> str:
        """Returns the signature that a file had in the last scan that could examine it; "" if there was no such scan. The signature
        is a text that changes whenever the content of the file may have changed. path: one of the `files` of a scan."""
        return self._signatures.get(path, "")

    async def scan(
        self,
        models_dir: str,
        previous: Mapping[str, Checkpoint],
        named: Mapping[str, str] | None = None,
        files: Iterable[str] = (),
    ) -> dict[str, Checkpoint]:
        """Scans the models folder and returns the models by name, sorted by name. models_dir: the models folder; "": only the
        adapters in `named` are examined. previous: the last result; its objects are returned again for folders that have not
        changed. named: name -> folder of LoRA adapters elsewhere. files: further files on which models depend; their signatures are
        read, for `signature_of`. Raises OSError if models_dir cannot be read, if it or more than MAX_SILENT paths do not answer, or
        if the daemon is stopping."""
        named, files = named or {}, list(files)
        async with self._lock:
            if self._stuck is not None and self._stuck[0] == models_dir and self._stuck[1].is_running:
                # another process would hang there, too
                raise OSError(errno.ETIMEDOUT, "still does not answer", models_dir)
            limit_s = self._answer_limit_s
            due = {path for path in self._due() if models_dir or path in named.values()}
            for _ in range(MAX_SILENT):
                if self._closed:
                    raise _stopping(models_dir)
                silent = {path: one.why for path, one in self._silent.items() if path not in due}
                try:
                    found = await self._scan_once(models_dir, previous, named, silent, files, limit_s)
                except NoAnswer as failed:
                    await self._end()
                    if self._closed:  # the process was ended by `close`, and nothing is wrong with the folder
                        raise _stopping(models_dir) from None
                    if failed.path == models_dir:
                        self._stuck = models_dir, failed.process
                        raise OSError(errno.ETIMEDOUT, failed.why, models_dir) from None
                    due.discard(failed.path)
                    self._note(failed)
                    limit_s = min(limit_s, NEXT_LIMIT_S)
                    continue
                for path in due:
                    log.info("%s answers again", path)
                    del self._silent[path]
                return found
            raise OSError(errno.ETIMEDOUT, f"more than {MAX_SILENT} of its folders do not answer", models_dir)

    @property
    def is_closed(self) -> bool:
        """Returns whether the daemon is stopping, so that nothing is scanned any more."""
        return self._closed

    async def close(self) -> None:
        self._closed = True
        await self._end()

    def _due(self) -> set[str]:
        """Returns the paths that did not answer and may be examined again now. Paths on which an earlier process still hangs are
        excluded, because another process would hang there, too."""
        now = time.monotonic()
        return {path for path, one in self._silent.items() if now >= one.until_s and not one.process.is_running}

    def _note(self, failed: NoAnswer) -> None:
        before = self._silent.get(failed.path)
        pause_s = self._look_again_s if before is None else min(2 * before.pause_s, LOOK_AGAIN_AT_MOST_S)
        self._silent[failed.path] = _Silent(failed.why, time.monotonic() + pause_s, pause_s, failed.process)
        log.warning("%s %s; it is looked at again in %.0f s", failed.path, failed.why, pause_s)

    async def _scan_once(
        self,
        models_dir: str,
        previous: Mapping[str, Checkpoint],
        named: Mapping[str, str],
        silent: Mapping[str, str],
        files: list[str],
        limit_s: float,
    ) -> dict[str, Checkpoint]:
        process = self._process
        if process is None or not process.takes_scans:
            process = self._process = await _Process.start()
            if self._closed:  # closed while the process was being started
                await self._end()
                raise _stopping(models_dir)
        if self._idle is not None:
            self._idle.cancel()
        known = {name: (one.path, one.signature) for name, one in previous.items() if one.signature}
        seen, finished = await process.scan(Scan(models_dir, known, dict(silent), dict(named), files), previous, limit_s)
        if finished.is_last:
            await self._end()
        else:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, process.kill)
        for line in finished.warnings:
            if line not in self._warned:
                log.warning("%s", line)
        if finished.error is not None:
            raise OSError(*finished.error, models_dir)
        self._signatures |= finished.signatures
        if models_dir:
            self._warned, self.is_model = finished.warnings, finished.is_model
            self.looked_into(finished.folders)
            return merged(_with_known(seen, silent, previous, named))
        return merged(seen)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
        if process is not None:
            process.kill()
            await process.wait(ENOUGH_S)


def _stopping(models_dir: str) -> OSError:
    return OSError(errno.ECANCELED, "hearthd is stopping", models_dir)


def _with_known(
    found: Iterable[Seen], silent: Mapping[str, str], previous: Mapping[str, Checkpoint], named: Mapping[str, str]
) -> Iterable[Seen]:
    """Yields the models that a scan has found, and those of the last result on paths that do not answer, because these models may
    be running or kept in memory. silent: path -> why it was skipped. named: name -> folder of an adapter."""
    kept = [one for one in previous.values() if one.complete and any(_is_below(one.path, path) for path in silent)]
    for one in kept:
        yield Seen(one, is_named=named.get(one.name) == one.path)
    for seen in found:
        is_silent = seen.checkpoint.path in silent
        if not is_silent or not any(_is_below(one.path, seen.checkpoint.path) for one in kept):
            yield seen


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


class _Process(asyncio.Protocol):
    """The daemon's connection to one scanning process: sends it scans, collects the answers, and ends it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._reader = FrameReader(FromScanner)
        self._exited: asyncio.Future[None] = loop.create_future()
        self._transport: Any = None  # uvloop's transports are not subclasses of asyncio's
        self._answer: asyncio.Future[tuple[list[Seen], Finished]] | None = None
        self._previous: Mapping[str, Checkpoint] = {}
        self._seen: list[Seen] = []
        self._adapters: dict[str, Adapter] = {}  # by digest
        self._path = ""
        self._heard_s = 0.0
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(cls) -> _Process:
        """Starts a scanning process and returns it, connected. Raises OSError if that fails."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                # in a thread: fork and exec of a large parent may take longer than the loop may be held
                process = await started(_end, _spawn, theirs.fileno())
            made = cls(process)
            await asyncio.get_running_loop().create_unix_connection(lambda: made, sock=ours)
        except BaseException:
            ours.close()
            raise
        return made

    @property
    def is_running(self) -> bool:
        return not self._exited.done()

    @property
    def takes_scans(self) -> bool:
        return self.is_running and self._transport is not None and not self._transport.is_closing()

    async def scan(self, request: Scan, previous: Mapping[str, Checkpoint], limit_s: float) -> tuple[list[Seen], Finished]:
        """Sends a request, and returns the models that were found and the message that ended the answer. previous: the last result,
        by name. limit_s: the longest time without a sign of life of the process. Raises NoAnswer if it takes longer or the process
        dies."""
        loop = asyncio.get_running_loop()
        self._answer, self._previous, self._seen, self._path = loop.create_future(), previous, [], request.models_dir
        self._adapters = {one.adapter.digest: one.adapter for one in previous.values() if one.adapter is not None}
        self._transport.write(encode(request))
        self._heard_s = loop.time()
        timer = loop.create_task(self._watch(limit_s))
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.kill()  # it goes on, and its answer would be taken for that of the next scan
            raise
        finally:
            timer.cancel()
            self._answer = None

    async def _watch(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.05, self._heard_s + limit_s - loop.time()))
            if loop.time() - self._heard_s < limit_s:
                continue
            # if the loop was delayed or the machine slept, there may be messages to read first
            heard_s = self._heard_s
            await asyncio.sleep(0.2)
            if self._heard_s == heard_s:
                self._fail(f"does not answer: no sign of it for {limit_s:g} s")
                return

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswer(self, self._path, why))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        for message in self._reader.feed(data):
            if isinstance(message, Looking):
                self._path = message.path
            elif isinstance(message, Found):
                self._seen.append(Seen(self._shared(message.checkpoint), message.in_cache, message.is_named))
            elif isinstance(message, Same):
                self._seen.append(Seen(self._previous[message.name], message.in_cache, message.is_named))
            elif self._answer is not None and not self._answer.done():
                self._answer.set_result((self._seen, message))

    def _shared(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint. If another known adapter has the same content as the checkpoint's adapter, the checkpoint gets
        that adapter's object, because separate objects for a thousand adapters take 200 MB."""
        if checkpoint.adapter is not None:
            checkpoint.adapter = self._adapters.setdefault(checkpoint.adapter.digest, checkpoint.adapter)
        return checkpoint

    def connection_lost(self, exc: Exception | None) -> None:
        # the exit code comes with the end of the process, which may be seen later than the socket's end
        if self._exited.done():
            self._fail_ended()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()  # returns at once: it has ended
        self._exited.set_result(None)
        if self._transport is None or self._transport.is_closing():
            self._fail_ended()

    def _fail_ended(self) -> None:
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._fail(f"cannot be read: the process that reads it ended {how}")

    def kill(self) -> None:
        """Kills the process, even in the middle of a scan. Returns before it has ended."""
        if not self._exited.done():
            self._process.kill()
        if self._transport is not None:
            self._transport.close()

    async def wait(self, limit_s: float) -> None:
        """Waits until the process has ended, at most limit_s seconds."""
        await asyncio.wait([self._exited], timeout=limit_s)


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    """Starts the scanning process. fd: its socket to the daemon. Its malloc has a fixed mmap threshold, so that the blocks of
    megabytes for long headers and lists return to the kernel when they are freed; by default glibc soon places such blocks on its
    heap, which cannot shrink while small blocks remain behind them."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "daemon.scanning", str(fd)],
        cwd="/",
        env=child_environment(GLIBC_TUNABLES=malloc_tunables(mmap_threshold=64 << 10, trim_threshold=64 << 10)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
    )
    end_before_daemon(process.pid)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
