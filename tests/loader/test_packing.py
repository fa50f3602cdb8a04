"""Packed checkpoints: written, read, chosen, proven."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine.host import unpack_kernels
from loader.errors import CheckpointError
from loader.files import frame
from loader.files.safetensors import INDEX_NAME, Header
from loader.files.weight_files import PACKED_DIR, FileInfo, read_headers
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat
from loader.models.catalog import Checkpoint, scan, scan_one
from loader.packing import packer
from loader.packing.packer import INCOMPLETE, JOURNAL
from loader.packing.verifier import verify_tensor
from loader.reading import file_reader
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import ReadReport, open_checkpoint, stream_weights
from loader.sizes.layout import weights_bytes
from tests.loader.checkpoints import write_checkpoint, write_packable
from tests.loader.packed_checkpoints import pack_checkpoint


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a tensor."""
    monkeypatch.setattr(frame, "FRAME_VALUES", 1 << 14)


def load(
    folder: Path, dtype: str = "bfloat16", packed: bool = True, decoder: Decoder | None = None, weight_format: WeightFormat = PLAIN
) -> tuple[bytes, ReadReport]:
    """The whole weight range."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, wants_packed=lambda checkpoint: packed)
        memory = mmap.mmap(-1, weights_bytes(replace(source.shape, block_offsets=()), dtype, weight_format))
        source.shape = replace(source.shape, block_offsets=())  # the same layout, whichever files there are
        sink, ring = HostSink(memoryview(memory)), StagingRing(3, 64 << 10)
        report = stream_weights(
            source, dtype, sink, ring, lambda *_: None, lambda: False, weight_format, decoder=decoder or Decoder()
        )
        return memory[:], report


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("dtype", "weight_format"), [("bfloat16", PLAIN), ("float32", PLAIN), ("bfloat16", INT8), ("float32", INT8)]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_packed_weights_load_as_plain_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, dtype: str, weight_format: WeightFormat, cached: bool
) -> None:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: cached)
    folder = write_packable(tmp_path / "m", shards)
    pack_checkpoint(folder)
    plain, plain_report = load(folder, dtype, packed=False, weight_format=weight_format)
    for decoder in (Decoder(), Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of)):
        packed, report = load(folder, dtype, decoder=decoder, weight_format=weight_format)
        assert packed == plain
    assert report.num_bytes < 0.74 * plain_report.num_bytes  # 11 frames' heads and padding count here
    fingerprint = scan_one(folder).fingerprint
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert scan_one(folder).complete
    assert scan_one(folder).fingerprint != fingerprint
    assert load(folder, dtype, weight_format=weight_format)[0] == plain
    assert load(folder, dtype, packed=False, weight_format=weight_format)[0] == plain  # there is nothing else to read


def test_any_tool_can_read_the_header(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    plain = folder / "model.safetensors"
    with safe_open(plain, "np") as before, safe_open(folder / PACKED_DIR / "model.safetensors", "pt") as after:
        assert set(after.keys()) == set(before.keys())
        assert after.metadata()["format"] == "pt"
        assert after.get_tensor("model.embed_tokens.weight").dtype == torch.uint8
        assert after.get_tensor("model.norm.weight").dtype == torch.bfloat16
    for header in read_headers(folder, PACKED_DIR).values():
        assert (8 + len(header.raw)) % 4096 == 0
        assert all(one.begin % 64 == 0 for tensor in header.tensors if tensor.is_packed for one in tensor.frames)


def test_a_packed_file_may_be_the_model_itself(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    plain, _ = load(folder, packed=False)
    os.replace(folder / PACKED_DIR / "model.safetensors", folder / "model.safetensors")
    (folder / PACKED_DIR).rmdir()
    assert load(folder)[0] == plain


def test_packing_changes_nothing_of_what_is_registered(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "models" / "m")
    before = scan(tmp_path / "models")
    pack_checkpoint(folder)
    after = scan(tmp_path / "models", before)
    assert list(after) == ["m"]
    assert after["m"].packed_files
    assert after["m"].fingerprint == before["m"].fingerprint
    assert scan(tmp_path / "models", after)["m"] is after["m"]


def spoil_time(folder: Path) -> str:
    os.utime(folder / "model-00001-of-00002.safetensors", ns=(1, 1))
    return "made from another model-00001-of-00002.safetensors"


def spoil_missing(folder: Path) -> str:
    (folder / PACKED_DIR / "model-00002-of-00002.safetensors").unlink()
    return "packed/model-00002-of-00002.safetensors is missing"


def spoil_short(folder: Path) -> str:
    os.truncate(folder / PACKED_DIR / "model-00002-of-00002.safetensors", 100_000)
    return "cut off"


def spoil_plain(folder: Path) -> str:
    for path in folder.glob("*.safetensors"):
        shutil.copy2(path, folder / PACKED_DIR)
    return "made from another model-00001-of-00002.safetensors"


def spoil_index(folder: Path) -> str:
    (folder / PACKED_DIR / INDEX_NAME).write_text("{")
    return "not a valid index"


@pytest.mark.parametrize("spoil", [spoil_time, spoil_missing, spoil_short, spoil_plain, spoil_index])
def test_what_cannot_stand_for_the_plain_files_is_left_aside(tmp_path: Path, spoil: object) -> None:
    folder = write_packable(tmp_path / "m", 2)
    pack_checkpoint(folder)
    assert callable(spoil)
    why = spoil(folder)
    checkpoint = scan_one(folder)
    assert checkpoint.complete
    assert checkpoint.packed_files == ()
    assert why in checkpoint.packed_reason
    load(folder)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_packable(tmp_path / "m")
    path = folder / PACKED_DIR / "model.safetensors"
    pack_checkpoint(folder)
    whole = path.read_bytes()
    path.unlink()
    written = 0
    encode = packer._encoded

    def failing(piece: object) -> tuple[bytes, int]:
        nonlocal written
        written += 1
        if written > 12:
            raise OSError(28, "No space left on device")
        return encode(piece)

    with monkeypatch.context() as patched:
        patched.setattr(packer, "_encoded", failing)
        with pytest.raises(OSError, match="No space"):
            pack_checkpoint(folder)
    journal = path.with_name(path.name + JOURNAL)
    lines = journal.read_bytes().splitlines()
    assert len(lines) > 3
    journal.write_bytes(journal.read_bytes() + b'{"name": "model.la')  # cut off in a line
    encoded = []
    with monkeypatch.context() as patched:
        patched.setattr(packer, "_encoded", lambda piece: (encoded.append(len(piece)), encode(piece))[1])
        assert sum(pack_checkpoint(folder)) == sum(one.num_bytes for one in headers_of(folder)["model.safetensors"].tensors)
    assert path.read_bytes() == whole
    assert 0 < sum(encoded) < (folder / "model.safetensors").stat().st_size - 4 * (1 << 15)
    assert os.listdir(folder / PACKED_DIR) == ["model.safetensors"]


def headers_of(folder: Path) -> dict[str, Header]:
    return read_headers(folder)


@pytest.mark.parametrize("what", ["bytes", "journal", "source"])
def test_what_is_left_of_a_run_is_checked_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder = write_packable(tmp_path / "m")
    path = folder / PACKED_DIR / "model.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(packer._Packing, "_write_header", raise_stopped)
        with pytest.raises(OSError, match="stopped"):
            pack_checkpoint(folder)
    incomplete, journal = path.with_name(path.name + INCOMPLETE), path.with_name(path.name + JOURNAL)
    if what == "bytes":
        data = bytearray(incomplete.read_bytes())
        data[len(data) // 2] ^= 1
        incomplete.write_bytes(data)
    elif what == "journal":
        journal.write_bytes(journal.read_bytes().replace(b'"begin":', b'"begin":1', 3))
    else:
        os.utime(folder / "model.safetensors", ns=(5, 5))
    pack_checkpoint(folder)
    plain, _ = load(folder, packed=False)
    assert load(folder)[0] == plain


def raise_stopped(*_: object) -> None:
    raise OSError(5, "stopped")


def verify(folder: Path, against: bool = True) -> int:
    done: list[int] = []
    plain = {tensor.name: tensor for header in headers_of(folder).values() for tensor in header.tensors} if against else {}
    for name, header in read_headers(folder, PACKED_DIR).items():
        with ExitStack() as stack:
            fd = os.open(folder / name, os.O_RDONLY)
            stack.callback(os.close, fd)
            plain_fd = os.open(folder / Path(name).name, os.O_RDONLY) if against else None
            if plain_fd is not None:
                stack.callback(os.close, plain_fd)
            for tensor in header.tensors:
                verify_tensor(fd, tensor, plain_fd, plain.get(tensor.name), done.append)
    return sum(done)


@pytest.mark.parametrize("against", [True, False])
def test_verifying_finds_every_difference(tmp_path: Path, against: bool) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    (header,) = headers_of(folder).values()
    assert verify(folder, against) == sum(tensor.num_bytes for tensor in header.tensors)
    path = folder / PACKED_DIR / "model.safetensors"
    good = path.read_bytes()
    rng = np.random.default_rng(1)
    begin = 8 + int.from_bytes(good[:8], "little")
    for at in rng.integers(begin + 64, len(good) - 64, 10):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="don't match their checksum"):
            verify(folder, against)
    path.write_bytes(good)
    if against:
        plain = folder / "model.safetensors"
        data = bytearray(plain.read_bytes())
        data[-3] ^= 1
        plain.write_bytes(data)
        with pytest.raises(
            CheckpointError, match=rf"not the original: model.safetensors has another byte at offset {len(data) - 3}"
        ):
            verify(folder)


def test_a_forged_frame_is_no_original(tmp_path: Path) -> None:
    """Its checksum may be right; the SHA-256 is of what was there."""
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    path = folder / PACKED_DIR / "model.safetensors"
    data = path.read_bytes()
    (header,) = read_headers(folder, PACKED_DIR).values()
    record = header.tensors[0].record
    assert record is not None
    path.write_bytes(data.replace(record.sha256.encode(), b"0" * 64))
    with pytest.raises(CheckpointError, match="SHA-256"):
        verify(folder, against=False)


def test_tensors_that_would_not_shrink_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", json.loads((write_packable(tmp_path / "p") / "config.json").read_text()), 1, "BF16", True
    )
    pack_checkpoint(folder)  # random bytes
    (header,) = read_headers(folder, PACKED_DIR).values()
    assert not any(tensor.is_packed for tensor in header.tensors)
    assert load(folder)[0] == load(folder, packed=False)[0]


def test_frames_are_whole_rows(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    (header,) = read_headers(folder, PACKED_DIR).values()
    for tensor in header.tensors:
        width = tensor.shape[-1] * 2
        assert all(one.num_bytes % width == 0 for one in tensor.frames)
        assert sum(one.num_bytes for one in tensor.frames) == math.prod(tensor.shape) * 2


def test_the_checkpoint_says_which_files_there_are(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    seen: list[Checkpoint] = []

    def wants(checkpoint: Checkpoint) -> bool:
        seen.append(checkpoint)
        return True

    with ExitStack() as stack:
        source = open_checkpoint(folder, scan_one(folder).fingerprint, stack, wants_packed=wants)
        assert source.is_packed
        assert [info.name for info in source.files] == ["packed/model.safetensors"]
    assert [info.name for info in seen[0].files] == ["model.safetensors"]
    assert isinstance(seen[0].packed_files[0], FileInfo)
