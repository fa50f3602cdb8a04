"""Writes packed weight files (loader.files.packed). Needs only numpy, not an engine.

A packed file has the name NAME.incomplete until it is complete. Beside it, NAME.journal has a line for each tensor that has been
written. After an interruption, the next run checks these tensors and continues after the last of them that is undamaged. The header
is written last, into space that was reserved for it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loader.errors import CheckpointError
from loader.files import frame, packed
from loader.files.safetensors import DTYPE_BYTES, Header, TensorRef
from loader.packing import codec
from loader.packing.verifier import OnBytes, frames_of, num_threads, read_bytes

INCOMPLETE, JOURNAL = ".incomplete", ".journal"
BLOCK_BYTES = 4096  # the data begins at a multiple of this
MIN_PACKED_VALUES = 1 << 12  # fewest values of a packed tensor: in smaller ones a frame's head and padding take too large a share
MAX_RATIO = 0.95  # a tensor that shrinks less is stored unchanged
SAMPLES, SAMPLE_VALUES = 4, 1 << 14


class _Done(msgspec.Struct, frozen=True):
    """A line of the journal of a packing, for a tensor that has been written. begin, num_bytes: its offset and length in the new
    file, in bytes. record: its description for the new file's metadata."""

    name: str
    begin: int
    num_bytes: int
    record: packed.TensorRecord


class _Begun(msgspec.Struct, frozen=True):
    """The first line of the journal of a packing: the version of the format and the identity of the plain file that is packed. A
    later run continues the packing only if both are the same."""

    version: int
    source: packed.Source


def pack_file(fd: int, header: Header, source: packed.Source, target: Path, on_bytes: OnBytes) -> None:
    """Packs a plain weight file into `target`, or continues an earlier run that was interrupted. fd, header: the open plain file
    and its header. source: its identity (Source), which the new file records. on_bytes: called with the number of unpacked bytes
    done since the last call. Raises CheckpointError if the plain file ends too early, and OSError if a file cannot be read or
    written."""
    _Packing(fd, header, source, target, on_bytes).run()


def expected_bytes(fd: int, tensor: TensorRef) -> int:
    """Estimates the packed size of a tensor in bytes from a few samples of its values. Returns the tensor's own size if it is to be
    stored unchanged, because it is not bfloat16, has few values, or would hardly become smaller. Raises CheckpointError if the file
    ends too early, and OSError if it cannot be read."""
    num_values = math.prod(tensor.shape)
    if tensor.dtype != packed.PACKED_DTYPE or num_values < MIN_PACKED_VALUES:
        return tensor.num_bytes
    before = after = 0
    sampled = min(SAMPLE_VALUES, num_values)
    for sample in range(SAMPLES):
        at = (num_values - sampled) * sample // (SAMPLES - 1)
        values = read_bytes(fd, tensor, at * frame.VALUE_BYTES, sampled * frame.VALUE_BYTES).view(np.uint16)
        before, after = before + values.nbytes, after + len(codec.encode(values))
    return tensor.num_bytes * after // before if after < MAX_RATIO * before else tensor.num_bytes


def _pieces(tensor: TensorRef) -> list[int]:
    """Returns the lengths in bytes of the pieces into which a tensor is divided for packing. Each piece becomes one frame."""
    num_bytes, whole = tensor.num_bytes, packed.frame_values(tensor.shape, tensor.dtype) * DTYPE_BYTES[tensor.dtype]
    return [whole] * (num_bytes // whole) + ([num_bytes % whole] if num_bytes % whole else [])


class _Packing:
    """The packing of one plain file, described by `fd`, `header` and `source`, into the file `target`. on_bytes: called with the
    number of unpacked bytes done since the last call. `_position`: the offset at which the next byte of the new file is written."""

    def __init__(self, fd: int, header: Header, source: packed.Source, target: Path, on_bytes: OnBytes) -> None:
        self._fd, self._header, self._source, self._on_bytes = fd, header, source, on_bytes
        self._target = target
        self._incomplete = target.with_name(target.name + INCOMPLETE)
        self._journal_path = target.with_name(target.name + JOURNAL)
        self._done: dict[str, _Done] = {}
        self._data_begin = self._header_room()
        self._position = self._data_begin

    def _header_room(self) -> int:
        """Returns the offset in bytes at which the new file's data begins. The space before it is enough for the longest header
        that these tensors can have; the header is written last."""
        longest = {}
        end = 2 * self._header.file_bytes
        for tensor in self._header.tensors:
            num_frames, most = len(_pieces(tensor)), packed.frame_values(tensor.shape, tensor.dtype)
            lengths = [frame.frame_bytes(most, most)] * num_frames
            record = packed.TensorRecord("0" * 64, ["0" * 16] * num_frames, list(tensor.shape), lengths)
            longest[tensor.name] = _Done(tensor.name, end, end, record)
        return -(-(8 + len(self._header_text(longest, 0))) // BLOCK_BYTES) * BLOCK_BYTES

    def run(self) -> None:
        out = os.open(self._incomplete, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take_up(out)
            os.ftruncate(out, self._position)
            with open(self._journal_path, "ab") as journal, ThreadPoolExecutor(num_threads(), "pack") as pool:
                for tensor in self._header.tensors:
                    if tensor.name not in self._done:
                        done = self._pack(tensor, out, pool)
                        self._done[tensor.name] = done
                        journal.write(msgspec.json.encode(done) + b"\n")
                        journal.flush()
            self._write_header(out)
            os.fsync(out)
        finally:
            os.close(out)
        os.replace(self._incomplete, self._target)
        self._journal_path.unlink(missing_ok=True)

    def _take_up(self, out: int) -> None:
        """Continues an earlier run that was interrupted. Keeps the tensors that the run's journal lists, up to the first one that
        is damaged in the new file or out of order, and rewrites the journal with only these. out: descriptor of the new file."""
        with suppress(OSError, msgspec.DecodeError):
            first, *rest = self._journal_path.read_bytes().split(b"\n")
            if msgspec.json.decode(first, type=_Begun) == _Begun(packed.VERSION, self._source):
                for line, tensor in zip(rest[:-1], self._header.tensors, strict=False):  # the last line is empty or incomplete
                    done = msgspec.json.decode(line, type=_Done)
                    if done.name != tensor.name or done.begin != self._position or not _is_there(out, tensor, done):
                        break
                    self._done[done.name] = done
                    self._position = done.begin + done.num_bytes
                    self._on_bytes(tensor.num_bytes)
        lines = [msgspec.json.encode(_Begun(packed.VERSION, self._source)), *map(msgspec.json.encode, self._done.values())]
        self._journal_path.write_bytes(b"\n".join(lines) + b"\n")

    def _pack(self, tensor: TensorRef, out: int, pool: ThreadPoolExecutor) -> _Done:
        packs = expected_bytes(self._fd, tensor) < tensor.num_bytes
        begin = self._position
        if packs:
            self._position += -begin % frame.FRAME_ALIGN_BYTES
        digest = hashlib.sha256()
        lengths: list[int] = []
        sums: list[str] = []
        running: deque[Future[tuple[bytes, int]]] = deque()

        def write_next() -> None:
            written, told = running.popleft().result()
            _write(out, written, self._position)
            self._position += len(written)
            lengths.append(len(written))
            sums.append(f"{told:016x}")

        try:
            offset = 0
            for num_bytes in _pieces(tensor):
                piece = read_bytes(self._fd, tensor, offset, num_bytes)
                offset += num_bytes
                running.append(pool.submit(_encoded if packs else _summed, piece))
                digest.update(piece)
                if len(running) > 2 * num_threads():
                    write_next()
                self._on_bytes(num_bytes)
            while running:
                write_next()
        finally:
            for future in running:
                future.cancel()
        if packs:
            record = packed.TensorRecord(digest.hexdigest(), sums, list(tensor.shape), lengths)
        else:
            record = packed.TensorRecord(digest.hexdigest(), sums)
        return _Done(tensor.name, begin, self._position - begin, record)

    def _header_text(self, all_done: dict[str, _Done], data_begin: int) -> bytes:
        record = packed.Record(packed.VERSION, self._source, {name: done.record for name, done in all_done.items()})
        metadata = msgspec.json.decode(self._header.raw).get("__metadata__") or {}
        header: dict[str, Any] = {"__metadata__": {**metadata, packed.METADATA_KEY: msgspec.json.encode(record).decode()}}
        for tensor in self._header.tensors:
            done = all_done[tensor.name]
            is_packed = done.record.shape is not None
            header[tensor.name] = {
                "dtype": packed.STORED_DTYPE if is_packed else tensor.dtype,
                "shape": [done.num_bytes] if is_packed else list(tensor.shape),
                "data_offsets": [done.begin - data_begin, done.begin + done.num_bytes - data_begin],
            }
        return msgspec.json.encode(header)

    def _write_header(self, out: int) -> None:
        text, room = self._header_text(self._done, self._data_begin), self._data_begin - 8
        if len(text) > room:
            raise CheckpointError(self._target.name, None, f"its header takes {len(text)} bytes, {room} were left for it")
        _write(out, room.to_bytes(8, "little") + text.ljust(room), 0)


def _encoded(piece: Any) -> tuple[bytes, int]:
    encoded = codec.encode(piece.view(np.uint16))
    return encoded, codec.sum_of(np.frombuffer(encoded, np.uint8))


def _summed(piece: Any) -> tuple[bytes, int]:
    return piece.tobytes(), codec.sum_of(piece)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _stored(tensor: TensorRef, done: _Done) -> TensorRef:
    shape = tensor.shape if done.record.shape is None else tuple(done.record.shape)
    return TensorRef(tensor.file, tensor.name, tensor.dtype, shape, done.begin, done.num_bytes, done.record)


def _is_there(fd: int, tensor: TensorRef, done: _Done) -> bool:
    """Returns whether the new file holds a tensor as a line of the journal describes it, with the right checksums. fd: descriptor
    of the new file. tensor: the tensor in the plain file. done: the line."""
    stored = _stored(tensor, done)
    try:
        is_packed = done.record.shape is not None
        shape, dtype = ((done.num_bytes,), packed.STORED_DTYPE) if is_packed else (tensor.shape, tensor.dtype)
        packed.check_record(done.record, tensor.file, tensor.name, dtype, shape, done.begin, done.num_bytes)
        return stored.shape == tensor.shape and all(codec.sum_of(held) == one.sum for one, held in frames_of(fd, stored))
    except CheckpointError:
        return False
