"""`hearth pack` and `hearth verify`, without a daemon."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.cli.main import run
from daemon.cli.packing import command
from daemon.cli.partial_folder import locked
from loader.models.catalog import scan_one
from loader.packing import packer, verifier
from tests.loader.checkpoints import write_checkpoint, write_packable

NAME = "org/name"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def hearth(models: Path, verb: str, *more: str, name: str = NAME) -> int:
    return run([verb, name, "--models", str(models), "--control", str(models / "none.sock"), *more])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("shards", [1, 2])
def test_packed_proven_and_the_original_gone(models: Path, capsys: pytest.CaptureFixture[str], shards: int) -> None:
    folder = write_packable(models / NAME, shards)
    assert hearth(models, "pack") == 0
    assert "of it; `hearth verify org/name` proves it" in capsys.readouterr().out
    assert sorted(os.listdir(folder)) == sorted([*{path.name for path in folder.iterdir()} - {"packed"}, "packed"])
    assert not any(name.startswith(".") for name in os.listdir(folder))
    assert hearth(models, "pack", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["done_before"]
    assert told["packed_bytes"] < 0.85 * told["plain_bytes"]  # the header counts here
    assert hearth(models, "verify") == 0
    assert "equal to the original, bit by bit" in capsys.readouterr().out
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert hearth(models, "verify", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["against_original"]
    assert told["num_packed_tensors"] == 15 < told["num_tensors"]
    assert hearth(models, "pack") == 0  # nothing to do


def test_what_cannot_be_packed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(models / NAME)
    assert hearth(models, "pack") == 2
    assert "would not become smaller: packing is for bfloat16 weights, it holds F32" in refusal(capsys)
    assert not (models / NAME / ".partial-packed").exists()
    assert hearth(models, "verify") == 1
    assert "nothing of it is packed; nor can it be: packing is for bfloat16 weights, it holds F32" in refusal(capsys)
    assert hearth(models, "pack", name="org/none") == 3
    assert "has no model 'org/none'" in refusal(capsys)
    (models / NAME / "model.safetensors").unlink()
    assert hearth(models, "pack") == 1
    assert "neither model.safetensors nor" in refusal(capsys)


def test_too_little_room(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_packable(models / NAME)
    monkeypatch.setattr(command.os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=1024))
    assert hearth(models, "pack") == 4
    err = refusal(capsys)
    assert "packed needs" in err
    assert "has 100.0 KiB free: make room for" in err
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_disk_that_fills_up_costs_a_second_run(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_packable(models / NAME)
    written = packer._write

    def full(fd: int, data: bytes, offset: int) -> None:
        if offset > 600_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(packer, "_write", full)
        assert hearth(models, "pack") == 4
    assert "No space left on device" in refusal(capsys)
    assert not (folder / "packed").exists()
    assert scan_one(folder).complete
    (folder / ".partial-packed" / "of-another-run.safetensors").write_bytes(b"")
    assert hearth(models, "pack") == 0
    assert hearth(models, "verify") == 0


def test_only_one_at_a_time(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_packable(models / NAME)
    with locked(folder / command.PARTIAL, "pack"):
        assert hearth(models, "pack") == 5
    assert "another pack is writing" in refusal(capsys)


def test_a_changed_model_is_packed_again(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_packable(models / NAME)
    assert hearth(models, "verify") == 1
    assert "nothing of it is packed; `hearth pack org/name` packs it" in refusal(capsys)
    assert hearth(models, "pack") == 0
    os.utime(folder / "model.safetensors", ns=(1, 1))
    capsys.readouterr()
    assert hearth(models, "verify") == 1
    assert "made from another model.safetensors; `hearth pack org/name` packs it" in refusal(capsys)
    assert hearth(models, "pack", "--json") == 0
    assert not json.loads(capsys.readouterr().out)["done_before"]
    assert hearth(models, "verify") == 0


def test_a_damaged_file_is_named(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_packable(models / NAME)
    assert hearth(models, "pack") == 0
    path = folder / "packed" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    capsys.readouterr()
    assert hearth(models, "verify") == 1
    err = refusal(capsys)
    assert "packed/model.safetensors: tensor model." in err
    assert f"don't match their checksum; move {folder / 'packed'} away, then `hearth pack org/name` makes it again" in err
    (folder / "model.safetensors").unlink()
    assert hearth(models, "verify") == 1
    assert "; there is no original to pack it from again" in refusal(capsys)


def test_an_interrupted_run_says_that_it_goes_on(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packable(models / NAME)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packer, "pack_file", interrupted)
        assert hearth(models, "pack") == 130
    assert refusal(capsys) == "hearth: interrupted; the same command goes on where it was\n"
    assert hearth(models, "pack") == 0
    monkeypatch.setattr(verifier, "verify_tensor", interrupted)
    capsys.readouterr()
    assert hearth(models, "verify") == 130
    assert capsys.readouterr().err == ""
