"""The scanning process on a file system of which parts hang: listing a folder named `hung*` never returns, one named `deadly*` ends
the process, unless it holds a file `mended`; one named `large*` makes it grow for good. Before it hangs, the process leaves a file
with its pid as name in the folder HEARTHD_TEST_HANGS."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from daemon.scanning.__main__ import LARGE_BYTES, main

_scandir = os.scandir
_kept: list[bytes] = []


def scandir(path: Any) -> Any:
    name = os.path.basename(os.fspath(path))
    if name.startswith("large"):
        _kept.append(b"x" * (LARGE_BYTES + 1))
    if not os.path.exists(os.path.join(path, "mended")):
        if name.startswith("hung"):
            open(os.path.join(os.environ["HEARTHD_TEST_HANGS"], str(os.getpid())), "x").close()
            time.sleep(3600)
        if name.startswith("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
    return _scandir(path)


if __name__ == "__main__":
    os.scandir = scandir  # type: ignore[assignment]
    main()
