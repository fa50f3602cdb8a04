"""Packs small checkpoints."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from loader.files.safetensors import INDEX_NAME, read_header
from loader.files.weight_files import PACKED_DIR, source_of
from loader.models.catalog import scan_one
from loader.packing.packer import pack_file


def pack_checkpoint(folder: Path) -> list[int]:
    """As `hearth pack` does, without its partial folder. Returns what on_bytes was told."""
    told: list[int] = []
    (folder / PACKED_DIR).mkdir(exist_ok=True)
    for info in scan_one(folder).files:
        with ExitStack() as stack:
            fd = os.open(folder / info.name, os.O_RDONLY)
            stack.callback(os.close, fd)
            header = read_header(fd, info.name)
            pack_file(fd, header, source_of(info, header), folder / PACKED_DIR / info.name, told.append)
    if (folder / INDEX_NAME).exists():
        shutil.copy(folder / INDEX_NAME, folder / PACKED_DIR / INDEX_NAME)
    return told
