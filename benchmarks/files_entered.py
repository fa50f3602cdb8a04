"""Counts the files that a warm streamed chat enters in all processes, and the folders that a load passes through, by tracing.

usage: python -m benchmarks.files_entered [--chats 5] [--list]. A file counts if every one of the chats enters it, so that timers do
not.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import make
from benchmarks.run import machine, table
from benchmarks.server import CACHE, ROOT, Server

LIMIT_S = 60.0  # for the processes to see a phase begin, or to write what they have recorded
POLLED_S = 0.01
ACCOUNTS_S = 0.05  # for a request's accounts, which are closed after its last byte
SINK = "loader/reading/sinks.py"  # stores what was read in its place
MODEL = "feather"

Chain = tuple[str, ...]


class Tracer:
    """Has the processes of a Server record, phase by phase. folder: where they write to."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._phase = folder, 0
        (folder / "phase").write_bytes(b"\0")
        os.environ["HEARTHD_TRACE"] = str(folder)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = str(ROOT / "benchmarks" / "call_traces") + (os.pathsep + before if before else "")

    @contextmanager
    def recording(self) -> Iterator[set[Chain]]:
        """A context in which calls are recorded. The set is filled at its end. Raises TimeoutError if a process does not do its
        part within LIMIT_S."""
        found: set[Chain] = set()
        self._phase += 1
        self._write(self._phase)
        self._wait_for("seen", "process")
        yield found
        time.sleep(ACCOUNTS_S)
        self._write(0)
        self._wait_for("json", "seen")
        for path in self._folder.glob(f"{self._phase}-*.json"):
            found.update(tuple(chain) for chain in json.loads(path.read_text()))

    def _wait_for(self, kind: str, after: str) -> None:
        """Waits until every process that runs, and that has written its file of the kind `after`, has written that of this kind."""
        deadline_s = time.monotonic() + LIMIT_S
        while lacking := sorted(filter(_runs, self._signed(after) - self._signed(kind))):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"phase {self._phase}: processes {lacking} have written no file {kind} within {LIMIT_S:g} s")
            time.sleep(POLLED_S)

    def _signed(self, kind: str) -> set[str]:
        """Returns the ids of the processes that have written a file of this kind, for this phase where there is one for each."""
        found = self._folder.glob(f"*.{kind}" if kind == "process" else f"{self._phase}-*.{kind}")
        return {path.stem.rpartition("-")[2] for path in found}

    def _write(self, phase: int) -> None:
        with (self._folder / "phase").open("r+b") as file:
            file.write(bytes([phase]))


def _runs(pid: str) -> bool:
    """Returns whether a process has not ended."""
    try:
        state = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def chat(url: str, model: str, number: int) -> None:
    """Streams one chat to its end."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": f"Number {number}"}]}
    body |= {"stream": True, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.read().rstrip().endswith(b"[DONE]")


def times_in_a_row(chain: Chain) -> int:
    """Returns how often the most frequent file occurs in a chain of calls."""
    return max(chain.count(name) for name in chain)


def folders_of(chain: Chain) -> list[str]:
    """Returns the folders that a chain passes through, without repetitions next to each other."""
    found: list[str] = []
    for name in chain:
        folder = str(pathlib.Path(name).parent)
        if not found or found[-1] != folder:
            found.append(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.files_entered", description=__doc__)
    parser.add_argument("--chats", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="print the files, and the longest chain of a load")
    default = CACHE / "checkpoints" / MODEL
    parser.add_argument("--checkpoint", type=pathlib.Path, default=default, help=f"default: {MODEL}, made if it is missing")
    parser.add_argument("--cache-dir", type=pathlib.Path, help="has compiled kernels; default: the checkout's, after a compilation")
    options = parser.parse_args()
    models, model = options.checkpoint.parent, options.checkpoint.name
    if options.checkpoint == default:
        make(models, MODEL)
    with tempfile.TemporaryDirectory(prefix="hearth-trace-") as folder:
        tracer = Tracer(pathlib.Path(folder))
        with Server(models, ["cpu=2GiB"], cache_dir=options.cache_dir) as server:
            with tracer.recording() as load:
                server.text("load", model)
            for number in range(3):
                chat(server.url, model, number)
            chats: list[set[Chain]] = []
            for number in range(options.chats):
                with tracer.recording() as chains:
                    chat(server.url, model, 10 + number)
                chats.append(chains)
    files = sorted(set.intersection(*({chain[-1] for chain in chains} for chains in chats)))
    common = set.intersection(*chats)
    again = max(common, key=times_in_a_row)
    weights = max((folders_of(chain) for chain in load if chain[-1] == SINK), key=len)
    line = {
        "benchmark": "files_entered",
        **machine(),
        "files": len(files),
        "times_in_a_row": times_in_a_row(again),
        "folder_changes_of_a_weight": len(weights) - 1,
    }
    print(json.dumps(line))
    if options.list:
        print("\n".join(files), "", " -> ".join(again), " -> ".join(weights), sep="\n")
    headings = {"files": "files", "times_in_a_row": "in a row", "folder_changes_of_a_weight": "folders of a weight"}
    print(f"\n{table([line], headings)}\n")


if __name__ == "__main__":
    main()
