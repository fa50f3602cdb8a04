"""`python -P -m tests.engine.interpreted_engine ...` is an engine that computes as on a GPU: it has the backend of GPUs, whose
kernels are interpreted, on the memory of a cpu device, gloo in the place of NCCL, and memfds in that of memory that GPUs map from
each other. Arguments: as of `python -m engine`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engine import main as engine
from engine.contracts.backend import OpenDevice
from engine.cpu.memory import CpuMemory
from engine.cuda.backend import CudaBackend
from engine.cuda.peers import PeerGroup, Peers
from engine.memory.handover import Handover
from engine.protocol import Configure
from tests import interpreter
from tests.engine.gloo import Gloo
from tests.engine.shared_regions import SharedRegions

HOLD = "HEARTHD_TEST_HOLD"  # names a file; while it exists, ranks but the first make another one, `reached`, and do not connect


class Mapping(Peers):
    """Connects ranks whose small sums go through each other's memory, or fails."""

    def connect(self, group_id: bytes, rank: int, size: int) -> PeerGroup:
        held = Path(os.environ.get(HOLD, ""))
        if rank and held.is_file():
            held.with_name("reached").touch()
            threading.Event().wait()
        group = super().connect(group_id, rank, size)
        join = group.join

        def must_join(agreed: Callable[[bool], bool]) -> None:
            join(agreed)
            if not group.is_joined:
                raise RuntimeError(f"rank {rank} of {size} does not map the others' memory")

        group.join = must_join  # type: ignore[method-assign]
        return group


def open_device(configure: Configure, handover: Handover | None) -> OpenDevice:
    importlib.import_module("triton.runtime.interpreter")
    interpreter.quicken()
    memory = CpuMemory(configure.num_chunks, configure.chunk_bytes)
    return OpenDevice(CudaBackend(memory, configure, Mapping(Gloo(), SharedRegions, on_device=False)), configure, None)


if __name__ == "__main__":
    engine.open_device = open_device
    sys.exit(engine.main())
