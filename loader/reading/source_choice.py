"""Chooses, for a model that has both plain and packed files, which of them a load reads: those with which the load is expected to
end sooner.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loader.errors import CheckpointError
from loader.files.direct_io import is_cached
from loader.files.regular_file import open_regular
from loader.files.safetensors import read_header
from loader.files.weight_files import FileInfo
from loader.models.catalog import Checkpoint
from loader.reading.read_rates import ReadRates
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder

# A smaller load is over before the choice could matter, and its reads are too few to be measured.
MIN_BYTES = 64 << 20
# Packed files are chosen only if they take at most this share of the time: decoding takes cores from models that are stepping.
MAX_SHARE = 0.95


@dataclass(slots=True, frozen=True)
class Expected:
    """The figures by which a load chooses between plain and packed files. plain_bytes, packed_bytes: sizes of the plain and of the
    packed files, in bytes. plain_cached: whether the page cache holds most of the plain files. read_bytes_per_s: read rate of the
    drive. packed_bytes_per_s: how many bytes of weights per second are read and decoded from packed files."""

    plain_bytes: int
    packed_bytes: int
    plain_cached: bool
    read_bytes_per_s: float
    packed_bytes_per_s: float

    @property
    def plain_s(self) -> float:
        return 0.0 if self.plain_cached else self.plain_bytes / self.read_bytes_per_s

    @property
    def packed_s(self) -> float:
        """The seconds that a load from the packed files takes if none of them is in the page cache."""
        return self.plain_bytes / self.packed_bytes_per_s

    @property
    def wants_packed(self) -> bool:
        return self.packed_s < MAX_SHARE * self.plain_s

    def __str__(self) -> str:
        if self.plain_cached:
            return "read its plain files, which the page cache holds"
        chosen, other = ("packed", "plain") if self.wants_packed else ("plain", "packed")
        seconds = {"packed": self.packed_s, "plain": self.plain_s}
        return (
            f"read its {chosen} files: {seconds[chosen]:.2f} s expected, {seconds[other]:.2f} s for the {other} ones "
            f"({self.plain_bytes / 1e9:.2f} GB plain at {self.read_bytes_per_s / 1e9:.1f} GB/s; "
            f"{self.packed_bytes / 1e9:.2f} GB packed, read and decoded to weights at {self.packed_bytes_per_s / 1e9:.1f} GB/s)"
        )


class SourceChoice:
    """Chooses whether a load reads a model's packed files or its plain ones: those with which the load is expected to end sooner.
    rates: the drives' read rates. ring: the staging slots (buffers of host memory) with which rates are measured. decoder: returns
    the decoder of packed files. reason: a sentence for the log that says what was chosen and why; "": there was nothing to
    choose."""

    def __init__(self, rates: ReadRates, ring: StagingRing, decoder: Callable[[], Decoder]) -> None:
        self._rates, self._ring, self._decoder = rates, ring, decoder
        self.reason = ""

    def wants_packed(self, checkpoint: Checkpoint) -> bool:
        plain_bytes = sum(info.size_bytes for info in checkpoint.files)
        if plain_bytes < MIN_BYTES:
            self.reason = "read its plain files: it is too small for packed ones to matter"
            return False
        try:
            with ExitStack() as stack:
                expected = self._expected(checkpoint, stack)
        except (OSError, ValueError, CheckpointError) as error:
            self.reason = f"read its plain files: the packed ones could not be tried ({error})"
            return False
        self.reason = str(expected)
        return expected.wants_packed

    def _expected(self, checkpoint: Checkpoint, stack: ExitStack) -> Expected:
        plain, packed = (self._open(checkpoint, infos, stack) for infos in (checkpoint.files, checkpoint.packed_files))
        largest = max(checkpoint.packed_files, key=lambda info: info.size_bytes)
        tensors = read_header(packed[largest.name], largest.name).tensors
        frame = next((frame for tensor in tensors if tensor.is_packed for frame in tensor.frames), None)
        if frame is None:
            raise ValueError(f"nothing in {largest.name} is packed")
        return Expected(
            sum(info.size_bytes for info in checkpoint.files),
            sum(info.size_bytes for info in checkpoint.packed_files),
            _are_cached(plain.values()),
            self._rates.read_bytes_per_s(packed[largest.name], self._ring),
            self._rates.packed_bytes_per_s(packed[largest.name], frame, self._decoder(), self._ring),
        )

    @staticmethod
    def _open(checkpoint: Checkpoint, infos: Iterable[FileInfo], stack: ExitStack) -> dict[str, int]:
        descriptors = {}
        for info in infos:
            descriptors[info.name] = open_regular(Path(checkpoint.path) / info.name)
            stack.callback(os.close, descriptors[info.name])
        return descriptors


def _are_cached(descriptors: Iterable[int]) -> bool:
    """Returns whether the page cache holds most of the bytes of the files with these descriptors."""
    cached = total = 0
    for fd in descriptors:
        size = os.fstat(fd).st_size
        total += size
        cached += size * is_cached(fd, 0, size)
    return 2 * cached > total
