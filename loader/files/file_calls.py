"""Makes file system calls whose caller can stop waiting for them.

A call to a mount whose server is gone may not return for as long as the mount hangs, and no signal ends it. So a load that is
cancelled waits only a moment for such a call, and then abandons it. The thread that made the call stays blocked in it; if the call
returns, the thread ends without touching any memory of the load.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from loader.threads import Thread

log = logging.getLogger("loader")

T = TypeVar("T")

LOOK_EVERY_S = 0.25  # how often a load that waits for a call looks whether it is cancelled
LEAVE_AFTER_S = 1.0  # how long a cancelled load waits for a call to return

# f_type of statfs(2), of file systems on drives of this machine and in its memory: a drive's driver ends a read in bounded time.
_LOCAL = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0x2FC12FC1,  # ZFS
    0xF2F52010,  # F2FS
    0xCA451A4E,  # bcachefs
    0x01021994,  # tmpfs
    0x858458F6,  # ramfs
    0x958458F6,  # hugetlbfs
    0x794C7630,  # overlayfs
    0x73717368,  # SquashFS
    0xE0F5E1E2,  # EROFS
}
_STATFS_BYTES = 256
_libc = ctypes.CDLL(None, use_errno=True)


class ReadCancelled(Exception):
    """Raised when a load ends early because its caller has cancelled it."""


class LeftBehind(Exception):
    """Raised in a reader thread whose file system call returned only after the load had stopped waiting for it. The thread must end
    then, because the memory that it was to fill may be gone."""


def is_local(fd: int) -> bool:
    """Returns whether an open file is on a drive or in the memory of this machine. The result is False for network mounts, FUSE,
    and file systems that this module does not know."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, buffer):
        return False
    (kind,) = struct.unpack_from("@l", buffer)
    return kind & 0xFFFFFFFF in _LOCAL


class CallUnderWay:
    """A context manager around each file system call of one thread, by which another thread may abandon a call that has not
    returned (`leave`). If the call was abandoned, leaving the context raises LeftBehind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_under_way = self._is_left = False

    def __enter__(self) -> None:
        with self._lock:
            self._is_under_way = True

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._is_under_way = False
            is_left = self._is_left
        if is_left:
            raise LeftBehind

    def leave(self) -> bool:
        """Abandons the call that is in progress: its thread raises LeftBehind once the call returns. Returns whether a call has
        been abandoned; False: none was in progress."""
        with self._lock:
            self._is_left = self._is_left or self._is_under_way
            return self._is_left


class FileCalls:
    """A thread that calls the file system for a load, so that a cancelled load does not wait long for a call that does not return.
    A context manager; on exit the thread closes the files in `opened`, and ends.

    name: the model's name, for the log. cancelled: returns whether the load is cancelled. opened: a stack that closes the files
    that the thread opens; only this thread uses it."""

    def __init__(self, name: str, cancelled: Callable[[], bool]) -> None:
        self._name, self._cancelled = name, cancelled
        self.opened = ExitStack()
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"files of {name}")

    def __enter__(self) -> FileCalls:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._work.put((self.opened.close, Future()))
        self._work.put(None)
        self._thread.join(LEAVE_AFTER_S)
        if self._thread.is_alive():
            log.warning("%s: the file system does not answer; what is open there is closed once it does", self._name)

    def run(self, work: Callable[[], T]) -> T:
        """Calls `work` in this object's thread; returns what it returns and raises what it raises. If the load is cancelled and
        `work` does not end within LEAVE_AFTER_S seconds, raises ReadCancelled; the thread goes on with `work`. Raises MemoryError
        if the thread has ended for lack of memory."""
        future: Future[T] = Future()
        self._work.put((work, future))
        while not wait([future], LOOK_EVERY_S).done:
            if self._cancelled() and not wait([future], LEAVE_AFTER_S).done:
                raise ReadCancelled(f"{self._name}: cancelled while the file system did not answer")
            if not self._thread.is_alive() and not future.done():
                raise MemoryError(f"{self._name}: the thread that calls the file system has ended")
        return future.result()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # raised again by `run`
                future.set_exception(error)  # if there is no memory for that, the thread ends, which `run` sees
