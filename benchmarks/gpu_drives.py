"""Folders for checkpoints on a drive, never on a tmpfs, where no load is cold."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = "HEARTH_GPU_CHECKPOINTS"  # a folder: parts of a run find each other's checkpoints there (gpu_checkpoints.py)
PREFIX = ".hearth-gpu-"
SPARE_BYTES = 2 << 30  # of the drive, for compiled kernels and logs
IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files are not on a drive


def file_system(folder: pathlib.Path) -> str:
    """Returns the kind of file system that a folder is on, as /proc/mounts names it."""
    place, kinds = folder.resolve(), dict[str, str]()
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        kinds[mount.encode().decode("unicode_escape")] = kind  # a later mount hides an earlier one
    return next(kinds[str(each)] for each in (place, *place.parents) if str(each) in kinds)


def drives() -> Iterator[tuple[pathlib.Path, int]]:
    """Yields folders on drives, and how many bytes are free there."""
    for place in (pathlib.Path(tempfile.gettempdir()), ROOT, pathlib.Path("/var/tmp")):
        if file_system(place) not in IN_MEMORY:
            yield place, free_bytes(place)


def free_bytes(place: pathlib.Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@contextmanager
def checkpoints_folder(num_bytes: int) -> Iterator[pathlib.Path]:
    """Yields a new folder on a drive with room for num_bytes, because what is read from memory is no cold load. Within a run of
    several parts it lies in the folder they share, whose owner deletes it. Raises RuntimeError if there is none."""
    if shared := os.environ.get(SHARED):
        yield pathlib.Path(tempfile.mkdtemp(prefix="part-", dir=shared))
        return
    told = []
    for place, free in drives():
        if free > num_bytes:
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as name:
                yield pathlib.Path(name)
            return
        told.append(f"{place} ({free >> 20} MiB free)")
    raise RuntimeError(f"no drive has room for {num_bytes >> 20} MiB of checkpoints: {', '.join(told) or 'there is none'}")


def make_room(shared: pathlib.Path, num_bytes: int, kept: Collection[pathlib.Path]) -> None:
    """Deletes all but `kept` from the folder that parts share if there is no room for num_bytes more and SPARE_BYTES: checkpoints
    that this part does not need, and what ended parts have left. Raises RuntimeError if there is no room even then."""
    if free_bytes(shared) > num_bytes + SPARE_BYTES:
        return
    for path in shared.iterdir():
        if path not in kept:
            shutil.rmtree(path)
    if (free := free_bytes(shared)) <= num_bytes:
        raise RuntimeError(f"no room for {num_bytes >> 20} MiB of checkpoints: {shared} ({free >> 20} MiB free)")
