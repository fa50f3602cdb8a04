"""`python -m tests.engine.races 10000 [first seed]` runs so many random schedules, with each version of torch in turn, of whole
models and of these beside split ones, and prints what it finds, then one JSON line: how many of each operation there were on the
device and on that of the other engine, and how many faults. Exits 1 if it finds anything.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter

import pytest

from tests.engine.races.device import TORCH
from tests.engine.races.engine_run import EngineRun, run_of
from tests.engine.races.split_run import SplitRun

if __name__ == "__main__":
    logging.disable()
    num_runs = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    versions, counts, others, num_faults, began_s = list(TORCH), Counter[str](), Counter[str](), 0, time.process_time()
    for seed in range(first, first + num_runs):
        version, is_split = versions[seed % len(versions)], seed // len(versions) % 2 == 1
        run = run_of(seed, version, pytest.MonkeyPatch(), kind=SplitRun if is_split else EngineRun)
        counts.update(run.device.counts)
        if isinstance(run, SplitRun):
            others.update(run.other.device.counts)
        for fault in run.faults:
            num_faults += 1
            print(f"seed {seed}, torch {version}: {fault}", flush=True)
    told = {"benchmark": "races", "runs": num_runs, "first_seed": first, "torch": versions, "faults": num_faults}
    told |= {"cpu_seconds": round(time.process_time() - began_s), "operations": dict(counts.most_common())}
    told["of_the_other_engine"] = dict(others.most_common())
    print(json.dumps(told))
    sys.exit(num_faults > 0)
