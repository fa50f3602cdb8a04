from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loader.models.catalog import Checkpoint, scan_one
from loader.reading import read_rates, source_choice
from loader.reading.read_rates import NAME, ReadRates
from loader.reading.source_choice import Expected, SourceChoice
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint
from tests.loader.checkpoints import write_packable
from tests.loader.packed_checkpoints import pack_checkpoint

GB = 1e9
ONCE = ["read", "packed", "read"]  # reading is part of how packed files are measured


def expected(**changes: object) -> Expected:
    fields: dict[str, object] = {
        "plain_bytes": 16 * 10**9,
        "packed_bytes": 11 * 10**9,
        "plain_cached": False,
        "read_bytes_per_s": 4 * GB,
        "packed_bytes_per_s": 5 * GB,
    }
    return Expected(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "wants_packed", "said"),
    [
        (
            {},
            True,
            "read its packed files: 3.20 s expected, 4.00 s for the plain ones (16.00 GB plain at 4.0 GB/s; 11",
        ),
        ({"packed_bytes_per_s": 4 * GB}, False, "read its plain files: 4.00 s expected, 4.00 s for the packed ones"),
        ({"packed_bytes_per_s": 4.1 * GB}, False, "plain"),  # not worth the cores
        ({"packed_bytes_per_s": 4.4 * GB}, True, "packed files: 3.64 s"),
        ({"read_bytes_per_s": 40 * GB}, False, "plain files: 0.40 s"),
        ({"plain_cached": True}, False, "read its plain files, which the page cache holds"),
    ],
)
def test_whichever_is_there_sooner(changes: dict[str, object], wants_packed: bool, said: str) -> None:
    one = expected(**changes)
    assert one.wants_packed is wants_packed
    assert said in str(one)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = write_packable(tmp_path / "m", 2)
    pack_checkpoint(folder)
    return scan_one(folder)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was measured, quickly."""
    told: list[str] = []
    read, packed = read_rates._measured, read_rates._measured_packed
    monkeypatch.setattr(source_choice, "MIN_BYTES", 0)
    monkeypatch.setattr(read_rates, "_measured", lambda *args: (told.append("read"), read(*args))[1])
    monkeypatch.setattr(read_rates, "_measured_packed", lambda *args: (told.append("packed"), packed(*args))[1])
    return told


def choose(checkpoint: Checkpoint, cache_dir: Path | str) -> SourceChoice:
    choice = SourceChoice(ReadRates(str(cache_dir)), StagingRing(3, 64 << 10), Decoder)
    choice.wants_packed(checkpoint)
    return choice


def test_rates_are_measured_once_a_machine(checkpoint: Checkpoint, tmp_path: Path, measured: list[str]) -> None:
    choose(checkpoint, tmp_path)
    assert measured == ONCE
    kept = json.loads((tmp_path / NAME).read_text())
    assert [key.split()[1] for key in kept["packed_bytes_per_s"]] == ["numpy"]
    assert choose(checkpoint, tmp_path).reason
    assert measured == ONCE
    kept = {"read_bytes_per_s": {"0:0": 1e9}, "packed_bytes_per_s": {"0:0 numpy": 1e9}}  # of another drive
    (tmp_path / NAME).write_text(json.dumps(kept))
    choose(checkpoint, tmp_path)
    assert measured == ONCE + ONCE


def test_rates_decide(checkpoint: Checkpoint, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_choice, "is_cached", lambda *_: False)
    choose(checkpoint, tmp_path)
    kept = json.loads((tmp_path / NAME).read_text())
    for rate, wanted in ((1e12, "packed"), (1.0, "plain")):
        rates = {
            "read_bytes_per_s": dict.fromkeys(kept["read_bytes_per_s"], 1e9),
            "packed_bytes_per_s": dict.fromkeys(kept["packed_bytes_per_s"], rate),
        }
        (tmp_path / NAME).write_text(json.dumps(rates))
        choice = SourceChoice(ReadRates(str(tmp_path)), StagingRing(3, 64 << 10), Decoder)
        with ExitStack() as stack:
            source = open_checkpoint(checkpoint.path, checkpoint.fingerprint, stack, wants_packed=choice.wants_packed)
        assert source.is_packed is (wanted == "packed")
        assert choice.reason.startswith(f"read its {wanted} files")


@pytest.mark.parametrize("rubbish", [b"{", b"[]", b'{"read_bytes_per_s": {"a": "b"}}', b"\xff"])
def test_rates_that_cannot_be_read_are_measured_again(
    checkpoint: Checkpoint, tmp_path: Path, measured: list[str], rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(rubbish)
    with caplog.at_level(logging.WARNING, "loader"):
        choose(checkpoint, tmp_path)
    assert NAME in caplog.text
    assert measured == ONCE
    assert json.loads((tmp_path / NAME).read_text())


def test_a_cache_folder_that_is_not_there_costs_a_warning(
    checkpoint: Checkpoint, tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loader"):
        assert "could not" not in choose(checkpoint, tmp_path / "none").reason
    assert "can't be kept" in caplog.text


def test_small_models_are_not_measured(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert "too small" in choose(checkpoint, tmp_path).reason
    assert not (tmp_path / NAME).exists()


def test_packed_files_that_go_meanwhile_leave_the_plain_ones(checkpoint: Checkpoint, tmp_path: Path, measured: list[str]) -> None:
    os.unlink(Path(checkpoint.path) / checkpoint.packed_files[0].name)
    assert "the packed ones could not be tried" in choose(checkpoint, tmp_path).reason
