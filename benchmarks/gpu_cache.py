"""Triton's cache of compiled kernels: what its keys are made of, what the folder holds, and whether one kernel, asked for
first, is found there. A cache that was carried from another machine hits only where all of that is the same. One JSON line each.

usage: python -m benchmarks.gpu_cache [--tiny]: interpreted kernels are never compiled, so --tiny shows only that the script runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import time
from typing import Any

import torch

from benchmarks.gpu_limits import CACHE_DIR
from engine.cuda.kernels import triton_rows
from engine.cuda.ops import CudaOps


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_cache"} | figures), flush=True)


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key(tiny: bool) -> None:
    """Tells each part of a key: the compiler's files, the target with its ptxas, and the environment's variables."""
    import triton
    from triton.runtime.cache import triton_key

    line: dict[str, Any] = {"triton": triton.__version__, "compiler": short(triton_key())}
    if not tiny:
        from triton.compiler import make_backend
        from triton.runtime import driver

        target = driver.active.get_current_target()
        line |= {"target": f"{target.backend} {target.arch}", "backend": make_backend(target).hash()}
    folder = pathlib.Path(triton.knobs.cache.dir)
    entries = [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    tell(what="key", **line, folder=str(folder), kernels_there=len(entries))


def first_kernel(tiny: bool) -> None:
    """Compiles a norm of an 8B model's width, which a warmed cache has."""
    from triton import knobs

    hits = list[bool]()
    if not tiny:
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(bool(cache_hit))
    x = torch.ones(1, 64 if tiny else 4096, dtype=torch.float32 if tiny else torch.bfloat16, device="cpu" if tiny else "cuda")
    began_s = time.perf_counter()
    triton_rows.rms_norm(x, None, x[0], 1e-5, False, torch.empty_like(x))
    tell(what="first kernel", seconds=round(time.perf_counter() - began_s, 3), compiled=len(hits), from_cache=sum(hits))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    CudaOps(CACHE_DIR)  # has Triton keep compiled kernels there
    key(tiny)
    first_kernel(tiny)


if __name__ == "__main__":
    main()
