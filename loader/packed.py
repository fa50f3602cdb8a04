"""What a packed weight file says of its tensors, in the metadata of its safetensors header.

The file is a safetensors file like any other. A packed tensor is one of bytes (U8) under its own name: frames (loader.frame) end to
end, each of whole rows, the first on the next multiple of FRAME_ALIGN_BYTES of the file. A tensor that is no bfloat16, or would
not become smaller, is what it was, and read in frames of the same number of bytes. Every frame has a checksum of its bytes as they
are in the file (codec.sum_of, which loads compare), every tensor a SHA-256 of its bytes as they were before (which proves it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from loader import frame
from loader.errors import CheckpointError, shortened

MAX_DIMENSIONS, MAX_DIMENSION = 8, 1 << 48  # the product of a long list of large numbers would take for ever
METADATA_KEY = "hearthd.packed"
VERSION = 1
PACKED_DTYPE, STORED_DTYPE = "BF16", "U8"
_HEX = frozenset("0123456789abcdef")


class Source(msgspec.Struct, frozen=True):
    """The file that was packed, as the catalog knows it; header: BLAKE2b of its header, 16 bytes in hex."""

    size_bytes: int
    mtime_ns: int
    header: str


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """sha256: of the tensor's bytes before; sums: 16 hex digits a frame. Of packed ones also their shape and frames' lengths."""

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
    """Bytes [begin, end) of the file, which hold `num_bytes` of the tensor. packed: they are to be decoded; sum: their checksum."""

    begin: int
    end: int
    num_bytes: int
    sum: int
    packed: bool


class _Version(msgspec.Struct):
    version: int


_version_decoder = msgspec.json.Decoder(_Version)
_decoder = msgspec.json.Decoder(Record)


def frame_values(shape: tuple[int, ...] | list[int]) -> int:
    """Of all frames but a tensor's last one: whole rows, as many as FRAME_VALUES holds; parts of rows that are longer."""
    width = shape[-1] if shape else 1
    return frame.FRAME_VALUES // width * width if 0 < width <= frame.FRAME_VALUES else frame.FRAME_VALUES


def read_record(text: str, file: str) -> Record:
    """The value of METADATA_KEY. Raises CheckpointError."""
    try:
        found = _version_decoder.decode(text).version
        if found != VERSION:
            raise CheckpointError(file, None, f"packed in version {found} of the format; this build reads version {VERSION}")
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(file, None, f"{METADATA_KEY} in its header is not valid: {error}") from None


def check_shape(shape: Sequence[int], file: str, name: str) -> None:
    """Raises CheckpointError where no tensor has such a shape."""
    if any(n < 0 for n in shape):
        raise CheckpointError(file, name, f"negative dimension in shape {shortened(str(list(shape)), 80)}")
    if len(shape) > MAX_DIMENSIONS or any(n > MAX_DIMENSION for n in shape):
        most = f"{MAX_DIMENSIONS} dimensions of up to {MAX_DIMENSION}"
        raise CheckpointError(file, name, f"shape {shortened(str(list(shape)), 80)} is beyond what tensors have ({most})")


def check_record(
    record: TensorRecord, file: str, name: str, dtype: str, shape: tuple[int, ...], begin: int, num_bytes: int
) -> None:
    """The frames are as long as the tensor. dtype, shape, num_bytes: as the header has them; begin: in the file. Raises
    CheckpointError."""
    own_shape = shape if record.shape is None else record.shape
    check_shape(own_shape, file, name)
    per_frame, lengths = frame_values(own_shape), record.frame_bytes
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


def frames(record: TensorRecord, begin: int, num_bytes: int, shape: tuple[int, ...]) -> Iterator[Frame]:
    """Of a record that was checked, in order. shape: the tensor's own; begin, num_bytes: of what is in the file."""
    per_frame = frame_values(shape)
    if record.shape is None:
        item_bytes = num_bytes // math.prod(shape) if num_bytes else 1
        for place, told in enumerate(record.sums):
            at = place * per_frame * item_bytes
            length = min(per_frame * item_bytes, num_bytes - at)
            yield Frame(begin + at, begin + at + length, length, int(told, 16), False)
        return
    at, left = begin + -begin % frame.FRAME_ALIGN_BYTES, math.prod(shape)
    for length, told in zip(record.frame_bytes, record.sums, strict=True):
        num_values = min(per_frame, left)
        yield Frame(at, at + length, num_values * frame.VALUE_BYTES, int(told, 16), True)
        at, left = at + length, left - num_values
