"""What tenants have used today outlives the process, and no state of the disk stops the node."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from daemon.record.usage_file import NO_USAGE, DayUsage, UsageFile


async def test_what_was_saved_is_read(tmp_path: Path) -> None:
    now: DayUsage | None = DayUsage(20_000, {"a": 5, "b": 0})
    await UsageFile(str(tmp_path), lambda: now).save()
    assert UsageFile(str(tmp_path), lambda: now).load() == now
    assert (tmp_path / "usage.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["usage.json"]


async def test_only_changes_are_written_and_only_where_a_day_counts(tmp_path: Path) -> None:
    tokens = {"a": 5}
    now: DayUsage | None = DayUsage(20_000, tokens)
    file = UsageFile(str(tmp_path), lambda: now)
    await file.save()
    (tmp_path / "usage.json").unlink()
    await file.save()
    assert os.listdir(tmp_path) == []
    tokens["a"] = 6
    await file.save()
    assert json.loads((tmp_path / "usage.json").read_text())["tokens"] == {"a": 6}
    (tmp_path / "usage.json").unlink()
    now = None
    await file.save()
    assert os.listdir(tmp_path) == []


BROKEN = [
    ("", "it is empty"),
    ("[]", "it holds no JSON object"),
    ('{"version": 2, "day": 1, "tokens": {}}', "key version: 2, and this hearthd reads 1"),
    ('{"version": 1, "day": 1, "tokens": {"a": -1}}', 'key tokens."a": must be a whole number of at least 0'),
    ('{"version": 1, "day": true, "tokens": {}}', "key day: must be a whole number of at least 0"),
    ('{"version": 1, "tokens": {}}', "key day: missing"),
    ('{"version": 1, "day": 1, "tokens": []}', "key tokens: must be an object"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
async def test_a_file_that_cannot_be_read_counts_as_none(
    tmp_path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage.json").write_text(text)
    assert UsageFile(str(tmp_path), lambda: None).load() == NO_USAGE
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'usage.json'} cannot be used: {said}")
    assert message.endswith("; it is ignored: the tokens of today's limits count from 0")


async def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = UsageFile(str(tmp_path), lambda: DayUsage(20_000, {"a": 5}))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    await file.save()
    await file.save()
    assert caplog.text.count("No space left on device") == 1
    monkeypatch.undo()
    await file.save()
    assert "is saved again" in caplog.text
    assert UsageFile(str(tmp_path), lambda: None).load() == DayUsage(20_000, {"a": 5})
