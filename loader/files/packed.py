"""Defines the format of packed weight files, and how the metadata in their safetensors header describes packed tensors.

The file is an ordinary safetensors file. A packed tensor keeps its name but has the dtype U8. Its bytes are frames
(loader.files.frame) end to end, which begin at a multiple of FRAME_ALIGN_BYTES of the file. Each frame holds whole rows of the
tensor or, if rows are very long, FRAME_VALUES values. A tensor that is not bfloat16, or that would hardly become smaller, is stored
unchanged and is read in frames of equal length.

Every frame has a checksum of its bytes in the file (codec.sum_of), which loads compare. Every tensor has a SHA-256 of its unpacked
bytes, by which a verification proves that they are the original ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from loader.errors import CheckpointError, shortened
from loader.files import frame

MAX_DIMENSIONS, MAX_DIMENSION = 8, 1 << 48  # the product of a long list of large numbers would take forever
METADATA_KEY = "hearthd.packed"
VERSION = 1
PACKED_DTYPE, STORED_DTYPE = "BF16", "U8"
WORD_ROWS = 8  # that formats.relayout.Relayout.rows divides
_HEX = frozenset("0123456789abcdef")


class Source(msgspec.Struct, frozen=True):
    """The identity of the plain file that a packed file was made from: size, modification time, and a hash of the header. A load
    uses the packed file only if the plain file still has this identity. header: the BLAKE2b hash, 16 bytes in hex."""

    size_bytes: int
    mtime_ns: int
    header: str


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of one tensor in a packed file's metadata. The file holds the tensor as frames, which are pieces that can
    each be decoded alone. sha256: SHA-256 of the unpacked bytes, in hex. sums: the checksum of each frame, 16 hex digits.

    shape: the shape of the unpacked tensor. frame_bytes: the length of each frame in bytes. Both are set only if the tensor is
    packed, not if it is stored unchanged."""

    sha256: str
    sums: list[str]
    shape: list[int] | None = None
    frame_bytes: list[int] = []


class Record(msgspec.Struct, frozen=True):
    version: int
    source: Source
    tensors: dict[str, TensorRecord]


@dataclass(slots=True, frozen=True)
class Frame:
    """A frame, a piece of a tensor in a packed file that can be decoded alone: bytes [begin, end) of the file, which hold
    `num_bytes` bytes of the unpacked tensor, from its byte `first_byte` on. sum: checksum of the frame's bytes in the file. packed:
    whether these bytes must be decoded; if not, they are the tensor's own bytes."""

    begin: int
    end: int
    first_byte: int
    num_bytes: int
    sum: int
    packed: bool


class _Version(msgspec.Struct):
    version: int


_version_decoder = msgspec.json.Decoder(_Version)
_decoder = msgspec.json.Decoder(Record)


def frame_values(shape: tuple[int, ...] | list[int], dtype: str) -> int:
    """Returns how many values of a tensor each frame (a piece of a packed file that can be decoded alone) holds; the last frame may
    hold fewer. It is as many whole rows as fit into FRAME_VALUES values, or FRAME_VALUES if a row is longer than that. For int32
    tensors (dtype I32) the number of rows is a multiple of 8 where possible, since loads may rearrange 8 rows together."""
    width = shape[-1] if shape else 1
    if not 0 < width <= frame.FRAME_VALUES:
        return frame.FRAME_VALUES
    num_rows = frame.FRAME_VALUES // width
    if dtype == "I32":
        num_rows = num_rows // WORD_ROWS * WORD_ROWS or num_rows
    return num_rows * width


def read_record(text: str, file: str) -> Record:
    """Parses the description of the packed tensors in a file's metadata. text: the value of METADATA_KEY. file: its name in errors.
    Raises CheckpointError if the text is not valid or is of another version of the format."""
    try:
        found = _version_decoder.decode(text).version
        if found != VERSION:
            raise CheckpointError(file, None, f"packed in version {found} of the format; this build reads version {VERSION}")
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(file, None, f"{METADATA_KEY} in its header is not valid: {error}") from None


def check_shape(shape: Sequence[int], file: str, name: str) -> None:
    """Checks a tensor's shape. Raises CheckpointError, which names file and tensor, for a shape that no tensor can have: a
    dimension is negative or too large, or there are too many dimensions."""
    if any(n < 0 for n in shape):
        raise CheckpointError(file, name, f"negative dimension in shape {shortened(str(list(shape)), 80)}")
    if len(shape) > MAX_DIMENSIONS or any(n > MAX_DIMENSION for n in shape):
        most = f"{MAX_DIMENSIONS} dimensions of up to {MAX_DIMENSION}"
        raise CheckpointError(file, name, f"shape {shortened(str(list(shape)), 80)} is beyond what tensors have ({most})")


def check_record(
    record: TensorRecord, file: str, name: str, dtype: str, shape: tuple[int, ...], begin: int, num_bytes: int
) -> None:
    """Checks the description of a tensor in a packed file's metadata. Raises CheckpointError unless the frames (pieces that can
    each be decoded alone) in `record` cover the tensor's bytes exactly. dtype, shape, num_bytes: those of the tensor in the file's
    header. begin: the tensor's offset in the file, in bytes."""
    own_shape = shape if record.shape is None else record.shape
    check_shape(own_shape, file, name)
    per_frame, lengths = frame_values(own_shape, dtype), record.frame_bytes
    num_frames = -(-math.prod(own_shape) // per_frame)
    fits = len(record.sums) == num_frames
    if record.shape is None:
        fits &= not lengths
    else:
        fits &= dtype == STORED_DTYPE and len(shape) == 1 and len(lengths) == num_frames and min(own_shape, default=1) > 0
        fits &= all(0 < one <= frame.frame_bytes(per_frame, per_frame) and one % frame.FRAME_ALIGN_BYTES == 0 for one in lengths)
        fits &= -begin % frame.FRAME_ALIGN_BYTES + sum(lengths) == num_bytes
    if not fits:
        raise CheckpointError(file, name, f"{METADATA_KEY} does not describe its {num_bytes} bytes at offset {begin}")
    if not all(len(one) == 16 and _HEX.issuperset(one) for one in record.sums):
        raise CheckpointError(file, name, f"{METADATA_KEY} has a checksum that is none")


def frames(record: TensorRecord, begin: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> Iterator[Frame]:
    """Yields the frames of a tensor in a packed file, the pieces that can each be decoded alone, in order. record: the tensor's
    description, which has been checked. begin, num_bytes: the tensor's bytes in the file. shape, dtype: those of the unpacked
    tensor."""
    per_frame = frame_values(shape, dtype)
    if record.shape is None:
        item_bytes = num_bytes // math.prod(shape) if num_bytes else 1
        for place, told in enumerate(record.sums):
            at = place * per_frame * item_bytes
            length = min(per_frame * item_bytes, num_bytes - at)
            yield Frame(begin + at, begin + at + length, at, length, int(told, 16), False)
        return
    at, first, num_values = begin + -begin % frame.FRAME_ALIGN_BYTES, 0, math.prod(shape)
    for length, told in zip(record.frame_bytes, record.sums, strict=True):
        held = min(per_frame, num_values - first)
        yield Frame(at, at + length, first * frame.VALUE_BYTES, held * frame.VALUE_BYTES, int(told, 16), True)
        at, first = at + length, first + held
