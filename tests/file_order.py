"""The order in which several workers take the test files: the longest first, so that none of them is left with one at the end, and
files that mostly wait beside files that mostly compute: a worker that waits leaves its core to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Those that take one worker a quarter of a minute and more on two cores, about the longest first (pytest --durations=0): files that
# compute most of the time, and files that wait.
LONG_COMPUTING = (
    "tests/engine/test_processor_tiers.py",
    "tests/engine/kernels/test_compile.py",
    "tests/engine/test_gpu_shares.py",
    "tests/engine/test_stage_graphs.py",
    "tests/engine/test_models.py",
    "tests/test_gpu_parts.py",
    "tests/engine/ops/test_products.py",
    "tests/e2e/test_preemption.py",
    "tests/engine/kernels/test_tiles.py",
    "tests/engine/test_cuda_model.py",
    "tests/engine/test_edited_graphs.py",
    "tests/e2e/test_cohosting.py",
    "tests/engine/test_kernel_builds.py",
    "tests/engine/kernels/test_compile_coverage.py",
)
LONG_WAITING = (
    "tests/e2e/test_streams_over_restart.py",
    "tests/e2e/test_hung.py",
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_restart.py",
    "tests/systemd/test_install.py",
    "tests/daemon/test_main.py",
    "tests/e2e/test_status_page.py",
    "tests/install/test_collisions.py",
    "tests/test_gpu_run.py",
    "tests/e2e/test_tenants.py",
    "tests/engine/test_peers.py",
    "tests/engine/test_tile_choice.py",
    "tests/engine/test_cuda_kernel_builds.py",
)
LONG = (*LONG_COMPUTING, *LONG_WAITING)
# Folders whose tests start processes and wait for them.
WAITING = ("tests/daemon/", "tests/demo/", "tests/e2e/", "tests/install/", "tests/systemd/")


def ordered(files: Iterable[str]) -> list[str]:
    """Returns the files, given by their paths from the root of the repository, in the order in which they are to be begun."""
    unique = list(dict.fromkeys(files))
    long = [[file for file in group if file in unique] for group in (LONG_COMPUTING, LONG_WAITING)]
    others = [file for file in unique if file not in LONG]
    waiting = [file for file in others if file.startswith(WAITING)]
    computing = [file for file in others if not file.startswith(WAITING)]
    return [*_mixed(*long), *_mixed(waiting, computing)]


def _mixed(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Returns the files of both groups, each in its order, so that each is spread evenly among those of the other."""
    places = {file: (at + 0.5) / len(group) for group in (one, other) for at, file in enumerate(group)}
    return sorted(places, key=lambda file: places[file])
