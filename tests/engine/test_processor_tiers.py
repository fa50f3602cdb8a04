"""Matrix products are right on lesser processors that this one can stand in for. Processor features are turned off in a separate
process, which compiles kernels for what remains and compares them. `make test-tiers` runs the whole suite in that way.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from engine.host.processor import VARIABLE, host_features
from tests.conftest import REPORTED
from tests.engine.cpu_ops import MOST_THREADS
from tests.kernel_cache import ROOT

# Each takes half a minute of compiling in a fresh clone, of the forms for one thread, whose code those for several threads share.
# What lacks AVX-512 lacks VNNI, too; `make test-tiers` has more of them. Float32 is computed alike with and without bfloat16
# instructions, and routing is no matter of vectors.
TIERS = {
    "-avx512bf16": "not float32 and not routing",
    "-avx512": "(not float32 or test_linear) and not routing",
    "-sve,-bf16": "",
}  # features that are taken away: which tests are selected


@pytest.mark.timeout(900)
@pytest.mark.parametrize("removal", TIERS)
def test_products(removal: str, record_property: Callable[[str, str], None]) -> None:
    """The tests of products, and of experts', pass without these features. They run in another process, because the compiler ends a
    process that asks it for features the processor lacks."""
    if os.environ.get(VARIABLE):
        pytest.skip(f"features are taken away already: {VARIABLE}={os.environ[VARIABLE]}")
    missing = {name.lstrip("-") for name in removal.split(",")} - host_features()
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))} to take away")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {VARIABLE: removal, MOST_THREADS: "1"}
    subprocess.run([sys.executable, "-m", "tests.engine.tier_kernels"], cwd=ROOT, env=environment, check=True)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-o",
            "timeout=300",
            "-k",
            TIERS[removal],
            "tests/engine/ops/test_products.py",
            "tests/engine/ops/test_experts.py",
            "tests/engine/ops/test_adapters.py",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    record_property(REPORTED, "\n".join((f"{VARIABLE}={removal}: {result.stdout.splitlines()[-1]}", *skipped)))
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 200


def test_a_feature_that_is_unknown_ends_a_start_with_its_name() -> None:
    command = [sys.executable, "-P", "-m", "engine.warm", "/nowhere"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {VARIABLE: "-sse9", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert f"{VARIABLE}: '-sse9' is none of -avx2" in result.stderr
    assert "Traceback" not in result.stderr
