"""Records calls into hearthd's files, in every Python process that has this folder on its PYTHONPATH and a HEARTHD_TRACE folder.

The first byte of HEARTHD_TRACE/phase says what is being measured; 0: nothing is recorded. When it changes, each process writes what
it has recorded to HEARTHD_TRACE/PHASE-PID.json: the distinct chains of files that called one another. Forked processes do so, too.
The files PID.process and PHASE-PID.seen say which processes there are, and which of them have seen a phase begin.
"""

import os
import sys

_FOLDER = os.environ.get("HEARTHD_TRACE")
_POLL_S = 0.01


def _start(folder: str, root: str) -> None:
    import json
    import mmap
    import threading
    import time

    with open(os.path.join(folder, "phase"), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    packages = tuple(os.path.join(root, name) + os.sep for name in ("config", "daemon", "engine", "loader", "scheduler"))
    relative: dict[str, str] = {}  # file name of a code object -> path below root, "" for other packages' files
    chains: set[tuple[str, ...]] = set()

    def own(name: str) -> str:
        found = relative.get(name)
        if found is None:
            found = relative[name] = os.path.relpath(name, root) if name.startswith(packages) else ""
        return found

    def on_call(frame, event, argument):  # type: ignore[no-untyped-def]
        if event != "call" or not phase[0] or not own(frame.f_code.co_filename):
            return
        chain: list[str] = []
        while frame is not None:
            name = own(frame.f_code.co_filename)
            if name and (not chain or chain[-1] != name):
                chain.append(name)
            frame = frame.f_back
        chains.add(tuple(reversed(chain)))

    def write() -> None:
        sys.setprofile(None)
        last = 0
        while True:
            now = phase[0]
            if now != last:
                found = sorted(chains)
                chains.clear()
                if last:
                    path = os.path.join(folder, f"{last}-{os.getpid()}.json")
                    with open(path + ".new", "w") as out:
                        json.dump(found, out)
                    os.replace(path + ".new", path)
                if now:
                    sign(f"{now}-{os.getpid()}.seen")
                last = now
            time.sleep(_POLL_S)

    def sign(name: str) -> None:
        with open(os.path.join(folder, name), "w"):
            pass

    def start_writing() -> None:
        chains.clear()  # a forked process has those that its parent writes
        sign(f"{os.getpid()}.process")
        threading.Thread(target=write, daemon=True).start()

    threading.setprofile(on_call)
    start_writing()
    sys.setprofile(on_call)
    os.register_at_fork(after_in_child=start_writing)  # a fork copies the calling thread alone


if _FOLDER:
    _start(_FOLDER, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
