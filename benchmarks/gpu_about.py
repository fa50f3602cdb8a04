"""The GPU and the software for it, as one JSON line; null where torch can use none. usage: python -m benchmarks.gpu_about"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def about_gpu() -> dict[str, Any] | None:
    """Returns the line, or None if torch can use no GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    line = {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    for name in ("triton", "numpy"):
        try:
            line[name] = importlib.import_module(name).__version__
        except ImportError:
            line[name] = None
    return line


if __name__ == "__main__":
    print(json.dumps(about_gpu()))
