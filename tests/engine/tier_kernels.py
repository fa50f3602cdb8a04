"""Compiles most of the kernels that tests of products, experts and adapters call, in their forms for one thread, for the processor
that HEARTHD_CPU_FEATURES leaves: python -m tests.engine.tier_kernels

A process that calls no kernel makes only the code that is saved (engine/host/saved_code.py), two thirds of the work of compiling
each when a test first calls it. Kernels that are missing here are compiled so.
"""

from __future__ import annotations

import sys

from engine.host import compiled
from engine.host.process import prepare_process
from engine.host.saved_code import make_only_what_is_saved
from loader.configs.kernel_sets import ADAPTERS, EXPERTS, GELU, INT8_EXPERTS, PLAIN, RANKS, KernelSet
from tests.kernel_cache import CACHE_DIR

# dtype -> how the names of units (engine/cpu/kernel_units.py) begin
KERNELS = {
    "bfloat16": (
        *("add_adapters", "clamped_swiglu", "clear_behind", "combine", "fp8", "gather_rows", "gelu_and_mul", "grouped_four_bits"),
        *("grouped_widened", "int8_linear", "route-", "silu_and_mul", "widen"),
    ),
    "float32": ("combine", "gather_rows", "grouped_linear", "keep_own_experts", "route", "silu_and_mul"),
}
SETS = (PLAIN, GELU, EXPERTS, ADAPTERS, RANKS, INT8_EXPERTS, "int8", "fp8", "mxfp4")


def main() -> None:
    prepare_process()
    compiled.keep_in(CACHE_DIR)
    from engine.cpu import kernel_units

    make_only_what_is_saved(module for name, module in list(sys.modules.items()) if name.startswith("engine.cpu.kernels."))
    for dtype, begins in KERNELS.items():
        for name in SETS:
            for unit in kernel_units.units(KernelSet(dtype, name), False):
                if unit.name.startswith(begins):
                    unit.compile()


if __name__ == "__main__":
    main()
