"""A mount whose reads are slow or hang, as those of a network's disks do: a folder shown again through FUSE, whose few messages are
written by hand (linux/fuse.h). Root may mount one where /dev/fuse is there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEVICE = "/dev/fuse"
MESSAGE_BYTES = 1 << 18  # more than the kernel sends at once to who takes MOST_BYTES
MOST_BYTES = 128 << 10
FORCE, DETACH = 1, 2  # of umount2
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, BATCH_FORGET = 26, 27, 28, 29, 34, 36, 42
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)
ROOT_NODE = 1
_IN, _OUT = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
_READ = struct.Struct("=QQI")
_libc = ctypes.CDLL(None, use_errno=True)


class SlowMount:
    """Shows `source`, for reading, in the folder `at`. read_s: how long each read of a file takes. hang(): all of it stands still.
    hangs_at: a position in a file; the first read there or behind it has all of it stand still until a hang() ends. Raises OSError
    if it cannot be mounted."""

    def __init__(self, source: Path, at: Path) -> None:
        self._at, self.read_s = at, 0.0
        self.hangs_at: int | None = None
        self._goes_on, self._closed = threading.Event(), False
        self._goes_on.set()
        self._paths = {ROOT_NODE: source}
        self._nodes = {source: ROOT_NODE}
        self._device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if _libc.mount(b"slow", os.fsencode(at), b"fuse.slow", 1, options.encode()):  # 1: read only
            os.close(self._device)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(at))
        self._thread = threading.Thread(target=self._serve, name="slow mount", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def hang(self) -> Iterator[None]:
        self._goes_on.clear()
        yield
        self._goes_on.set()

    @property
    def hangs(self) -> bool:
        return not self._goes_on.is_set()

    def close(self) -> None:
        """Takes the mount away; who reads from it gets an error."""
        if self._closed:
            return
        self._closed = True
        _libc.umount2(os.fsencode(self._at), FORCE)
        _libc.umount2(os.fsencode(self._at), DETACH)
        self._goes_on.set()
        self._thread.join(30)
        os.close(self._device)

    def _serve(self) -> None:
        while not self._closed:
            try:
                message = os.read(self._device, MESSAGE_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: who had asked is gone
                    continue
                return  # unmounted
            _, kind, number, node, *_ = _IN.unpack_from(message)
            if kind in UNANSWERED:
                continue
            self._goes_on.wait()
            try:
                error_number, content = 0, self._answer(kind, node, message[_IN.size :])
            except OSError as error:
                error_number, content = error.errno or errno.EIO, b""
            with contextlib.suppress(OSError):  # who had asked is gone, or the mount
                os.write(self._device, _OUT.pack(_OUT.size + len(content), -error_number, number) + content)

    def _answer(self, kind: int, node: int, rest: bytes) -> bytes:
        if kind == INIT:
            return struct.pack("=IIIIHHIIHHI28x", 7, 31, MOST_BYTES, 0, 8, 8, MOST_BYTES, 1, 0, 0, 0)
        path = self._paths[node]
        answers: dict[int, Callable[[], bytes]] = {
            LOOKUP: lambda: self._entry(path / os.fsdecode(rest.rstrip(b"\0"))),
            GETATTR: lambda: struct.pack("=QII", 0, 0, 0) + self._attributes(path),
            OPEN: lambda: struct.pack("=QIi", 0, 0, 0),
            OPENDIR: lambda: struct.pack("=QIi", 0, 0, 0),
            READ: lambda: self._read(path, *_READ.unpack_from(rest)[1:]),
            READDIR: lambda: self._names(path, *_READ.unpack_from(rest)[1:]),
            STATFS: lambda: struct.pack("=5Q4I24x", 1 << 20, 0, 0, 1 << 10, 0, 4096, 255, 4096, 0),
            **dict.fromkeys((RELEASE, RELEASEDIR, FLUSH, ACCESS), lambda: b""),
        }
        if kind not in answers:
            raise OSError(errno.ENOSYS, "")
        return answers[kind]()

    def _node(self, path: Path) -> int:
        node = self._nodes.setdefault(path, len(self._nodes) + ROOT_NODE)
        self._paths[node] = path
        return node

    def _entry(self, path: Path) -> bytes:
        attributes = self._attributes(path)
        return struct.pack("=QQQQII", self._node(path), 0, 0, 0, 0, 0) + attributes

    def _attributes(self, path: Path) -> bytes:
        found = path.lstat()
        seconds, nanoseconds = divmod(found.st_mtime_ns, 10**9)
        times = (seconds,) * 3 + (nanoseconds,) * 3
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return struct.pack("=6Q10I", self._node(path), found.st_size, found.st_blocks, *times, *owner)

    def _read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        time.sleep(self.read_s)
        if self.hangs_at is not None and offset >= self.hangs_at:
            self.hangs_at = None
            self._goes_on.clear()
            self._goes_on.wait()
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def _names(self, path: Path, offset: int, num_bytes: int) -> bytes:
        content = b""
        for at, child in enumerate(sorted(path.iterdir())[offset:], offset + 1):
            name = os.fsencode(child.name)
            entry = struct.pack("=QQII", self._node(child), at, len(name), stat.S_IFMT(child.lstat().st_mode) >> 12) + name
            entry += b"\0" * (-len(entry) % 8)
            if len(content) + len(entry) > num_bytes:
                break
            content += entry
        return content
