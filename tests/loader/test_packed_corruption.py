"""A hundred and more seeded corruptions of packed files: each is refused by file and tensor, or provably harmless: every weight is
what it was. A checksum for each frame makes more of them plain than in a plain file (test_corruption.py)."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.host import unpack_kernels
from loader.errors import CheckpointChanged, CheckpointError, LoaderError
from loader.files import frame
from loader.files.packed import METADATA_KEY
from loader.files.weight_files import PACKED_DIR, read_headers
from loader.models.catalog import scan_one
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.sizes.layout import weight_layout, weights_bytes
from tests.loader.checkpoints import write_packable
from tests.loader.packed_checkpoints import pack_checkpoint

SHARDS = 3
DECODERS = (Decoder(), Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of))


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_packable(tmp_path_factory.mktemp("packed") / "m", SHARDS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frame, "FRAME_VALUES", 1 << 14)
        pack_checkpoint(folder)
        for path in folder.glob("*.safetensors"):
            path.unlink()
        yield folder


@pytest.fixture
def folder(packed_once: Path, tmp_path: Path) -> Path:
    """A model of packed files alone, to be spoilt."""
    copy = tmp_path / "m"
    (copy / PACKED_DIR).mkdir(parents=True)
    for path in packed_once.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(packed_once)).write_bytes(path.read_bytes())
    return copy


@pytest.fixture(scope="module")
def weights(packed_once: Path) -> dict[str, bytes]:
    return load(packed_once)


def load(folder: Path, during: Callable[[], object] | None = None, decoder: Decoder = DECODERS[0]) -> dict[str, bytes]:
    """Weights by name. during: called once, after the first read."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        memory = bytearray(weights_bytes(source.shape, "bfloat16"))
        todo = [during] if during else []

        def progress(done: int, total: int) -> None:
            if todo:
                todo.pop()()

        sink, ring = HostSink(memoryview(memory)), StagingRing(3, 64 << 10)
        stream_weights(source, "bfloat16", sink, ring, progress, lambda: False, decoder=decoder)
        slots = weight_layout(source.shape, "bfloat16")
        return {slot.name: bytes(memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]) for slot in slots}


def files(folder: Path) -> list[Path]:
    return sorted((folder / PACKED_DIR).glob("*.safetensors"))


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def refused(folder: Path, path: Path, decoder: Decoder = DECODERS[0]) -> str:
    with pytest.raises(LoaderError) as caught:
        load(folder, decoder=decoder)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_flips_in_weights(folder: Path, weights: dict[str, bytes], seed: int) -> None:
    """Of single bits, bytes and blocks: refused by file, tensor and offset; what pads a tensor to its first frame holds nothing."""
    rng = random.Random(seed)
    path = rng.choice(files(folder))
    data = bytearray(path.read_bytes())
    length = rng.choice((1, 1, 8, 512, 4096))
    at = rng.randrange(header_end(data), len(data) - length)
    held = {
        range(one.begin, one.end): tensor.name
        for header in read_headers(folder, PACKED_DIR).values()
        for tensor in header.tensors
        if tensor.file.endswith(path.name)
        for one in tensor.frames
    }
    changed = [name for span, name in held.items() if span.start < at + length and at < span.stop]
    if length == 1:
        data[at] ^= 1 << rng.randrange(8)
    else:
        data[at : at + length] = bytes(byte ^ 0xA5 for byte in data[at : at + length])
    path.write_bytes(data)
    decoder = DECODERS[seed % 2]
    if not changed:
        assert load(folder, decoder=decoder) == weights
        return
    said = refused(folder, path, decoder)
    found = re.search(r"tensor (\S+): bytes (\d+) to (\d+) don't match their checksum", said)
    assert found is not None, said
    assert found[1] in changed
    assert held[range(int(found[2]), int(found[3]))] == found[1]


@pytest.mark.parametrize("seed", range(20))
def test_frames_in_each_other_s_place(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    (path,) = rng.sample(files(folder), 1)
    header = next(one for name, one in read_headers(folder, PACKED_DIR).items() if name.endswith(path.name))
    frames = [one for tensor in header.tensors for one in tensor.frames if one.packed]
    data = bytearray(path.read_bytes())
    first = rng.choice(frames)
    alike = [one for one in frames if one is not first and one.end - one.begin == first.end - first.begin]
    if alike:
        second = rng.choice(alike)
        one, other = slice(first.begin, first.end), slice(second.begin, second.end)
        data[one], data[other] = data[other], data[one]
    else:  # its own blocks in another order
        middle = first.begin + (first.end - first.begin) // 128 * 64
        data[first.begin : first.end] = data[middle : first.end] + data[first.begin : middle]
    path.write_bytes(data)
    assert "don't match their checksum" in refused(folder, path)


@pytest.mark.parametrize("seed", range(20))
def test_truncations(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(files(folder))
    data = path.read_bytes()
    length = rng.randrange(len(data))
    os.truncate(path, length)
    with pytest.raises(CheckpointChanged) as caught:  # it may still be on its way
        load(folder)
    assert path.name in str(caught.value)
    assert length < header_end(data) or "tensor " in str(caught.value)


@pytest.mark.parametrize("seed", range(10))
def test_truncations_while_it_is_read(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(files(folder))
    data = path.read_bytes()
    with pytest.raises(LoaderError, match=path.name) as caught:
        load(folder, lambda: os.truncate(path, rng.randrange(header_end(data), len(data))))
    if isinstance(caught.value, CheckpointError):
        assert caught.value.tensor


@pytest.mark.parametrize("seed", range(40))
def test_flips_in_headers(folder: Path, weights: dict[str, bytes], seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(files(folder))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data[: header_end(data)].rstrip()))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        after: object = load(folder)
    except LoaderError as error:
        after = str(error)
    if isinstance(after, str):
        assert path.name in after
        assert "\n" not in after
    else:
        assert after == weights


def change(path: Path, edit: Callable[[dict[str, Any]], object], packed: bool = True) -> None:
    """The header (packed: what METADATA_KEY says), rewritten into the same room."""
    data = path.read_bytes()
    end = header_end(data)
    header = json.loads(data[8:end])
    if packed:
        record = json.loads(header["__metadata__"][METADATA_KEY])
        edit(record)
        header["__metadata__"][METADATA_KEY] = json.dumps(record, separators=(",", ":"))
    else:
        edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= end - 8
    path.write_bytes(data[:8] + text.ljust(end - 8) + data[end:])


def first_packed(record: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in record["tensors"].values() if "shape" in one)


BAD_RECORDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda r: r.update(version=2), "version 2 of the format; this build reads version 1"),
    "no version": (lambda r: r.pop("version"), "not valid"),
    "no tensors": (lambda r: r.pop("tensors"), "not valid"),
    "a tensor less": (lambda r: r["tensors"].pop(next(iter(r["tensors"]))), "does not describe it"),
    "a tensor more": (lambda r: r["tensors"].update(more=first_packed(r)), "tensor more: .*but it is not in the file"),
    "a sum less": (lambda r: first_packed(r)["sums"].pop(), "does not describe its"),
    "a sum that is none": (lambda r: first_packed(r)["sums"].__setitem__(0, "0" * 15 + "g"), "checksum that is none"),
    "another sum": (lambda r: first_packed(r)["sums"].__setitem__(0, "0" * 16), "don't match their checksum"),
    "a frame less": (lambda r: first_packed(r)["frame_bytes"].pop(), "does not describe its"),
    "an empty frame": (lambda r: first_packed(r)["frame_bytes"].__setitem__(0, 0), "does not describe its"),
    "a frame below nothing": (lambda r: first_packed(r)["frame_bytes"].__setitem__(0, -64), "does not describe its"),
    "a huge frame": (lambda r: first_packed(r)["frame_bytes"].__setitem__(0, 1 << 40), "does not describe its"),
    "a text for a length": (lambda r: first_packed(r)["frame_bytes"].__setitem__(0, "64"), "not valid"),
    "a shape of nothing": (lambda r: first_packed(r).update(shape=[0]), "does not describe its"),
    "a shape below nothing": (lambda r: first_packed(r).update(shape=[-120, -120]), "negative dimension"),
    "a huge shape": (lambda r: first_packed(r).update(shape=[1 << 60, 1 << 60]), "beyond what tensors have"),
    "a shape turned": (lambda r: first_packed(r)["shape"].reverse(), "has shape|does not describe"),
    "two frames exchanged": (lambda r: swap(first_packed(r)), "don't match their checksum"),
    "no source": (lambda r: r.pop("source"), "not valid"),
}


def swap(record: dict[str, Any]) -> None:
    lengths = record["frame_bytes"]
    lengths[0], lengths[-1] = lengths[-1], lengths[0]
    if lengths[0] == lengths[-1]:
        record["sums"].reverse()


@pytest.mark.parametrize("name", list(BAD_RECORDS))
def test_bad_records(folder: Path, name: str) -> None:
    edit, said = BAD_RECORDS[name]
    path = files(folder)[0]
    change(path, edit)
    assert re.search(said, refused(folder, path))


def test_a_header_without_its_record_is_bytes_and_no_weights(folder: Path) -> None:
    path = files(folder)[0]
    change(path, lambda header: header.pop("__metadata__"), packed=False)
    assert "has shape" in refused(folder, path)


def test_files_in_each_other_s_place(folder: Path) -> None:
    first, second = files(folder)[:2]
    os.replace(first, folder / "aside")
    os.replace(second, first)
    os.replace(folder / "aside", second)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.tensor
    assert first.name in caught.value.file or second.name in caught.value.file
    assert not scan_one(folder).complete
