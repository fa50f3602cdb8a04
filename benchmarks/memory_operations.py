"""10,000 random operations on one engine's memory (load, evict, grow, shrink, fail, crash), everything checked after each.

usage: python -m benchmarks.memory_operations [--operations 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.memory_machine import memory_machine

STEPS = 50  # of one life


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.memory_operations", description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("engine").setLevel(logging.ERROR)  # failed loads are part of it
    done: Counter[str] = Counter()
    started_s = time.perf_counter()
    lives = 0
    checks = settings(
        max_examples=20, stateful_step_count=STEPS, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    with tempfile.TemporaryDirectory() as folder:
        make = memory_machine(Path(folder), done)
        while done.total() < options.operations:
            run_state_machine_as_test(cast(Any, seed(options.seed + lives)(make)), settings=checks)
            lives += 1
    row = {"benchmark": "memory_operations", "operations": done.total(), "seconds": round(time.perf_counter() - started_s, 1)}
    print(json.dumps(row | dict(sorted(done.items()))), flush=True)


if __name__ == "__main__":
    main()
