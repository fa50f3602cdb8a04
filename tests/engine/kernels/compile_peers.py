"""Compiles the kernel of sums over the GPUs' memory for GPUs, on a machine without any. Prints for each a JSON line with the number
of keys that sums of other sizes and ranks add to those that are compiled before a load, then one for each form that is compiled.

usage: python -m tests.engine.kernels.compile_peers CAPABILITY… (90 for 9.0; not under TRITON_INTERPRET)
"""

from __future__ import annotations

import json
import re
import sys

import torch

from engine.cuda.compile_process import launch_sums
from engine.cuda.kernels import triton_peers
from engine.cuda.launches import recorded
from tests.engine.kernels.compile_for_hopper import assembled, widest_load_bytes

SIZES = (2, triton_peers.MOST_RANKS)  # of groups


def main(capability: int) -> None:
    triton_peers._sum_kernel.device_caches.clear()  # which do not know the capability
    with recorded(capability) as launches:
        for size in SIZES:
            launch_sums(size)
        compiled = list(launches.values())
        for size in SIZES:
            regions, stop = torch.zeros(size, 2 << 20, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
            for dtype in triton_peers.DTYPES:
                for num_values in (1, 2, 15, 16, 4096, 4097, triton_peers.MOST_BYTES // dtype.itemsize):
                    for rank in range(size):
                        triton_peers.sum_over_ranks(torch.zeros(num_values, dtype=dtype), regions, stop, rank, False)
        print(json.dumps({"capability": capability, "compiled": len(compiled), "added": len(launches) - len(compiled)}), flush=True)
    for launch in compiled:
        made = launch.compile()
        ptx = made.asm["ptx"]
        told = {
            "capability": capability,
            "target": "".join(re.findall(r"\.target sm_(\d+)", ptx)),
            "ranks": launch.options["SIZE"],
            "dtype": str(launch.args[0].dtype),
            "whole": launch.options["WHOLE"],
            "widest_load_bytes": widest_load_bytes(ptx),
            "order": re.findall(r"bar\.sync|(?:ld|st)\.[\w.]*(?:global|sys)[\w.]*", ptx),
        }
        print(json.dumps(told | assembled(made.asm["cubin"], False)), flush=True)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        main(int(asked))
