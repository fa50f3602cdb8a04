"""The order of test files loses none, and names none that is gone."""

from __future__ import annotations

from pathlib import Path

from tests.file_order import LONG, LONG_COMPUTING, LONG_WAITING, WAITING, ordered

ROOT = Path(__file__).parent.parent


def test_all_that_is_named_exists() -> None:
    assert all((ROOT / path).exists() for path in (*LONG, *WAITING))
    assert len(set(LONG)) == len(LONG)


def test_long_files_come_first_and_the_others_are_mixed() -> None:
    files = ["tests/a.py", "tests/b.py", "tests/c.py", "tests/d.py", "tests/e2e/w.py", "tests/e2e/x.py"]
    assert ordered([*files, *LONG_WAITING[1::-1], *LONG_COMPUTING[1::-1], "tests/a.py"]) == [
        *(LONG_COMPUTING[0], LONG_WAITING[0], LONG_COMPUTING[1], LONG_WAITING[1]),
        *("tests/a.py", "tests/e2e/w.py", "tests/b.py", "tests/c.py", "tests/e2e/x.py", "tests/d.py"),
    ]
