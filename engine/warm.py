"""Compiles the CPU kernels ahead of the first load: python -m engine.warm CACHE_DIR [DTYPE ...]

An engine does the same in the background when it starts; this is for set-up scripts and images, so that a node's first load need
not wait for it. It takes some ten seconds once per machine and version.
"""

from __future__ import annotations

import argparse
import sys
import time

from engine.device import num_cores, prepare_process


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache_dir", help="as given to hearthd --cache-dir")
    parser.add_argument("dtype", nargs="*", help="float32, bfloat16 (default: both)")
    options = parser.parse_args()
    if unknown := set(options.dtype) - {"float32", "bfloat16"}:
        parser.error(f"no kernels for {', '.join(sorted(unknown))}; there are float32 and bfloat16")
    prepare_process()
    from engine import ops
    from engine.weight_decoder import weight_decoder

    if not ops.configure(options.cache_dir):
        print("numba is not installed: the cpu device will run torch operations only")
        return 0
    for dtype in options.dtype or ["float32", "bfloat16"]:
        start = time.perf_counter()
        ops.prepare(dtype, num_cores())
        print(f"{dtype} kernels: {time.perf_counter() - start:.1f} s", flush=True)
    weight_decoder(options.cache_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
