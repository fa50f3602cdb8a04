"""One load by a public loader, in a process of its own: `python loading_peers.py LOADER FILE...` prints one JSON line.

It imports nothing of this project, so it runs with any interpreter that has torch and the loader. All tensors end up in memory that
the caller keeps. LOADER: safetensors, runai, fastsafetensors.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rss_bytes(field: str = "VmRSS") -> int:
    """VmRSS: resident now; VmHWM: at most, since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(load: Callable[[], Any]) -> dict[str, float]:
    """seconds, cpu_s of all threads, and by how much the resident set grew at most."""
    reset_peak()
    resident, cpu, begin = rss_bytes(), cpu_s(), time.perf_counter()
    kept = load()
    result = {"seconds": time.perf_counter() - begin, "cpu_s": cpu_s() - cpu, "rss_growth_bytes": rss_bytes("VmHWM") - resident}
    del kept
    return result


def safetensors(files: list[str]) -> Callable[[], Any]:
    from safetensors.torch import load_file

    return lambda: [{name: tensor.clone() for name, tensor in load_file(file).items()} for file in files]


def runai(files: list[str]) -> Callable[[], Any]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        streamer = SafetensorsStreamer()
        streamer.__enter__()
        streamer.stream_files(files)
        return streamer, dict(streamer.get_tensors())

    return load


def fastsafetensors(files: list[str]) -> Callable[[], Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: files})
        buffer = loader.copy_files_to_device()
        return loader, buffer, {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return load


LOADERS = {"safetensors": safetensors, "runai": runai, "fastsafetensors": fastsafetensors}

if __name__ == "__main__":
    import torch  # noqa: F401  # before the clock

    print(json.dumps(timed(LOADERS[sys.argv[1]](sys.argv[2:]))), flush=True)
