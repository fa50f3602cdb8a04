"""GPUs as a file describes them, for nodes without any: `python -m tests.e2e.scripted_gpus FILE …` is hearthd with those.

The file is JSON, {"gpus": [fields of daemon.gpu.inventory.Gpu], "faults": [[uuid, xid]]}, read again at each question; faults are
told once, in order. "hangs": a named pipe; a question for the GPUs waits until somebody has opened it for writing and closed it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from config.devices import NoGpus
from daemon.gpu.inventory import Gpu, GpuFault

LOOK_EVERY_S = 0.02


class ScriptedGpus:
    """daemon.gpu.inventory.Inventory."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_told = path, 0

    def gpus(self) -> Sequence[Gpu]:
        content = self._read()
        if "no_driver" in content:
            raise NoGpus(content["no_driver"])
        if "hangs" in content:
            Path(content["hangs"]).read_bytes()
        return msgspec.convert(content["gpus"], list[Gpu])

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            faults = self._read().get("faults", [])
            if len(faults) > self._num_told:
                self._num_told += 1
                return GpuFault(*faults[self._num_told - 1])
            time.sleep(LOOK_EVERY_S)
        return None

    def _read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._path.read_text())
        return content


if __name__ == "__main__":
    from daemon.main import main

    sys.exit(main(sys.argv[2:], ScriptedGpus(Path(sys.argv[1]))))
