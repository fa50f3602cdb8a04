"""`python -m tests.engine.races 10000 [first seed]` runs so many random schedules, with each version of torch in turn, and prints
what it finds. Exits 1 if it finds anything.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

import pytest

from tests.engine.races.device import TORCH
from tests.engine.races.engine_run import run_of

if __name__ == "__main__":
    logging.disable()
    num_runs = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    versions, counts, found = list(TORCH), Counter[str](), False
    for seed in range(first, first + num_runs):
        version = versions[seed % len(versions)]
        run = run_of(seed, version, pytest.MonkeyPatch())
        counts.update(run.device.counts)
        for fault in run.faults:
            found = True
            print(f"seed {seed}, torch {version}: {fault}", flush=True)
    print(f"{num_runs} runs: " + ", ".join(f"{number} × {name}" for name, number in counts.most_common()))
    sys.exit(found)
