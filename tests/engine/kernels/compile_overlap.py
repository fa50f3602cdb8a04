"""Compiles the kernels of a decode step that may overlap (engine/cuda/kernels/triton_overlap.py) for GPUs of some compute
capabilities, and prints a JSON line for each form of each: its name, the capability, the constexprs that tell a product's forms
apart, whether it overlaps, its registers and the bytes that did not fit into them, and its PTX. It needs no GPU.

usage: python -m tests.engine.kernels.compile_overlap [--overlapping] CAPABILITY… (90: 9.0; --overlapping: only what overlaps)
"""

from __future__ import annotations

import json
import sys

from engine.cuda import compile_process
from engine.cuda.launches import recorded
from tests.engine.kernels.compile_for_hopper import assembled
from tests.engine.kernels.key_cases import BLOCK_TOKENS


def main() -> None:
    only_overlapping = "--overlapping" in sys.argv
    for capability in map(int, (argument for argument in sys.argv[1:] if argument != "--overlapping")):
        with recorded(capability) as launches:
            compile_process.launch_overlap_trial(BLOCK_TOKENS)
        for launch in launches.values():
            options = launch.options
            if "OVERLAPS" not in options or ((options["OVERLAPS"] or only_overlapping) and not options.get("launch_pdl")):
                continue
            code = launch.compile().asm
            form = {name: options[name] for name in ("M", "K", "GATED") if name in options}
            of_form = {"name": launch.name, "capability": capability, **form, "overlaps": options["OVERLAPS"]}
            print(json.dumps(of_form | assembled(code["cubin"], False) | {"ptx": code["ptx"]}), flush=True)
        for launch in launches.values():
            launch.kernel.device_caches.clear()  # which do not know the capability


if __name__ == "__main__":
    main()
