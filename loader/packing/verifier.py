"""Verifies packed weight files (loader.files.packed): against the plain files that they were made from or, if these are gone, by
the SHA-256 of each tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from loader.errors import CheckpointError
from loader.files.frame import FrameError
from loader.files.packed import Frame
from loader.files.safetensors import TensorRef
from loader.packing import codec

MAX_THREADS = 8

OnBytes = Callable[[int], None]  # called with the number of unpacked bytes done since the last call


def num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def read_bytes(fd: int, tensor: TensorRef, offset: int, num_bytes: int) -> Any:
    """Returns a part of a tensor's bytes as they are in the file: uint8 [num_bytes], writable. fd: descriptor of the file. offset:
    where the part begins, in bytes from the tensor's first byte. Raises CheckpointError if the file ends too early."""
    held = bytearray(num_bytes)
    done = 0
    while done < num_bytes:
        read = os.preadv(fd, [memoryview(held)[done:]], tensor.offset_bytes + offset + done)
        if not read:
            at = tensor.offset_bytes + offset + done
            raise CheckpointError(tensor.file, tensor.name, f"the file ends at offset {at}, {num_bytes - done} bytes too early")
        done += read
    return np.frombuffer(held, np.uint8)


def frames_of(fd: int, tensor: TensorRef) -> Iterator[tuple[Frame, Any]]:
    """Yields the frames of a packed file's tensor (pieces that can each be decoded alone), each with its bytes in the file (uint8).
    fd: descriptor of the file. Raises CheckpointError if the file ends too early."""
    for frame in tensor.frames:
        yield frame, read_bytes(fd, tensor, frame.begin - tensor.offset_bytes, frame.end - frame.begin)


def verify_tensor(fd: int, tensor: TensorRef, plain_fd: int | None, plain: TensorRef | None, on_bytes: OnBytes) -> None:
    """Checks a tensor of a packed file: that every frame (piece of the file) has its recorded checksum and (if there is a plain
    file) decodes to the plain file's bytes, and that all decoded bytes together have the SHA-256 that the packed file records.

    fd: descriptor of the packed file. plain_fd, plain: descriptor of the plain file, and the tensor in it; None: there is no plain
    file. on_bytes: called with the number of decoded bytes since the last call. Raises CheckpointError, which names file, tensor
    and offset, for a tensor that is damaged, and OSError if a file cannot be read."""
    assert tensor.record is not None
    digest = hashlib.sha256()
    running: deque[tuple[Frame, int, Future[Any]]] = deque()

    def take_next() -> None:
        frame, offset, future = running.popleft()
        try:
            content = future.result()
        except FrameError as error:
            raise CheckpointError(tensor.file, tensor.name, f"bytes {frame.begin} to {frame.end} {error}") from None
        digest.update(content)
        if plain is not None and plain_fd is not None:
            original = read_bytes(plain_fd, plain, offset, frame.num_bytes)
            if not np.array_equal(content, original):
                at = int(np.flatnonzero(content != original)[0])
                where = f"{plain.file} has another byte at offset {plain.offset_bytes + offset + at}"
                raise CheckpointError(tensor.file, tensor.name, f"bytes {frame.begin} to {frame.end} are not the original: {where}")
        on_bytes(frame.num_bytes)

    with ThreadPoolExecutor(num_threads(), "verify") as pool:
        offset = 0
        try:
            for frame, held in frames_of(fd, tensor):
                running.append((frame, offset, pool.submit(_decoded, frame, held)))
                offset += frame.num_bytes
                if len(running) > 2 * num_threads():
                    take_next()
            while running:
                take_next()
        finally:
            for _, _, future in running:
                future.cancel()
    if digest.hexdigest() != tensor.record.sha256:
        raise CheckpointError(tensor.file, tensor.name, "is not what was packed: its SHA-256 is another")


def _decoded(frame: Frame, held: Any) -> Any:
    if codec.sum_of(held) != frame.sum:
        raise FrameError("don't match their checksum")
    if not frame.packed:
        return held
    out = np.empty(frame.num_bytes, np.uint8)
    codec.decode(held, out.view(np.uint16))
    return out
