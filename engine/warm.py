"""Compiles the CPU kernels ahead of the first load: python -m engine.warm CACHE_DIR [DTYPE ...]

An engine does the same in the background when it starts, and serves models by torch's slower operations meanwhile; this is for
set-up scripts and images, so that the first answers are as fast as all others. It takes half a minute a dtype on two cores, once
per machine and version: up to four processes share the work.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import TYPE_CHECKING

from engine.host.process import num_cores, prepare_process
from engine.host.processor import UnknownFeature

if TYPE_CHECKING:
    from engine.contracts.loads import KernelNews
    from engine.cpu.ops import CpuOps

DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache_dir", help="as given to hearthd --cache-dir")
    parser.add_argument("dtype", nargs="*", help="float32, bfloat16 (default: both)")
    parser.add_argument("--int8", action="store_true", help="also what int8 weights need")
    parser.add_argument("--mxfp4", action="store_true", help="also what weights in MXFP4 need")
    parser.add_argument("--nvfp4", action="store_true", help="also what weights in NVFP4 need")
    parser.add_argument("--int4", action="store_true", help="also what weights in INT4 need")
    parser.add_argument("--int4-zeros", action="store_true", help="also what weights in INT4 with zero points need")
    parser.add_argument("--int8-experts", action="store_true", help="also what experts with int8 weights need")
    parser.add_argument("--fp8", action="store_true", help="also what FP8 weights need")
    parser.add_argument("--packed", action="store_true", help="also what weights that stay packed need")
    parser.add_argument("--adapters", action="store_true", help="also what LoRA adapters need")
    parser.add_argument("--ranks", action="store_true", help="also what models need that are split over devices")
    parser.add_argument("--unit-by-unit", choices=("one", "all"), default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.dtype) - set(DTYPES):
        parser.error(f"no kernels for {', '.join(sorted(unknown))}; there are float32 and bfloat16")
    try:
        prepare_process()
    except UnknownFeature as error:
        parser.error(str(error))
    from engine.host import compiled

    if options.unit_by_unit:
        compiled.keep_in_folder(options.cache_dir)
        compiled.use_threading_layer()
        from engine.cpu.kernel_builds import compile_units

        compile_units(options.unit_by_unit == "all")
        return 0
    from engine.cpu.ops import CpuOps

    ops = CpuOps(options.cache_dir, deferred=True)
    if ops.kernels is None:
        print("numba is not installed: the cpu device will run torch operations only")
        return 0
    sets = ("int8", "int8_experts", "fp8", "mxfp4", "nvfp4", "int4", "int4_zeros", "packed", "adapters", "ranks")
    formats = [name for name in sets if getattr(options, name)]
    return _compile(ops, options.cache_dir, options.dtype or DTYPES, formats)


def _compile(ops: CpuOps, cache_dir: str, dtypes: tuple[str, ...], formats: list[str]) -> int:
    from engine.cpu.kernel_builds import CpuKernelBuilds
    from engine.host.weight_decoder import weight_decoder
    from loader.configs.kernel_sets import OF_DECODERS, KernelSet

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    start = time.perf_counter()
    shown = ""

    def tell(news: KernelNews) -> None:
        nonlocal shown
        told = news.told
        line = f"{told.kind}: {told.num_done} of {told.num_units}, about {told.left_s:.0f} s left" if told.num_units else ""
        if sys.stderr.isatty() and line != shown:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            shown = line

    builds = CpuKernelBuilds(num_cores(), num_cores(), ops.use, ops.give_up, tell)
    builds.need(KernelSet(dtype, name) for dtype in dtypes for name in (*OF_DECODERS, *formats))
    weight_decoder(cache_dir)
    builds.wait()
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    for kind, problem in builds.problems.items():
        print(f"kernels for {kind}: {problem}", file=sys.stderr)
    print(f"{' and '.join(dtypes)} kernels: {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if builds.problems else 0


if __name__ == "__main__":
    sys.exit(main())
