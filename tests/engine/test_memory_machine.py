from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.memory_machine import memory_machine


def test_ledger_page_tables_and_reference_counts_agree_after_any_operations(tmp_path: Path) -> None:
    """Random operations keep the memory machine's invariants. benchmarks/memory_operations.py runs 10,000 of them."""
    checks = settings(max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(memory_machine(tmp_path), settings=checks)
