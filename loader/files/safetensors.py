"""Reads the headers of safetensors files. Such a file consists of 8 bytes with the header's length (little-endian), the header in
JSON, and the tensors' bytes end to end. This module reads no tensor data.

Format: https://github.com/huggingface/safetensors#format; loader.files.packed describes what hearthd adds to it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from loader.errors import CheckpointError, FileTooShort
from loader.files import packed
from loader.files.regular_file import read_regular

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Tensors are counted before anything is parsed: the Python objects of a header take up to twenty times its size, and CPython 3.11
# may hang where memory runs out within an exception. The largest checkpoints have some 200,000 tensors in some 100 files.
MAX_TENSORS_PER_FILE, MAX_TENSORS = 200_000, 500_000
QUOTES_PER_TENSOR, QUOTES_PER_INDEX_ENTRY = 10, 4
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# dtype -> bytes of an element; types of less than a byte are left out on purpose
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(slots=True, frozen=True)
class TensorRef:
    """The location of a tensor in its file. file: the file's name inside the checkpoint's folder. offset_bytes: offset from the
    start of the file. num_bytes: the tensor's length in the file. record: the tensor's description in the metadata of a packed
    file; None: the file is plain. In a packed file dtype and shape are those of the unpacked tensor."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    record: packed.TensorRecord | None = None

    @property
    def is_packed(self) -> bool:
        return self.record is not None and self.record.shape is not None

    @property
    def frames(self) -> Iterable[packed.Frame]:
        """The pieces (frames) of a packed file's tensor, each of which can be decoded alone, in order; () for a tensor of a plain
        file."""
        return (
            packed.frames(self.record, self.offset_bytes, self.num_bytes, self.shape, self.dtype) if self.record is not None else ()
        )


@dataclass(slots=True, frozen=True)
class Header:
    """The parsed header of a file. tensors: the file's tensors, in their order in the file. raw: the JSON bytes, for fingerprints.
    file_bytes: the length of the whole file by the header. source: the identity of the plain file that this one was packed from;
    None: this file is plain."""

    tensors: tuple[TensorRef, ...]
    raw: bytes
    file_bytes: int
    source: packed.Source | None = None


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_index_decoder = msgspec.json.Decoder(_Index)


def parse_header(raw: bytes, file: str) -> Header:
    """Parses the header of a safetensors file. raw: its JSON part. file: the file's name, for errors. Raises CheckpointError if the
    header is not valid, or if tensors overlap or have gaps between them."""
    if raw.count(b'"') > QUOTES_PER_TENSOR * MAX_TENSORS_PER_FILE:
        raise CheckpointError(file, None, f"its header describes more than {MAX_TENSORS_PER_FILE} tensors")
    try:
        entries = _header_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(file, None, f"header is not valid JSON: {error}") from None
    record = _packing(entries.pop("__metadata__", None), file)
    data_start = 8 + len(raw)
    found: list[tuple[int, int, str, _Entry]] = []
    for name, body in entries.items():
        try:
            entry = _entry_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(file, name, f"bad header entry: {error}") from None
        packed.check_shape(entry.shape, file, name)
        size = DTYPE_BYTES.get(entry.dtype)
        if size is None:
            raise CheckpointError(file, name, f"unknown dtype {entry.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        begin, end = entry.data_offsets
        expected = math.prod(entry.shape) * size
        if begin < 0 or end - begin != expected:
            raise CheckpointError(
                file, name, f"data_offsets [{begin}, {end}] don't hold {entry.dtype} {entry.shape} ({expected} bytes)"
            )
        found.append((begin, end, name, entry))
    found.sort(key=lambda item: item[:2])
    tensors = []
    position = 0
    for begin, end, name, entry in found:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap after the tensor before it"
            raise CheckpointError(file, name, f"data starts at {begin}, {what} (expected {position})")
        tensor = TensorRef(file, name, entry.dtype, tuple(entry.shape), data_start + begin, end - begin)
        tensors.append(tensor if record is None else _with_record(tensor, record.tensors.pop(name, None)))
        position = end
    if record is None:
        return Header(tuple(tensors), raw, data_start + position)
    for name in record.tensors:
        raise CheckpointError(file, name, f"{packed.METADATA_KEY} describes it, but it is not in the file")
    return Header(tuple(tensors), raw, data_start + position, record.source)


def _packing(metadata: msgspec.Raw | None, file: str) -> packed.Record | None:
    """Returns the description of packed tensors in the header's metadata; None for a plain file. metadata: the value of
    `__metadata__`; None: the header has none. Raises CheckpointError for a description that is not valid."""
    if metadata is None or packed.METADATA_KEY.encode() not in bytes(metadata):
        return None
    try:
        text = msgspec.json.decode(metadata, type=dict[str, str]).get(packed.METADATA_KEY)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(file, None, f"__metadata__ is not valid: {error}") from None
    return None if text is None else packed.read_record(text, file)


def _with_record(tensor: TensorRef, record: packed.TensorRecord | None) -> TensorRef:
    if record is None:
        raise CheckpointError(tensor.file, tensor.name, f"{packed.METADATA_KEY} does not describe it")
    packed.check_record(record, tensor.file, tensor.name, tensor.dtype, tensor.shape, tensor.offset_bytes, tensor.num_bytes)
    if record.shape is None:
        return replace(tensor, record=record)
    return replace(tensor, record=record, dtype=packed.PACKED_DTYPE, shape=tuple(record.shape))


def read_header(fd: int, file: str) -> Header:
    """Reads and checks the header of an open file, and checks that the file is exactly as long as the header says.

    Raises FileTooShort, which names the first tensor that is cut off, or CheckpointError for any other fault."""
    file_bytes = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise FileTooShort(file, None, f"{file_bytes} bytes, too short for a safetensors header")
    header_bytes = int.from_bytes(prefix, "little")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise CheckpointError(file, None, f"header length {header_bytes} is out of range (2 to {MAX_HEADER_BYTES})")
    if 8 + header_bytes > file_bytes:
        raise FileTooShort(file, None, f"{file_bytes} bytes, but its header alone is {header_bytes} bytes")
    header = parse_header(os.pread(fd, header_bytes, 8), file)
    if header.file_bytes > file_bytes:
        cut = next(t for t in header.tensors if t.offset_bytes + t.num_bytes > file_bytes)
        raise FileTooShort(file, cut.name, f"cut off: the file has {file_bytes} bytes, its header says {header.file_bytes}")
    if header.file_bytes < file_bytes:
        last = header.tensors[-1].name if header.tensors else None
        raise CheckpointError(
            file, last, f"{file_bytes - header.file_bytes} bytes after the last tensor; its header says {header.file_bytes}"
        )
    return header


def read_index(folder: Path) -> dict[str, str]:
    """Returns the index of a checkpoint, tensor name -> file name, from the file model.safetensors.index.json in the folder. Raises
    CheckpointError for an index that is not valid, and OSError if it cannot be read."""
    return parse_index(read_regular(folder / INDEX_NAME, MAX_HEADER_BYTES))


def parse_index(text: bytes) -> dict[str, str]:
    """Returns the index of a checkpoint, tensor name -> file name, from the text of the index file. Raises CheckpointError for a
    text that is no index, and for a file name that leads out of the folder."""
    if text.count(b'"') > QUOTES_PER_INDEX_ENTRY * MAX_TENSORS:
        raise CheckpointError(INDEX_NAME, None, f"names more than {MAX_TENSORS} tensors")
    try:
        weight_map = _index_decoder.decode(text).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(INDEX_NAME, None, f"not a valid index: {error}") from None
    for tensor, file in weight_map.items():
        if "/" in file or "\\" in file or "\0" in file or file.startswith(".") or not file.endswith(".safetensors"):
            raise CheckpointError(INDEX_NAME, tensor, f"file name {file!r} is not a plain .safetensors name")
    return weight_map


def check_index(weight_map: dict[str, str], headers: dict[str, Header]) -> None:
    """Checks that the index and the files agree on which file each tensor is in. weight_map: tensor name -> file name. headers:
    file name -> header. Raises CheckpointError, which names file and tensor, if they do not."""
    where = {tensor.name: file for file, header in headers.items() for tensor in header.tensors}
    for tensor, file in weight_map.items():
        actual = where.get(tensor)
        if actual is None:
            raise CheckpointError(file, tensor, f"named by {INDEX_NAME} but not in the file")
        if actual != file:
            raise CheckpointError(file, tensor, f"{INDEX_NAME} names this file, but the tensor is in {actual}")
    for tensor, file in where.items():
        if tensor not in weight_map:
            raise CheckpointError(file, tensor, f"in the file but not in {INDEX_NAME}")
