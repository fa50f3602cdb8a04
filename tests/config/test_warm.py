"""`warm`: which values it takes."""

from __future__ import annotations

from datetime import time
from pathlib import Path

import pytest

from config import warm
from config.load import ConfigError, load


def read(tmp_path: Path, value: str) -> str | list[str] | None:
    (tmp_path / "node.toml").write_text(f"[models.mid]\nwarm = {value}\n")
    return load(str(tmp_path / "node.toml"), {}).models["mid"].warm


def test_what_it_takes(tmp_path: Path) -> None:
    for value, at_start, times in (
        ('"08:00"', False, [time(8)]),
        ('"start"', True, []),
        ('["23:59", "start", "00:00"]', True, [time(0), time(23, 59)]),
        ("[]", False, []),
    ):
        found = read(tmp_path, value)
        assert (warm.is_at_start(found), warm.times(found)) == (at_start, times)
    assert warm.times(None) == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('"8:00"', 'must be a time of day such as "08:00"'),
        ('"24:00"', 'must be a time of day such as "08:00"'),
        ('"08:00\\n"', 'must be a time of day such as "08:00"'),
        ('"noon"', 'must be a time of day such as "08:00"'),
        ('["08:00", "08:00"]', "names a time twice"),
        ("8", "must be text or a list of texts"),
        ("true", "must be text or a list of texts"),
        ("08:00:00", "must be text or a list of texts"),
        ("[8]", "must be text or a list of texts"),
    ],
)
def test_what_it_refuses(tmp_path: Path, value: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, value)
    assert caught.value.key == 'models."mid".warm'
    assert why in str(caught.value)
