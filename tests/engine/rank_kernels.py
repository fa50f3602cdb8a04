"""The operations of the ranks in `rank_processes`, compiled when this is imported: once, before the ranks are forked."""

from __future__ import annotations

from engine.cpu.ops import CpuOps
from tests.kernel_cache import CACHE_DIR

compiled, plain = CpuOps(CACHE_DIR), CpuOps(CACHE_DIR, use_kernels=False)
for dtype in ("float32", "bfloat16"):
    compiled.prepare(dtype, 1, "ranks")
