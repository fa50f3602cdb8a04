"""Downloads a model's files into the folder `.partial-ORG--NAME` of the models folder. The caller renames it to the model's name
once it is complete, so that the catalog sees all of a model or nothing.

A file is named `NAME.incomplete` until its digest matches the hub's, and an interrupted download of it is continued at its end.
Files that the model's folder already has from the pull of another commit are linked, not fetched.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from daemon.cli.client import CommandError
from daemon.cli.pull import receipt
from daemon.cli.pull.plan import Repo, RepoFile

if TYPE_CHECKING:
    from daemon.cli.pull.hub import Hub

NUM_STREAMS = 4  # several, because the hub limits the rate of one connection
INCOMPLETE = ".incomplete"
READ_BYTES = 4 << 20

OnBytes = Callable[[int], None]  # takes the number of bytes that arrived; below 0: bytes that have to be fetched again


class Stopped(Exception):
    """Raised inside a download because another file failed or the user stopped the command."""


def partial_folder(models_dir: Path, name: str) -> Path:
    return models_dir / f".partial-{name.replace('/', '--')}"


def missing_bytes(partial: Path, target: Path, files: list[RepoFile]) -> int:
    """Returns how many bytes of `files` still have to be fetched. A file that is complete in `partial` (the folder being filled) or
    in `target` (the folder of an earlier pull) counts as 0, and a partly fetched file counts with the bytes that it lacks."""
    total = 0
    for file in files:
        if not (_is_there(partial, file) or _is_there(target, file)):
            total += file.size_bytes - _incomplete_bytes(partial, file)
    return total


def download(hub: Hub, repo: Repo, files: list[RepoFile], partial: Path, target: Path, on_bytes: OnBytes) -> None:
    """Fetches files of a commit into the folder `partial`. target: the folder of an earlier pull; files that it already has are
    linked. on_bytes: called with the number of bytes that have arrived, below 0 for bytes that must be fetched again. Raises
    CommandError if a download fails or its checksum is wrong, and OSError if a file cannot be written. The next pull goes on with
    what was fetched."""
    _drop_others(partial, files)
    receipt.write(partial, repo, files)
    wanted = []
    for file in files:
        (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
        if not _is_there(partial, file) and not _linked(partial, target, file):
            wanted.append(file)
    stop = threading.Event()
    with ThreadPoolExecutor(NUM_STREAMS, "pull") as pool:
        futures = [pool.submit(_fetch, hub, repo, file, partial, on_bytes, stop) for file in wanted]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    for future in done:
        error = future.exception()
        if error is not None and not isinstance(error, Stopped):
            raise error


def _is_there(folder: Path, file: RepoFile) -> bool:
    known = receipt.read(folder)
    return known is not None and known.files.get(file.name) == (file.size_bytes, file.digest) and known.has(folder, file.name)


def _incomplete_bytes(partial: Path, file: RepoFile) -> int:
    known = receipt.read(partial)
    if known is None or known.files.get(file.name) != (file.size_bytes, file.digest):
        return 0
    try:
        return min((partial / (file.name + INCOMPLETE)).stat().st_size, file.size_bytes)
    except OSError:
        return 0


def _drop_others(partial: Path, files: list[RepoFile]) -> None:
    """Deletes from `partial` the files that do not belong to `files`: those that an interrupted pull of another commit has left."""
    keep = {receipt.NAME}
    for file in files:
        if _is_there(partial, file):
            keep.add(file.name)
        elif _incomplete_bytes(partial, file):
            keep.add(file.name + INCOMPLETE)
    for path in sorted(partial.rglob("*"), reverse=True):  # the content of a folder comes before the folder itself
        if path.is_dir():
            with suppress(OSError):  # the folder is not empty
                path.rmdir()
        elif str(path.relative_to(partial)) not in keep:
            path.unlink()


def _linked(partial: Path, target: Path, file: RepoFile) -> bool:
    if not _is_there(target, file):
        return False
    try:
        os.link(target / file.name, partial / file.name)
    except OSError:
        return False  # the file system has no links, so the file is fetched
    return True


def _fetch(hub: Hub, repo: Repo, file: RepoFile, partial: Path, on_bytes: OnBytes, stop: threading.Event) -> None:
    path = partial / (file.name + INCOMPLETE)
    with open(path, "a+b") as raw:
        sink = _Sink(raw, file, on_bytes, stop)
        begin = sink.read_what_is_there()
        if begin < file.size_bytes:
            hub.fetch(repo, file, cast(BinaryIO, sink), begin)
        if sink.digest() != file.digest or raw.tell() != file.size_bytes:
            path.unlink()
            message = f"{repo.name}: {file.name} is not what the hub's checksum says, and was removed; run the same command again"
            raise CommandError(1, {"code": "checksum", "message": message, "details": {"file": file.name}})
        raw.flush()
        os.fsync(raw.fileno())
    path.rename(partial / file.name)


class _Sink:
    """The file that a download is written to, as an object with the methods that `http_get` needs. While it is written, it computes
    the digest of its content and reports progress. It raises Stopped once the download is to be stopped."""

    def __init__(self, raw: BinaryIO, file: RepoFile, on_bytes: OnBytes, stop: threading.Event) -> None:
        self._raw, self._file, self._on_bytes, self._stop = raw, file, on_bytes, stop
        self._hash = self._new_hash()

    def read_what_is_there(self) -> int:
        """Reads the part of the file that an earlier pull has fetched, adds it to the digest, and returns its size in bytes, which
        is the offset from which to fetch. If that part is longer than the whole file, it is deleted, and the result is 0."""
        if self._raw.seek(0, os.SEEK_END) > self._file.size_bytes:
            self._raw.truncate(0)
        self._raw.seek(0)
        while block := self._raw.read(READ_BYTES):
            self._check()
            self._hash.update(block)
        return self._raw.tell()

    def digest(self) -> str:
        return f"{self._file.digest.partition(':')[0]}:{self._hash.hexdigest()}"

    def write(self, data: bytes) -> int:
        self._check()
        self._raw.write(data)
        self._hash.update(data)
        self._on_bytes(len(data))
        return len(data)

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int) -> int:
        return self._raw.seek(offset)

    def truncate(self) -> None:
        """Empties the file and resets its digest. `http_get` calls this, after seek(0), if the hub ignores the requested offset and
        sends the whole file. Raises OSError if the position is not the start."""
        begin = self._raw.tell()
        if begin:
            raise OSError(f"{self._file.name}: to be truncated at {begin}, not at its start")
        num_bytes = self._raw.seek(0, os.SEEK_END)
        self._raw.truncate(0)
        self._raw.seek(0)  # truncating does not move the position, from which tell() counts buffered bytes
        self._hash = self._new_hash()
        self._on_bytes(-num_bytes)

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _new_hash(self) -> Any:
        if self._file.digest.startswith("sha256:"):
            return hashlib.sha256()
        made = hashlib.sha1(usedforsecurity=False)
        made.update(f"blob {self._file.size_bytes}\0".encode())
        return made
