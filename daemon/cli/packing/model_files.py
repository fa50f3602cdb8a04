"""A model's weight files, plain and packed, as used by `pack` and `verify`."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.cli.client import CommandError
from daemon.errors import EXIT_NOT_FOUND

if TYPE_CHECKING:
    from loader.files.packed import Source
    from loader.files.safetensors import Header
    from loader.files.weight_files import FileInfo


@dataclass(slots=True)
class ModelFiles:
    """The weight files of one model. plain: the headers of the unpacked files, by file name relative to the folder. packed: the
    headers of the packed files, in the same way. infos: size and modification time of the plain files, by name. why_not_packed: why
    the packed files cannot be used in place of the plain ones, "" if they can."""

    name: str
    models_dir: Path
    folder: Path
    plain: dict[str, Header] = field(default_factory=dict)
    infos: dict[str, FileInfo] = field(default_factory=dict)  # of the plain files
    packed: dict[str, Header] = field(default_factory=dict)
    why_not_packed: str = ""

    @property
    def plain_bytes(self) -> int:
        """Returns the bytes of all tensors of the model, unpacked."""
        from loader.files.safetensors import DTYPE_BYTES

        headers = self.plain or self.packed
        return sum(math.prod(one.shape) * DTYPE_BYTES[one.dtype] for header in headers.values() for one in header.tensors)

    @property
    def packed_bytes(self) -> int:
        """Returns the bytes of all packed files."""
        return sum(header.file_bytes for header in self.packed.values())

    @property
    def packed_folder(self) -> str:
        return os.path.dirname(self.folder / next(iter(self.packed)))

    def open(self, name: str, stack: ExitStack) -> int:
        fd = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        return fd

    def plain_name(self, name: str) -> str:
        """Returns the name of the plain file from which the packed file `name` was made; "" if that file no longer exists."""
        own = os.path.basename(name)
        return own if own in self.plain else ""

    def source(self, name: str) -> Source:
        from loader.files.weight_files import source_of

        return source_of(self.infos[name], self.plain[name])

    def is_packed_in(self, partial: Path, name: str) -> bool:
        """Returns whether the folder `partial` contains a complete packed form of the plain file `name`, made from that file's
        current content. Raises OSError."""
        from loader.errors import CheckpointError
        from loader.files.safetensors import read_header

        try:
            fd = os.open(partial / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return read_header(fd, name).source == self.source(name)
        except CheckpointError:
            return False
        finally:
            os.close(fd)

    def copy_index(self, partial: Path) -> None:
        from loader.files.safetensors import INDEX_NAME

        if (self.folder / INDEX_NAME).exists():
            shutil.copyfile(self.folder / INDEX_NAME, partial / INDEX_NAME)

    def check_unchanged(self, descriptors: dict[str, int]) -> None:
        """Raises CheckpointError if a plain file has been changed or replaced since its header was read. descriptors: open
        descriptors of the plain files, by name."""
        from loader.errors import CheckpointError

        for name, fd in descriptors.items():
            for stat in (os.fstat(fd), os.stat(self.folder / name)):
                if (stat.st_size, stat.st_mtime_ns) != (self.infos[name].size_bytes, self.infos[name].mtime_ns):
                    raise CheckpointError(name, None, "changed while it was packed; run the same command again")


def find(models_dir: str, name: str) -> ModelFiles:
    """Returns the weight files of the model `name` in the folder `models_dir`, with their headers read. Raises CommandError if
    there is no such model, or if it is incomplete or an adapter. Raises OSError if a file cannot be read."""
    from loader.files.weight_files import PACKED_DIR, read_headers
    from loader.models.catalog import scan

    checkpoint = scan(models_dir).get(name)
    if checkpoint is None:
        message = f"{models_dir} has no model {name!r}."
        raise CommandError(EXIT_NOT_FOUND, {"code": "model_not_found", "message": message, "details": {"model": name}})
    if not checkpoint.complete:
        message = f"{name}: {checkpoint.fault}"
        raise CommandError(1, {"code": "bad_checkpoint", "message": message, "details": {"folder": checkpoint.path}})
    if checkpoint.is_adapter:
        message = f"{name} is a LoRA adapter; only models are packed and verified."
        raise CommandError(1, {"code": "is_adapter", "message": message, "details": {"folder": checkpoint.path}})
    folder = Path(checkpoint.path)
    found = ModelFiles(name, Path(models_dir), folder)
    beside = checkpoint.files[0].name.startswith(f"{PACKED_DIR}/")
    headers = read_headers(folder, PACKED_DIR if beside else "")
    if any(header.source is not None for header in headers.values()):
        found.packed = headers
        return found
    found.plain, found.infos = headers, {info.name: info for info in checkpoint.files}
    if checkpoint.packed_files:
        found.packed = read_headers(folder, PACKED_DIR)
    found.why_not_packed = checkpoint.packed_reason
    return found
