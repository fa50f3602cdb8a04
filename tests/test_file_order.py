"""The order of test files loses none, and names none that is gone."""

from __future__ import annotations

from pathlib import Path

from tests.file_order import LONG, WAITING, ordered

ROOT = Path(__file__).parent.parent


def test_all_that_is_named_exists() -> None:
    assert all((ROOT / path).exists() for path in (*LONG, *WAITING))


def test_long_files_come_first_and_the_others_are_mixed() -> None:
    files = ["tests/a.py", "tests/b.py", "tests/c.py", "tests/d.py", "tests/e2e/w.py", "tests/e2e/x.py", LONG[1], LONG[0]]
    assert ordered([*files, "tests/a.py"]) == [
        *LONG[:2],
        *("tests/a.py", "tests/e2e/w.py", "tests/b.py", "tests/c.py", "tests/e2e/x.py", "tests/d.py"),
    ]
