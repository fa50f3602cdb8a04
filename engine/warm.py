"""Compiles the CPU kernels ahead of the first load: python -m engine.warm CACHE_DIR [DTYPE ...]

An engine does the same in the background when it starts; this is for set-up scripts and images, so that a node's first load need
not wait for it. It takes some twenty seconds a dtype once per machine and version, on two cores: a second process compiles a share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from config.child_process import child_environment
from config.processor import UnknownFeature
from engine.device import num_cores, prepare_process

DTYPES = ("float32", "bfloat16")


def compile_beside(cache_dir: str, dtypes: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that compiles share 1 (engine.ops.prepare_share) meanwhile. It ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.warm", cache_dir, *dtypes, "--beside"],
        cwd="/",
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def _end_with_parent() -> None:
    while os.read(0, 1):  # unbuffered: a lock held here would break the process's own end
        pass
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache_dir", help="as given to hearthd --cache-dir")
    parser.add_argument("dtype", nargs="*", help="float32, bfloat16 (default: both)")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.dtype) - set(DTYPES):
        parser.error(f"no kernels for {', '.join(sorted(unknown))}; there are float32 and bfloat16")
    if options.beside:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    dtypes = options.dtype or DTYPES
    try:
        prepare_process()
    except UnknownFeature as error:
        parser.error(str(error))
    from engine import ops
    from engine.loading.weight_decoder import weight_decoder

    if not ops.configure(options.cache_dir):
        print("numba is not installed: the cpu device will run torch operations only")
        return 0
    start = time.perf_counter()
    if options.beside:
        for dtype in dtypes:
            ops.prepare_share(dtype, num_cores(), 1)
        return 0
    beside: list[subprocess.Popen[bytes]] = []

    def when_cold() -> None:
        if not beside and num_cores() > 1:
            beside.append(compile_beside(os.path.abspath(options.cache_dir), dtypes))

    for dtype in dtypes:
        ops.prepare_share(dtype, num_cores(), 0, when_cold=when_cold)
    weight_decoder(options.cache_dir)
    for process in beside:
        process.wait()
    for dtype in dtypes:  # what nobody has compiled beside this
        ops.prepare_share(dtype, num_cores(), 1)
    print(f"{' and '.join(dtypes)} kernels: {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
