"""`python -P -m tests.engine.interpreted_engine ...` is an engine that computes as on a GPU: it has the backend of GPUs, whose
kernels are interpreted, on the memory of a cpu device, and gloo in the place of NCCL. Arguments: as of `python -m engine`.
"""

from __future__ import annotations

import sys

from engine import main as engine
from engine.contracts.backend import OpenDevice
from engine.cpu.memory import CpuMemory
from engine.cuda.backend import CudaBackend
from engine.memory.handover import Handover
from engine.protocol import Configure
from tests.engine.gloo import Gloo


def open_device(configure: Configure, handover: Handover | None) -> OpenDevice:
    memory = CpuMemory(configure.num_chunks, configure.chunk_bytes)
    return OpenDevice(CudaBackend(memory, configure, Gloo()), configure, None)


if __name__ == "__main__":
    engine.open_device = open_device
    sys.exit(engine.main())
