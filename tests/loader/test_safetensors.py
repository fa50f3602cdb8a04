from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import CheckpointError, FileTooShort
from loader.files.safetensors import Header, TensorRef, read_header
from tests.loader.checkpoints import safetensors_bytes

GOOD = {"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (5,), bytes(10)), "scalar": ("I64", (), bytes(8))}


def parse(path: Path, data: bytes) -> Header:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path.name)
    finally:
        os.close(fd)


def with_header(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_reads_places_of_tensors(tmp_path: Path) -> None:
    data = safetensors_bytes(GOOD)
    header = parse(tmp_path / "f.safetensors", data)
    start = len(data) - 42
    assert header.tensors == (
        TensorRef("f.safetensors", "a", "F32", (2, 3), start, 24),
        TensorRef("f.safetensors", "b", "BF16", (5,), start + 24, 10),
        TensorRef("f.safetensors", "scalar", "I64", (), start + 34, 8),
    )
    assert header.file_bytes == len(data)


@pytest.mark.parametrize("kept", [0, 7, 8, 40])
def test_cut_in_the_header(tmp_path: Path, kept: int) -> None:
    with pytest.raises(FileTooShort, match=r"f\.safetensors"):
        parse(tmp_path / "f.safetensors", safetensors_bytes(GOOD)[:kept])


@pytest.mark.parametrize(("missing", "tensor"), [(1, "scalar"), (9, "b"), (20, "a")])
def test_truncation_names_the_tensor_that_is_cut(tmp_path: Path, missing: int, tensor: str) -> None:
    with pytest.raises(FileTooShort) as caught:
        parse(tmp_path / "f.safetensors", safetensors_bytes(GOOD)[:-missing])
    assert (caught.value.file, caught.value.tensor) == ("f.safetensors", tensor)


def test_surplus_bytes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="1 bytes after the last tensor"):
        parse(tmp_path / "f.safetensors", safetensors_bytes(GOOD) + b"x")


@pytest.mark.parametrize(
    ("header", "tensor", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a", "don't hold"),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "a", "unknown dtype 'F33'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a", "negative dimension"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "a", "don't hold"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "a", "leaves a gap"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "a", "data_offsets"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "a", "shape"),
        ({"a": 3}, "a", "bad header entry"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            "b",
            "overlaps",
        ),
        ([1], None, "not valid JSON"),
    ],
)
def test_bad_headers_name_the_tensor(tmp_path: Path, header: object, tensor: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(tmp_path / "f.safetensors", with_header(header, bytes(8)))
    assert (caught.value.file, caught.value.tensor) == ("f.safetensors", tensor)


def test_header_length_limits(tmp_path: Path) -> None:
    for length in (0, 1, 1 << 40):
        with pytest.raises(CheckpointError, match="out of range"):
            parse(tmp_path / "f.safetensors", length.to_bytes(8, "little") + bytes(64))


@settings(max_examples=300, deadline=None)
@given(bit=st.integers(0, 8 * 200 - 1))
def test_any_flipped_header_bit_is_harmless_or_an_error(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    """Whatever a flipped bit makes of the header, the tensors that come out lie inside the file and never overlap."""
    data = bytearray(safetensors_bytes(GOOD))
    data[bit // 8] ^= 1 << (bit % 8)
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    try:
        header = parse(path, bytes(data))
    except CheckpointError as error:
        named = error.file
    else:
        named = "flipped.safetensors"
        check_places(header, len(data))
    assert named == "flipped.safetensors"


def check_places(header: Header, file_bytes: int) -> None:
    end = 0
    for tensor in sorted(header.tensors, key=lambda t: t.offset_bytes):
        assert end <= tensor.offset_bytes <= tensor.offset_bytes + tensor.num_bytes <= file_bytes
        end = tensor.offset_bytes + tensor.num_bytes
