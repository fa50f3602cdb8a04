from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.errors import CheckpointChanged, CheckpointError, ReadFailed
from loader.files.file_calls import ReadCancelled
from loader.formats import int8_rows
from loader.formats.int8 import INT8
from loader.models.catalog import scan_one
from loader.reading import file_reader, sinks
from loader.reading.landings import Places
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import OpenCheckpoint, ReadReport, open_checkpoint, planned_reads, stream_weights
from loader.sizes.layout import weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, LARGE, tensors_for, write_checkpoint

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_into(
    memory: memoryview,
    source: OpenCheckpoint,
    dtype: str,
    told: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    slot_bytes: int = 8192,
) -> ReadReport:
    return stream_weights(source, dtype, HostSink(memory), StagingRing(3, slot_bytes), told, cancelled)


def read_all(folder: Path, dtype: str, fingerprint: str = "", slot_bytes: int = 8192) -> dict[str, torch.Tensor]:
    return read_and_report(folder, dtype, fingerprint, slot_bytes)[0]


def read_and_report(
    folder: Path, dtype: str, fingerprint: str = "", slot_bytes: int = 8192
) -> tuple[dict[str, torch.Tensor], ReadReport, list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    with ExitStack() as stack:
        source = open_checkpoint(folder, fingerprint, stack)
        memory = mmap.mmap(-1, weights_bytes(source.shape, dtype))  # on a page's boundary, as a weight range is
        report = read_into(memoryview(memory), source, dtype, lambda *step: steps.append(step), slot_bytes=slot_bytes)
        element = getattr(torch, dtype)
        held = {}
        for slot in weight_layout(source.shape, dtype):
            found = torch.frombuffer(memory, dtype=element, count=math.prod(slot.shape), offset=slot.offset_bytes)
            held[slot.name] = found.view(slot.shape)
    return held, report, steps


def check(held: dict[str, torch.Tensor], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], dtype: str) -> None:
    for name, (stored, shape, data) in tensors.items():
        wanted = torch.frombuffer(bytearray(data), dtype=STORED[stored]).view(shape).to(getattr(torch, dtype))
        assert torch.equal(held[name], wanted), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("BF16", "float32"), ("F32", "bfloat16")])
def test_values_arrive_in_the_engine_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, stored: str, dtype: str
) -> None:
    monkeypatch.setattr(sinks, "CONVERT_ELEMENTS", 64)
    folder = write_checkpoint(tmp_path / "m", shards=shards, dtype=stored)
    held, report, steps = read_and_report(folder, dtype, scan_one(folder).fingerprint)
    check(held, tensors_for(CONFIG, stored), dtype)
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1][0] == steps[-1][1] == report.num_bytes


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("stored", "padding"), [("BF16", 0), ("BF16", 8), ("BF16", 3), ("F32", 16)])
@pytest.mark.parametrize("shards", [1, 2])
def test_large_tensors_are_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, stored: str, padding: int, shards: int
) -> None:
    """From the page cache and past it, wherever the file's data begins, with the edges that no direct read can serve."""
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: cached)
    config = LARGE | {"dtype": "bfloat16"}
    folder = write_checkpoint(tmp_path / "m", config, shards, stored, random_bytes=True, padding=padding)
    held, report, _ = read_and_report(folder, "bfloat16", slot_bytes=256 << 10)
    check(held, tensors_for(config, stored, random_bytes=True), "bfloat16")
    if stored == "F32":
        assert report.staged_bytes == report.num_bytes
    elif cached or padding != 3:  # at odd places of the file, tensors have no common alignment with memory
        # with shards, what one product reads together comes from several files, and only one of them decides the place
        assert report.staged_bytes < report.num_bytes / (4 if shards == 1 else 2)
    assert report.direct_bytes == (0 if cached or report.refused else report.num_bytes)


def test_what_has_landed_is_told_and_was_prepared_before(tmp_path: Path) -> None:
    """Every byte of the weights once, and then it is at its place; the layers come in order."""
    folder = write_checkpoint(
        tmp_path / "m", LARGE | {"num_hidden_layers": 12, "intermediate_size": 40}, shards=2, random_bytes=True
    )
    prepared: list[tuple[int, int]] = []
    landed: list[tuple[int, int]] = []
    early: list[int] = []
    lock = threading.Lock()
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        size = weights_bytes(source.shape, "float32")
        whole, memory = bytearray(size), memoryview(bytearray(size))
        read_into(memoryview(whole), source, "float32")

        def note(places: Places) -> None:
            with lock:
                for begin, end in places:
                    landed.append((begin, end))
                    assert (begin, end) in prepared
                    assert memory[begin:end] == whole[begin:end]

        sink = HostSink(memory, lambda begin, end: prepared.append((begin, end)))
        ring = StagingRing(3, 64 << 10)
        stream_weights(source, "float32", sink, ring, lambda done, total: None, lambda: False, landed=note)
        early = [min(segment.stage for segment in read.segments) for read in planned_reads(source, "float32", ring)]
        wanted = sum(slot.num_bytes for slot in weight_layout(source.shape, "float32"))
    assert memory == whole
    assert sum(end - begin for begin, end in landed) == wanted
    assert early == sorted(early)
    assert set(range(14)) >= set(early) >= {0, 1, 12}


def test_files_that_refuse_direct_reads_are_read_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused when they are opened, or only at the first read."""
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: False)
    folder = write_checkpoint(tmp_path / "m", LARGE, random_bytes=True)
    tensors = tensors_for(LARGE, random_bytes=True)
    with monkeypatch.context() as patch:
        patch.setattr(file_reader, "open_direct", raises(OSError(errno.EINVAL, "Invalid argument")))
        held, report, _ = read_and_report(folder, "float32")
    check(held, tensors, "float32")
    assert report.direct_bytes == 0
    assert report.refused == {"model.safetensors": "Invalid argument"}
    path = tmp_path / "m" / "model.safetensors"
    fd = os.open(path, os.O_WRONLY)  # reads from it fail; only the first descriptor can serve them
    with monkeypatch.context() as patch:
        patch.setattr(file_reader, "open_direct", lambda _: os.dup(fd))
        patch.setattr(file_reader, "REFUSALS", (errno.EBADF,))
        held, report, _ = read_and_report(folder, "float32")
    os.close(fd)
    check(held, tensors, "float32")
    assert report.direct_bytes == 0
    assert list(report.refused) == ["model.safetensors"]


def test_a_drive_that_fails_is_not_the_checkpoint_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        monkeypatch.setattr(os, "preadv", raises(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(ReadFailed, match=r"model\.safetensors: tensor model\..*: can't read at offset \d+: Input") as caught:
            read_into(memoryview(bytearray(weights_bytes(source.shape, "float32"))), source, "float32")
    assert not caught.value.permanent


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


def read_quantised(folder: Path, slot_bytes: int = 8192) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """int8 matrices and their scales, by name."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        memory = mmap.mmap(-1, weights_bytes(source.shape, "bfloat16", INT8))
        sink, ring = HostSink(memoryview(memory)), StagingRing(3, slot_bytes)
        stream_weights(source, "bfloat16", sink, ring, lambda *_: None, lambda: False, INT8)
        held = {}
        for slot in weight_layout(source.shape, "bfloat16", INT8):
            if slot.scales_at_bytes >= 0:
                values = torch.frombuffer(memory, dtype=torch.int8, count=slot.num_bytes, offset=slot.offset_bytes)
                scales = torch.frombuffer(memory, dtype=torch.float32, count=slot.shape[0], offset=slot.scales_at_bytes)
                held[slot.name] = values.view(slot.shape), scales
        return held


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_a_load_quantises_as_the_whole_matrix_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, shards: int
) -> None:
    """Bit for bit, wherever reads and pieces end, and within half a step of what is stored."""
    monkeypatch.setattr(int8_rows, "ELEMENTS", 700)
    config = LARGE | {"dtype": "bfloat16"}
    held = read_quantised(write_checkpoint(tmp_path / "m", config, shards, stored, random_bytes=True, padding=3))
    assert len(held) == 14
    for name, (_, shape, data) in tensors_for(config, stored, random_bytes=True).items():
        if name in held:
            stored_values = torch.frombuffer(bytearray(data), dtype=STORED[stored]).view(shape).double()
            values, scales = held[name]
            assert torch.equal(scales, (stored_values.abs().amax(1).float() / 127)), name
            assert torch.equal(values, (stored_values.float() / scales.unsqueeze(1)).round().to(torch.int8)), name
            error = (values * scales.unsqueeze(1).double() - stored_values).abs()
            assert bool((error <= scales.unsqueeze(1).double() * 0.5001).all()), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_quantised(tmp_path: Path, value: float) -> None:
    folder = write_checkpoint(tmp_path / "m", dtype="F32")
    name = "model.layers.0.mlp.up_proj.weight"
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        (place,) = [tensor for header in source.headers.values() for tensor in header.tensors if tensor.name == name]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[place.offset_bytes + 8 : place.offset_bytes + 12] = struct.pack("<f", value)
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*up_proj.*NaN or an infinity"):
        read_quantised(folder)


def test_rows_of_zeros_are_quantised_to_zeros() -> None:
    rows = torch.zeros(3, 8)
    rows[1] = torch.arange(8)
    values, scales = torch.full((3, 8), 5, dtype=torch.int8), torch.ones(3)
    int8_rows.quantize_rows(rows, values, scales)
    assert values.tolist() == [[0] * 8, [0, 18, 36, 54, 73, 91, 109, 127], [0] * 8]
    assert scales.tolist() == [0.0, pytest.approx(7 / 127), 0.0]


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
    before = read_all(folder, "float32")
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        other = tmp_path / "other"
        other.write_bytes(bytes(weights.stat().st_size))
        os.replace(other, weights)
        memory = bytearray(weights_bytes(source.shape, "float32"))
        read_into(memoryview(memory), source, "float32")
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
            read_into(memoryview(bytearray(weights_bytes(source.shape, "float32"))), source, "float32", touch)


def test_cancel_stops_within_one_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", LARGE)
    seen: list[int] = []
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        memory = memoryview(bytearray(weights_bytes(source.shape, "float32")))
        with pytest.raises(ReadCancelled, match=r"model\.safetensors"):
            read_into(memory, source, "float32", lambda done, total: seen.append(done), lambda: len(seen) >= 2)
    assert len(seen) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize("direct", [True, False])
def test_early_end_of_file_names_tensor_and_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Cut while it is read: within a block, so that a direct read brings part of one."""
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: not direct)
    folder = write_checkpoint(tmp_path / "m", LARGE)
    path = folder / "model.safetensors"
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        last = source.headers["model.safetensors"].tensors[-1]
        os.truncate(path, last.offset_bytes + 8)
        memory = memoryview(bytearray(weights_bytes(source.shape, "float32")))
        wanted = rf"tensor {last.name}: the file ends at offset {last.offset_bytes + 8}, {last.num_bytes - 8} bytes too early"
        with pytest.raises(CheckpointError, match=wanted):
            read_into(memory, source, "float32")


def test_a_child_process_gets_no_staging_memory() -> None:
    """A direct read that is under way during a fork would otherwise write to the pages that the child is left with."""
    ring = StagingRing(2, 8192)
    address, _ = ring.span
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(one, 16) for one in name.split("-"))
        elif name == "VmFlags:" and begin <= address < end:
            assert "dc" in rest
            return
    raise AssertionError("the ring is not mapped")
