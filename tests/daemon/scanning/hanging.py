"""The scanning process on a file system of which parts hang: listing a folder named `hung*` never returns, one named `deadly*` ends
the process, unless it holds a file `mended`; one named `large*` makes it grow for good. To stat a file named `hung*.jinja` never
returns, unless there is `mended` beside it. Before it hangs, the process leaves a file with its pid as name in the folder
HEARTHD_TEST_HANGS."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from daemon.scanning.__main__ import LARGE_BYTES, main

_scandir, _stat = os.scandir, os.stat
_kept: list[bytes] = []


def scandir(path: Any) -> Any:
    name = os.path.basename(os.fspath(path))
    if name.startswith("large"):
        _kept.append(b"x" * (LARGE_BYTES + 1))
    if not os.path.exists(os.path.join(path, "mended")):
        if name.startswith("hung"):
            _hang()
        if name.startswith("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
    return _scandir(path)


def stat(path: Any, **options: Any) -> os.stat_result:
    folder, name = os.path.split(os.fsdecode(path)) if isinstance(path, str | os.PathLike) else ("", "")
    if name.startswith("hung") and name.endswith(".jinja") and not os.path.exists(os.path.join(folder, "mended")):
        _hang()
    return _stat(path, **options)


def _hang() -> None:
    open(os.path.join(os.environ["HEARTHD_TEST_HANGS"], str(os.getpid())), "x").close()
    time.sleep(3600)


if __name__ == "__main__":
    os.stat = stat  # type: ignore[assignment]
    os.scandir = scandir  # type: ignore[assignment]
    main()
