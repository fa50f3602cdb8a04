"""Opens the folder of a LoRA adapter, so that its tensors can be read."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from loader.errors import CheckpointChanged, ReadFailed
from loader.files.safetensors import Header, TensorRef, read_header
from loader.files.weight_files import FileInfo
from loader.models.adapter import WEIGHTS_NAME, Adapter
from loader.models.checked_again import check_unchanged, open_unchanged, scanned_again

_READ_BYTES = 1 << 30  # one system call reads less than 2 GiB


class OpenAdapter:
    """A checked LoRA adapter whose weight file is open. header: the file's header. info: name, size and modification time of the
    file when it was checked. fd: the file's descriptor, which `close` or the end of a `with` closes."""

    def __init__(self, adapter: Adapter, header: Header, info: FileInfo, fd: int) -> None:
        self.adapter, self.header, self._info, self._fd = adapter, header, info, fd

    def read(self, tensor: TensorRef) -> NDArray[np.uint8]:
        """Returns the bytes of a tensor of the adapter, as they are in the file (little-endian, row by row). Raises ReadFailed if
        the drive fails, and CheckpointChanged if the file has become shorter."""
        data = np.empty(tensor.num_bytes, np.uint8)
        left, offset = data.data, tensor.offset_bytes
        while left:
            try:
                done = os.preadv(self._fd, [left[:_READ_BYTES]], offset)
            except OSError as error:
                raise ReadFailed(tensor.file, tensor.name, f"reading at offset {offset}: {error.strerror}") from None
            if not done:
                raise CheckpointChanged(f"{tensor.file}: cut off at {offset} while tensor {tensor.name} was read")
            left, offset = left[done:], offset + done
        return data

    def check_unchanged(self) -> None:
        """Raises CheckpointChanged if the file's size or modification time has changed since the file was checked; the bytes that
        were read may then come from two versions of the file."""
        check_unchanged(self._fd, self._info, "adapter")

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> OpenAdapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_adapter(path: str | Path, fingerprint: str) -> OpenAdapter:
    """Checks a registered adapter's folder again and opens its weight file. fingerprint: the hash of the files with which the
    adapter was registered; "" accepts any files. Raises CheckpointError for files that are not valid, and CheckpointChanged if the
    files differ from the registered ones, are incomplete or cannot be opened."""
    checkpoint = scanned_again(path, fingerprint, "adapter")
    if checkpoint.adapter is None:
        raise CheckpointChanged(f"{path}: is no adapter any more")
    fd = open_unchanged(path, checkpoint.files[0], "adapter")
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # all of it will be read, in many small reads
        header = read_header(fd, WEIGHTS_NAME)
    except BaseException:
        os.close(fd)
        raise
    return OpenAdapter(checkpoint.adapter, header, checkpoint.files[0], fd)
