"""Measures loads of a checkpoint that is split over devices: each rank is a process that reads its share, all at the same time.

`python -m benchmarks.loading --ranks 2` prints one JSON line for each division (tensor, pipeline) and for each kind of files that
the checkpoint has (plain, packed). "tensor, not shared" is a tensor division whose ranks share no reads. Before each load the files
are dropped from the page cache. Loads and raw reads of the same files (benchmarks.loading, DIRECT_SPREAD) take turns in an order
that is shuffled each round.

asked: bytes that all ranks read, as a part of the files' bytes. drive: bytes that came from the drive meanwhile, by /proc/PID/io,
as a part of the files' bytes. ratio: the time until the last rank has its share, as a part of the raw read's. first: the time until
the first rank has its share, as a part of the last one's.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import SHAPES
from benchmarks.loading import DIRECT_SPREAD, OURS, memory, one, ours, set_cache, weight_files
from engine.host.weight_decoder import weight_decoder
from loader.files.weight_files import PACKED_DIR
from loader.reading.shared_reads import SharedReads, shared_by
from loader.reading.shared_slots import stage_reads_bytes
from loader.reading.staging import SLOT_BYTES, StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint, planned_reads
from loader.shapes.model_shape import DeviceShare, Division

TENSOR, NOT_SHARED, PIPELINE = KINDS = ("tensor", "tensor, not shared", "pipeline")
EXPERTS, EXPERTS_NOT_SHARED = KINDS_OF_MIXTURES = ("tensor, two parts of experts", "tensor, two parts of experts, not shared")


def division(kind: str, num_ranks: int) -> Division:
    expert_parts = 2 if kind in KINDS_OF_MIXTURES else 1
    return Division(num_ranks, expert_parts, num_ranks if kind == PIPELINE else 1)


def kinds_of(folder: Path) -> Sequence[str]:
    """Returns the divisions that are measured of a checkpoint."""
    is_mixture = any(key in SHAPES["mixture"] for key in json.loads((folder / "config.json").read_text()) if "expert" in key)
    return (*KINDS, *KINDS_OF_MIXTURES) if is_mixture else KINDS


def io_bytes() -> int:
    """Returns the bytes that this process has had the drive read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def child(folder: Path, kind: str, rank: int, num_ranks: int, fd: int) -> None:
    """Prepares the memory of a rank's share, says so, and reads the share as soon as a line comes. Prints what it took. fd: the
    memory through which ranks share reads."""
    divided = division(kind, num_ranks)
    share, shared = DeviceShare(rank, divided), tuple[SharedReads, ...]()
    if kind in (TENSOR, EXPERTS):
        parts = divided.expert_parts
        memory_of_all = mmap.mmap(fd, stage_reads_bytes(num_ranks, parts, SLOT_BYTES))
        shared = shared_by(np.frombuffer(memory_of_all, np.uint8), rank, num_ranks, parts, SLOT_BYTES)
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=share)
        is_packed = source.is_packed
        reads = planned_reads(source, "bfloat16", StagingRing(), shares=bool(shared))
    own = [read for read in reads if read.num_readers == 1]
    for among in shared:
        own += [read for read in reads if read.num_readers == among.size][among.rank :: among.size]
    asked_bytes = sum(read.end - read.begin for read in own)
    decoder = weight_decoder("") if is_packed else Decoder()
    notes: list[str] = []
    load, _ = ours(folder, OURS, notes, share, decoder, shared)
    when_told(load, lambda: {"asked_bytes": asked_bytes, "notes": notes})


def when_told(load: Callable[[], Any], further: Callable[[], dict[str, Any]] = dict) -> None:
    """Says that this process is ready, carries out the load as soon as a line comes, and prints what it took. further: returns what
    is printed with it."""
    print("ready", flush=True)
    sys.stdin.readline()
    before_bytes, cpu_s, begin_s = io_bytes(), time.process_time(), time.monotonic()
    load()
    result = {"begin_s": begin_s, "end_s": time.monotonic(), "cpu_s": time.process_time() - cpu_s}
    print(json.dumps(result | {"drive_bytes": io_bytes() - before_bytes} | further()))


def at_once(commands: list[list[str]], fds: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Starts a process for each command, all of which call `when_told`, tells them when all are ready, and returns what they
    print. fds: descriptors that the processes inherit."""
    with ExitStack() as stack:
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": fds}
        ranks: list[Any] = [stack.enter_context(subprocess.Popen(command, **pipe)) for command in commands]
        for command, rank in zip(commands, ranks, strict=True):
            if rank.stdout.readline() != "ready\n":
                raise SystemExit(f"{' '.join(command[1:])}: ended before its load")
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        return [json.loads(rank.communicate()[0]) for rank in ranks]


def load_together(folder: Path, kind: str, num_ranks: int) -> dict[str, Any]:
    """Has all ranks read their shares at the same time, past an empty page cache. Returns seconds, those of the first rank that was
    done, and the sums of all ranks."""
    files = weight_files(folder)
    # Virtual machines hand free memory back to their host; who touches it next pays for that. Here nobody does.
    memory(sum(path.stat().st_size for path in files) * 9 // 4, huge=True, prepared=True)
    set_cache(files, warm=False)
    command = [sys.executable, "-m", "benchmarks.loading", "--checkpoint", str(folder), "--ranks", str(num_ranks), "--child"]
    fd = os.memfd_create("shared reads")
    os.ftruncate(fd, stage_reads_bytes(num_ranks, division(kind, num_ranks).expert_parts, SLOT_BYTES))
    try:
        results = at_once([[*command, f"{kind}/{rank}/{fd}"] for rank in range(num_ranks)], [fd])
    finally:
        os.close(fd)
    begin_s = min(result["begin_s"] for result in results)
    ends_s = [result["end_s"] - begin_s for result in results]
    sums = {key: sum(result[key] for result in results) for key in ("cpu_s", "asked_bytes", "drive_bytes")}
    notes = sorted({note for result in results for note in result["notes"]})
    return sums | {"seconds": max(ends_s), "first_rank_s": min(ends_s), "notes": notes}


def measure(folder: Path, rounds: int, num_ranks: int) -> list[dict[str, Any]]:
    """Returns one line for each division and kind of files."""
    kinds = kinds_of(folder)
    cases = [(folder, kind) for kind in kinds]
    packed = folder / PACKED_DIR
    if packed.is_dir():
        cases += [(_packed_alone(folder, packed), kind) for kind in kinds]
    runs: dict[Any, list[dict[str, Any]]] = {case: [] for case in cases}
    raw: dict[Path, list[dict[str, Any]]] = {own: [] for own, _ in cases}
    for number in range(rounds):
        order: list[Any] = [*cases, *raw]
        random.Random(number).shuffle(order)
        for case in order:
            if case in raw:
                raw[case].append(one(DIRECT_SPREAD, case, False, sys.executable))
                print(f"{number} raw {case.name}: {raw[case][-1]}", file=sys.stderr, flush=True)
            else:
                own, kind = case
                runs[case].append(load_together(own, kind, num_ranks))
                print(f"{number} {kind} {own.name}: {runs[case][-1]}", file=sys.stderr, flush=True)
    return [_line(own, kind, num_ranks, runs[own, kind], raw[own]) for own, kind in cases]


def _packed_alone(folder: Path, packed: Path) -> Path:
    """Returns a folder beside the packed files with a checkpoint that has no others; its files are hard links."""
    alone = folder.with_name(f"{folder.name}-packed")
    alone.mkdir(exist_ok=True)
    for path in (folder / "config.json", *packed.iterdir()):
        (alone / path.name).unlink(missing_ok=True)
        (alone / path.name).hardlink_to(path)
    return alone


def _line(folder: Path, kind: str, num_ranks: int, runs: list[dict[str, Any]], raw: list[dict[str, Any]]) -> dict[str, Any]:
    def median(of: list[dict[str, Any]], key: str) -> float:
        return statistics.median(run[key] for run in of)

    file_bytes = sum(path.stat().st_size for path in weight_files(folder))
    seconds, raw_s = median(runs, "seconds"), median(raw, "seconds")
    notes = "; ".join(sorted({note for run in runs for note in run["notes"]}))
    return {
        "benchmark": "loading shares",
        "kind": kind,
        "files": "packed" if folder.name.endswith("-packed") else "plain",
        "ranks": num_ranks,
        "rounds": len(runs),
        "gb": round(file_bytes / 1e9, 3),
        "asked": round(median(runs, "asked_bytes") / file_bytes, 4),
        "drive": round(median(runs, "drive_bytes") / file_bytes, 4),
        "seconds": round(seconds, 3),
        "raw s": round(raw_s, 3),
        "ratio": round(seconds / raw_s, 3),
        "each round": [round(run["seconds"] / other["seconds"], 2) for run, other in zip(runs, raw, strict=True)],
        "first": round(median(runs, "first_rank_s") / seconds, 3),
        "cpu s": round(median(runs, "cpu_s"), 2),
        "raw cpu s": round(median(raw, "cpu_s"), 2),
    } | ({"note": notes} if notes else {})


def main(folder: Path, rounds: int, num_ranks: int, as_child: str | None) -> None:
    """Measures, or carries out the load of one rank. as_child: the division, the number of that rank, and a
    descriptor."""
    if as_child:
        kind, rank, fd = as_child.split("/")
        child(folder, kind, int(rank), num_ranks, int(fd))
        return
    for line in measure(folder, rounds, num_ranks):
        print(json.dumps(line))
