"""Which files of a model's folder hold its weights: plain ones in the folder itself, packed ones (loader.packed) in `packed/`.

Packed files have the names of those they were made from, and their own copy of the index. Where both are there the plain ones are
the model, and the packed ones another way to read it, as long as they were made from those very files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config.regular_file import open_regular
from loader.errors import CheckpointError, shortened
from loader.packed import Source
from loader.safetensors import INDEX_NAME, MAX_TENSORS, SINGLE_NAME, Header, check_index, read_header, read_index

PACKED_DIR = "packed"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")  # that people try


class MissingFile(Exception):
    """It may still come."""


@dataclass(slots=True, frozen=True)
class FileInfo:
    """One weight file as seen by the scan. name: below the model's folder."""

    name: str
    size_bytes: int
    mtime_ns: int


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files of a folder, sorted, and the index that names them (None: one file). Raises CheckpointError, OSError."""
    if (folder / INDEX_NAME).exists():
        weight_map = read_index(folder)
        return sorted(set(weight_map.values())), weight_map
    return [SINGLE_NAME], None


def read_headers(folder: Path, below: str = "") -> dict[str, Header]:
    """Checked headers of all weight files, by their name below the folder. below: PACKED_DIR for the packed ones. Raises
    MissingFile, CheckpointError, OSError."""
    names, weight_map = weight_files(folder / below)
    headers: dict[str, Header] = {}
    num_tensors = 0
    for name in names:
        file = os.path.join(below, name)
        try:
            fd = open_regular(folder / file)
        except FileNotFoundError:
            wanted = next((tensor for tensor, at in (weight_map or {}).items() if at == name), None)
            missing = f"{shortened(file)} is missing (it holds tensor {shortened(wanted)})" if wanted else _no_weights(folder)
            raise MissingFile(missing) from None
        try:
            headers[file] = read_header(fd, file)
            num_tensors += len(headers[file].tensors)
            if num_tensors > MAX_TENSORS:
                raise CheckpointError(file, None, f"with it the files hold more than {MAX_TENSORS} tensors")
        finally:
            os.close(fd)
    if weight_map is not None:
        check_index({tensor: os.path.join(below, name) for tensor, name in weight_map.items()}, headers)
    return headers


def _no_weights(folder: Path) -> str:
    other = min((name for name in os.listdir(folder) if name.endswith(OTHER_FORMATS)), default="")
    instead = (
        f"; {shortened(other)} is, but weights are read from safetensors alone: download or convert them as such" if other else ""
    )
    return f"neither {SINGLE_NAME} nor {INDEX_NAME} is there{instead}"


def is_packed_only(folder: Path) -> bool:
    """There are packed files, and of the plain ones none. Raises CheckpointError, OSError."""
    if not (folder / PACKED_DIR).is_dir():
        return False
    return not any((folder / name).exists() for name in weight_files(folder)[0])


def packed_files(folder: Path) -> list[FileInfo]:
    """What could matter of the packed folder, as a rescan compares it."""
    found = []
    try:
        for entry in os.scandir(folder / PACKED_DIR):
            if entry.name.endswith((".safetensors", ".json")) and not entry.name.startswith(".") and entry.is_file():
                stat = entry.stat()
                found.append(FileInfo(f"{PACKED_DIR}/{entry.name}", stat.st_size, stat.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda info: info.name)


def source_of(info: FileInfo, header: Header) -> Source:
    """What a packed file says of the plain one it was made from."""
    return Source(info.size_bytes, info.mtime_ns, hashlib.blake2b(header.raw, digest_size=16).hexdigest())


def why_not_packed(plain: Mapping[str, Header], infos: Mapping[str, FileInfo], packed: Mapping[str, Header]) -> str:
    """Why packed files can't stand for the plain ones beside them; "" where they can. All by their names below the folder."""
    if {os.path.join(PACKED_DIR, name) for name in plain} != set(packed):
        return "they are not as many files"
    for name, header in plain.items():
        there = packed[os.path.join(PACKED_DIR, name)]
        if there.source != source_of(infos[name], header):
            return f"they were made from another {name}"
        if {(one.name, one.dtype, one.shape) for one in header.tensors} != {
            (one.name, one.dtype, one.shape) for one in there.tensors
        }:
            return f"their {name} holds other tensors"
    return ""


def read_packed(folder: Path, plain: Mapping[str, Header], infos: Mapping[str, FileInfo]) -> str:
    """As why_not_packed, of what is on disk; "" also where nothing is packed."""
    try:
        return why_not_packed(plain, infos, read_headers(folder, PACKED_DIR))
    except (MissingFile, CheckpointError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or PACKED_DIR}: {error.strerror}"
