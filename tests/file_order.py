"""The order in which several workers take the test files: the longest first, so that none of them is left with one at the end, and
then files that mostly wait beside files that mostly compute.
"""

from __future__ import annotations

from collections.abc import Iterable

# Those that take one worker half a minute and more on two cores, about the longest first (pytest --durations=0).
LONG = (
    "tests/engine/test_processor_tiers.py",
    "tests/e2e/test_streams_over_restart.py",
    "tests/engine/kernels/test_compile.py",
    "tests/engine/test_stage_graphs.py",
    "tests/e2e/test_restart.py",
    "tests/engine/test_gpu_shares.py",
    "tests/engine/test_models.py",
    "tests/install/test_collisions.py",
    "tests/e2e/test_hung.py",
    "tests/e2e/test_chaos.py",
    "tests/test_gpu_run.py",
    "tests/e2e/test_preemption.py",
    "tests/daemon/test_main.py",
    "tests/e2e/test_first_minute.py",
    "tests/e2e/test_tenants.py",
    "tests/e2e/test_status_page.py",
    "tests/engine/test_cuda_model.py",
    "tests/systemd/test_install.py",
    "tests/e2e/test_cohosting.py",
    "tests/engine/test_cuda_kernel_builds.py",
    "tests/engine/test_kernel_builds.py",
    "tests/engine/ops/test_products.py",
    "tests/engine/test_tile_choice.py",
    "tests/engine/kernels/test_compile_coverage.py",
    "tests/engine/test_step_memory.py",
)
# Folders whose tests start processes and wait for them.
WAITING = ("tests/daemon/", "tests/demo/", "tests/e2e/", "tests/install/", "tests/systemd/")


def ordered(files: Iterable[str]) -> list[str]:
    """Returns the files, given by their paths from the root of the repository, in the order in which they are to be begun."""
    unique = list(dict.fromkeys(files))
    long = [file for file in LONG if file in unique]
    others = [file for file in unique if file not in LONG]
    waiting = [file for file in others if file.startswith(WAITING)]
    computing = [file for file in others if not file.startswith(WAITING)]
    places = {file: (at + 0.5) / len(group) for group in (waiting, computing) for at, file in enumerate(group)}
    return long + sorted(others, key=lambda file: places[file])
