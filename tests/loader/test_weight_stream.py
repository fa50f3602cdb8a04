from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from loader import weight_stream
from loader.catalog import scan_one
from loader.errors import CheckpointChanged, CheckpointError
from loader.safetensors import TensorRef
from loader.sizing import weight_layout, weights_bytes
from loader.weight_stream import ReadCancelled, open_checkpoint, stream_weights
from tests.loader.checkpoints import CONFIG, tensors_for, write_checkpoint


def read_all(folder: Path, dtype: str, fingerprint: str = "") -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    with ExitStack() as stack:
        source = open_checkpoint(folder, fingerprint, stack)
        memory = bytearray(weights_bytes(source.shape, dtype))
        with memoryview(memory) as buffer:
            stream_weights(source, dtype, buffer, lambda done, total: steps.append((done, total)), lambda: False)
        element = getattr(torch, dtype)
        held = {}
        for slot in weight_layout(source.shape, dtype):
            found = torch.frombuffer(memory, dtype=element, count=math.prod(slot.shape), offset=slot.offset_bytes)
            held[slot.name] = found.view(slot.shape)
    return held, steps


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("BF16", "float32"), ("F32", "bfloat16")])
def test_values_arrive_in_the_engine_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, stored: str, dtype: str
) -> None:
    monkeypatch.setattr(weight_stream, "READ_BYTES", 1000)  # several pieces a tensor, the last one short
    monkeypatch.setattr(weight_stream, "CONVERT_ELEMENTS", 64)
    folder = write_checkpoint(tmp_path / "m", shards=shards, dtype=stored)
    held, steps = read_all(folder, dtype, scan_one(folder).fingerprint)
    source_dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[stored]
    for name, (_, shape, data) in tensors_for(CONFIG, stored).items():
        wanted = torch.frombuffer(bytearray(data), dtype=source_dtype).view(shape).to(getattr(torch, dtype))
        assert torch.equal(held[name], wanted), name
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1][0] == steps[-1][1]


def test_changed_since_registration(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    fingerprint = scan_one(folder).fingerprint
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointChanged, match="changed since") as caught:
        read_all(folder, "float32", fingerprint)
    assert not caught.value.permanent


def test_gone_and_incomplete_are_not_permanent(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointChanged):
        read_all(tmp_path / "none", "float32")
    os.truncate(folder / "model.safetensors", 3000)
    with pytest.raises(CheckpointChanged, match=r"incomplete: model\.safetensors: tensor .*: cut off"):
        read_all(folder, "float32")


def test_a_faulty_checkpoint_is_permanent(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[20] ^= 0xFF
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_all(folder, "float32")
    assert caught.value.permanent


def test_replacing_the_file_during_the_read_changes_nothing(tmp_path: Path) -> None:
    """The copy that was opened is read to its end, though its name now leads to other bytes."""
    folder = write_checkpoint(tmp_path / "m")
    weights = folder / "model.safetensors"
    before = read_all(folder, "float32")[0]
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        other = tmp_path / "other"
        other.write_bytes(bytes(weights.stat().st_size))
        os.replace(other, weights)
        memory = bytearray(weights_bytes(source.shape, "float32"))
        with memoryview(memory) as buffer:
            stream_weights(source, "float32", buffer, lambda done, total: None, lambda: False)
    slot = weight_layout(source.shape, "float32")[-1]
    found = torch.frombuffer(memory, dtype=torch.float32, count=math.prod(slot.shape), offset=slot.offset_bytes)
    assert torch.equal(found.view(slot.shape), before[slot.name])


def test_writing_into_the_file_during_the_read_is_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")

    def touch(done: int, total: int) -> None:
        os.utime(folder / "model.safetensors", ns=(1, 1))

    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        with pytest.raises(CheckpointChanged, match=r"model\.safetensors"):
            stream_weights(source, "float32", memoryview(bytearray(weights_bytes(source.shape, "float32"))), touch, lambda: False)


def test_cancel_stops_within_one_piece(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    seen: list[int] = []
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        memory = memoryview(bytearray(weights_bytes(source.shape, "float32")))
        with pytest.raises(ReadCancelled, match=r"model\.safetensors"):
            stream_weights(source, "float32", memory, lambda done, total: seen.append(done), lambda: len(seen) >= 2)
    assert len(seen) == 2


def test_early_end_of_file_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(CheckpointError, match="short: tensor t: the file ends 6 bytes too early"):
        weight_stream._read_exactly(fd, TensorRef("short", "t", "F32", (4,), 0, 16), memoryview(bytearray(16)), 0)
    os.close(fd)
