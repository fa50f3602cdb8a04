"""A pytest plugin that tells of each failure as it comes and of the outcomes at the end, as JSON lines: a run that is ended early,
or a worker that dies, would else hide what had failed by then. usage: pytest -p benchmarks.gpu_failures
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import pytest

MOST_CHARACTERS = 600
outcomes: Counter[str] = Counter()


def _tell(**line: object) -> None:
    # pytest takes sys.stdout for itself while tests run, and has written dots into this line
    print("\n" + json.dumps({"benchmark": "gpu_tests"} | line), file=sys.__stdout__, flush=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers hears of each report
        return
    if report.failed:
        outcomes["failed" if report.when == "call" else "error"] += 1
        crash = getattr(report.longrepr, "reprcrash", None)
        message = getattr(crash, "message", "") or str(report.longrepr)
        _tell(what="failed", test=report.nodeid, when=report.when, why=message[:MOST_CHARACTERS])
    elif report.when == "call" or report.skipped:
        outcomes[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        failed = outcomes["failed"] + outcomes["error"]
        _tell(what="outcomes", passed=outcomes["passed"], failed=failed, skipped=outcomes["skipped"])
