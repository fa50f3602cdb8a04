"""Reads a checkpoint's tensors, in file order, into a model's weight range.

Reads of the engine's dtype land where they belong; others pass through a small staging buffer and are converted piece by piece.
All descriptors are opened before the first byte is read, so files that are replaced or deleted meanwhile can't mix with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from loader import sizing
from loader.catalog import Checkpoint, scan_one
from loader.errors import CheckpointChanged, CheckpointError
from loader.hf_config import ModelShape
from loader.safetensors import Header, TensorRef, read_header

READ_BYTES = 8 << 20  # between two looks at `cancelled`
# Elements converted at a time: torch runs that many without waking its thread pool, which belongs to the model that is stepping.
CONVERT_ELEMENTS = 32768

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ReadCancelled(Exception):
    """`cancelled()` became true."""


@dataclass(slots=True)
class OpenCheckpoint:
    """A checked checkpoint with every weight file held open."""

    checkpoint: Checkpoint
    shape: ModelShape
    headers: dict[str, Header]
    descriptors: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for header in self.headers.values() for tensor in header.tensors)


def open_checkpoint(path: str | Path, fingerprint: str, stack: ExitStack) -> OpenCheckpoint:
    """Checks the folder again and opens its files; `stack` closes them. fingerprint: what was registered ("" to accept any).

    Raises CheckpointError (permanent) or CheckpointChanged (files differ from those registered, or are incomplete again).
    """
    try:
        checkpoint = scan_one(path)
    except OSError as error:
        raise CheckpointChanged(f"{path}: {error.strerror}") from None
    if checkpoint.failure is not None:
        raise checkpoint.failure
    if not checkpoint.complete or checkpoint.shape is None:
        raise CheckpointChanged(f"{path}: incomplete: {checkpoint.reason}")
    if fingerprint and checkpoint.fingerprint != fingerprint:
        raise CheckpointChanged(f"{path}: files changed since the model was registered")
    headers, descriptors = {}, {}
    for info in checkpoint.files:
        try:
            fd = os.open(Path(path) / info.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointChanged(f"{info.name}: {error.strerror}") from None
        stack.callback(os.close, fd)
        _check_unchanged(fd, info.name, info.size_bytes, info.mtime_ns)
        headers[info.name], descriptors[info.name] = read_header(fd, info.name), fd
    return OpenCheckpoint(checkpoint, checkpoint.shape, headers, descriptors)


def stream_weights(
    source: OpenCheckpoint,
    dtype: str,
    memory: memoryview,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> int:
    """Fills `memory` (the weight range, laid out by sizing.weight_layout) and returns the bytes read.

    Raises CheckpointError naming file and tensor, CheckpointChanged, or ReadCancelled.
    """
    slots = {slot.name: slot for slot in sizing.weight_layout(source.shape, dtype)}
    target_dtype = getattr(torch, dtype)
    total = source.num_bytes
    done = 0
    for file, header in source.headers.items():
        fd = source.descriptors[file]
        for tensor in header.tensors:
            slot = slots.pop(tensor.name, None)
            if slot is None:  # a tensor that follows from others; open_checkpoint has refused all the rest
                done += tensor.num_bytes
                continue
            if slot.shape != tensor.shape:
                raise CheckpointError(file, tensor.name, f"has shape {list(tensor.shape)}, expected {list(slot.shape)}")
            place = memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
            if _TORCH[tensor.dtype] == target_dtype:
                pieces = _read_pieces(fd, tensor, place)
            else:
                pieces = _convert_pieces(fd, tensor, place, target_dtype)
            for num_bytes in pieces:
                done += num_bytes
                progress(done, total)
                if cancelled():
                    raise ReadCancelled(f"{file}: read of tensor {tensor.name} was cancelled")
    for name in slots:
        raise CheckpointError(", ".join(source.headers), name, "missing: config.json asks for it")
    for info in source.checkpoint.files:
        _check_unchanged(source.descriptors[info.name], info.name, info.size_bytes, info.mtime_ns)
    return done


def _check_unchanged(fd: int, file: str, size_bytes: int, mtime_ns: int) -> None:
    stat = os.fstat(fd)
    if (stat.st_size, stat.st_mtime_ns) != (size_bytes, mtime_ns):
        raise CheckpointChanged(f"{file}: changed since the model was registered")


def _read_exactly(fd: int, tensor: TensorRef, place: memoryview, offset_bytes: int) -> None:
    """preadv releases the GIL, so models that are ready go on stepping."""
    position = 0
    while position < len(place):
        num = os.preadv(fd, [place[position:]], tensor.offset_bytes + offset_bytes + position)
        if num == 0:
            raise CheckpointError(tensor.file, tensor.name, f"the file ends {len(place) - position} bytes too early")
        position += num


def _read_pieces(fd: int, tensor: TensorRef, place: memoryview) -> Iterator[int]:
    for start in range(0, tensor.num_bytes, READ_BYTES):
        piece = place[start : start + READ_BYTES]
        _read_exactly(fd, tensor, piece, start)
        yield len(piece)


def _convert_pieces(fd: int, tensor: TensorRef, place: memoryview, target_dtype: torch.dtype) -> Iterator[int]:
    source_dtype = _TORCH[tensor.dtype]
    staging = bytearray(min(tensor.num_bytes, READ_BYTES))
    for start in range(0, tensor.num_bytes, READ_BYTES):
        piece = memoryview(staging)[: min(READ_BYTES, tensor.num_bytes - start)]
        _read_exactly(fd, tensor, piece, start)
        read = torch.frombuffer(piece, dtype=source_dtype)
        first = start // source_dtype.itemsize * target_dtype.itemsize
        held = torch.frombuffer(place[first : first + read.numel() * target_dtype.itemsize], dtype=target_dtype)
        for at in range(0, read.numel(), CONVERT_ELEMENTS):
            held[at : at + CONVERT_ELEMENTS].copy_(read[at : at + CONVERT_ELEMENTS])
        yield len(piece)
