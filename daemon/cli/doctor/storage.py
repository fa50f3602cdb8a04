"""Checks the models folder and the models in it, the speed of its drive, and the free space of the state folder."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from config.units import format_bytes
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from loader.files.direct_io import open_direct
from loader.models import catalog

SLOW_BYTES_PER_S = 1e9
MIN_STATE_BYTES = 16 << 20  # what is written to the state folder is far smaller
MIN_READ_BYTES = 64 << 20  # a measurement of fewer bytes is meaningless
MAX_READ_BYTES = 1 << 30
MAX_READ_S = 1.0
BLOCK_BYTES = 4 << 20
NUM_READERS = 4


@dataclass(slots=True, frozen=True)
class Reading:
    """A measurement of how fast a drive reads past the page cache: num_bytes in duration_s seconds. problem: why nothing could be
    measured, "" if something was."""

    num_bytes: int = 0
    duration_s: float = 0.0
    problem: str = ""


def find_state_folder(folder: str, not_saved: str) -> Finding:
    """Returns the finding on the folder in which pins and the like are saved. not_saved: why the running daemon cannot save them;
    "" if it can, or if no daemon runs."""
    there = Path(folder)
    while not there.exists() and there != there.parent:
        there = there.parent
    status = os.statvfs(there)
    return state_folder(folder, status.f_bavail * status.f_frsize, not_saved)


def state_folder(folder: str, free_bytes: int, not_saved: str) -> Finding:
    """Returns the finding on the state folder. free_bytes: the bytes of its file system that this user may still fill. not_saved:
    why the running daemon cannot save pins and the like there; "" if it can, or if no daemon runs."""
    if not_saved:
        change = "free its disk or correct its rights; hearthd tries again by itself"
        return Finding("state folder", FAIL, f"not saved, so a restart would forget pins and the like: {not_saved}", change)
    room = f"{folder}, {format_bytes(free_bytes)} free"
    if free_bytes < MIN_STATE_BYTES:
        return Finding(
            "state folder", WARN, f"{room}: pins and the like may be lost at a restart", "free its disk, or set state_dir"
        )
    return Finding("state folder", OK, room)


def find_storage(folder: str) -> list[Finding]:
    if not folder:
        return [Finding("models", WARN, "no models folder is configured", "set models_dir, or start hearthd with --models DIR")]
    try:
        found = catalog.scan(folder)
    except OSError as error:
        return [Finding("models", FAIL, f"{folder}: {error.strerror}", "make the folder, or let this user and hearthd's read it")]
    files = [(file.size_bytes, f"{one.path}/{file.name}") for one in found.values() for file in one.files]
    reading = read_direct(max(files)[1]) if files else Reading(problem="no model to read")
    return [*models(folder, list(found.values())), drive(is_rotational(folder), reading)]


def models(folder: str, found: Sequence[catalog.Checkpoint]) -> list[Finding]:
    """Returns the findings on the models folder: one on the number of complete models, and one for each model that is incomplete or
    wrong. found: the models in the folder."""
    if not found:
        return [Finding("models", WARN, f"{folder} holds none", "hearth pull ORG/NAME, or copy a checkpoint there")]
    whole = [one for one in found if one.complete]
    move = "or move it away"
    findings = [Finding("models", OK, f"{len(whole)} of {len(found)} in {folder} are complete")]
    for one in found:
        if one.error:
            findings.append(Finding("models", WARN, f"{one.name}: {one.error}", f"correct or replace its files, {move}"))
        elif not one.complete:
            findings.append(Finding("models", WARN, f"{one.name} is incomplete: {one.reason}", f"finish copying it, {move}"))
    return findings


def drive(rotational: bool | None, reading: Reading) -> Finding:
    """Returns the finding on the drive that holds the models. rotational: whether the kernel reports it as rotating, None if it
    reports nothing. reading: the measured speed."""
    kind = {None: "a drive of unknown kind", True: "a drive that calls itself rotating", False: "a solid-state drive"}[rotational]
    change = "put the models on NVMe; host_tier_bytes spares reads"
    if reading.problem or reading.num_bytes < MIN_READ_BYTES:
        why = reading.problem or f"the largest file has {reading.num_bytes >> 20} MiB"
        return Finding("drive", WARN if rotational else OK, f"{kind}, speed unknown: {why}", change if rotational else "")
    # Virtual drives report that they rotate, so the measured speed decides.
    speed = reading.num_bytes / reading.duration_s
    found = f"{speed / 1e9:.2f} GB/s past the page cache"
    if speed < SLOW_BYTES_PER_S:
        return Finding("drive", WARN, f"{kind}, {found}: cold models come at that speed", change)
    return Finding("drive", OK, found)


def is_rotational(folder: str, sysfs: str = "/sys/dev/block") -> bool | None:
    device = os.stat(folder).st_dev
    place = Path(os.path.realpath(f"{sysfs}/{os.major(device)}:{os.minor(device)}"))
    for queue in (place / "queue", place.parent / "queue"):  # the first is for a drive, the second for the drive of a partition
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


def read_direct(path: str) -> Reading:
    """Measures how fast a file is read past the page cache: reads whole blocks of it for about MAX_READ_S seconds, at most
    MAX_READ_BYTES. An error is returned as the Reading's `problem`."""
    fd = -1
    try:
        plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fd = open_direct(plain)
            num_bytes = min(os.fstat(fd).st_size, MAX_READ_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        finally:
            os.close(plain)
        begin = time.perf_counter()
        with ThreadPoolExecutor(NUM_READERS) as pool:
            done = sum(pool.map(lambda index: _read_every(fd, index, num_bytes, begin + MAX_READ_S), range(NUM_READERS)))
        return Reading(done, time.perf_counter() - begin)
    except OSError as error:
        return Reading(problem=f"{os.path.basename(path)}: {error.strerror}")
    finally:
        if fd >= 0:
            os.close(fd)


def _read_every(fd: int, first: int, end: int, deadline: float) -> int:
    """Reads every NUM_READERS-th block of a file, from block `first` on, until offset `end` (bytes) or the deadline
    (time.perf_counter()). Returns the number of bytes read."""
    done = 0
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as direct I/O requires
        for offset in range(first * BLOCK_BYTES, end, NUM_READERS * BLOCK_BYTES):
            if time.perf_counter() > deadline:
                break
            done += os.preadv(fd, [buffer], offset)
    return done
