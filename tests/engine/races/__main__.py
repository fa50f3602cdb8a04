"""`python -m tests.engine.races 10000 [first seed]` runs so many random schedules, with each version of torch in turn, and prints
what it finds, then one JSON line: how many of each operation there were, and how many faults. Exits 1 if it finds anything.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter

import pytest

from tests.engine.races.device import TORCH
from tests.engine.races.engine_run import run_of

if __name__ == "__main__":
    logging.disable()
    num_runs = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    versions, counts, num_faults, began_s = list(TORCH), Counter[str](), 0, time.process_time()
    for seed in range(first, first + num_runs):
        version = versions[seed % len(versions)]
        run = run_of(seed, version, pytest.MonkeyPatch())
        counts.update(run.device.counts)
        for fault in run.faults:
            num_faults += 1
            print(f"seed {seed}, torch {version}: {fault}", flush=True)
    told = {"benchmark": "races", "runs": num_runs, "first_seed": first, "torch": versions, "faults": num_faults}
    told |= {"cpu_seconds": round(time.process_time() - began_s), "operations": dict(counts.most_common())}
    print(json.dumps(told))
    sys.exit(num_faults > 0)
