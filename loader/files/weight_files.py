"""Finds the weight files of a model: plain ones in the model's folder, packed ones (loader.files.packed) in its subfolder
`packed/`.

Each packed file has the name of the plain file from which it was made; a copy of the index lies beside the packed files. If a model
has both kinds, the plain files count as its weights. Loads may read the packed files in their place if these were made from exactly
these plain files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import CheckpointError, shortened
from loader.files.packed import Source
from loader.files.regular_file import open_regular
from loader.files.safetensors import INDEX_NAME, MAX_TENSORS, SINGLE_NAME, Header, check_index, read_header, read_index

PACKED_DIR = "packed"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")  # other formats that people try to load


class MissingFile(Exception):
    """Raised for a file that a model needs and that does not exist yet; it may still arrive."""


@dataclass(slots=True, frozen=True)
class FileInfo:
    """The name, size and modification time of a weight file, as a scan of the models folder found them. name: the file's path below
    the model's folder."""

    name: str
    size_bytes: int
    mtime_ns: int


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Returns (names of a folder's weight files, sorted; the index that lists them: tensor name -> file name). A folder without an
    index has one weight file, model.safetensors, which may be missing; the index is then None. Raises CheckpointError for an index
    that is not valid, and OSError if it cannot be read."""
    if (folder / INDEX_NAME).exists():
        weight_map = read_index(folder)
        return sorted(set(weight_map.values())), weight_map
    return [SINGLE_NAME], None


def read_headers(folder: Path, below: str = "") -> dict[str, Header]:
    """Reads and checks the headers of all weight files, and returns them by the files' paths below the folder. below: "" for the
    plain files, PACKED_DIR for the packed ones. Raises MissingFile for a file that does not exist yet, CheckpointError for a file
    or index that is not valid, and OSError for one that cannot be read."""
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
    """Returns whether the folder has packed files and none of the plain ones. Raises CheckpointError for an index that is not
    valid, and OSError if the folder cannot be read."""
    if not (folder / PACKED_DIR).is_dir():
        return False
    return not any((folder / name).exists() for name in weight_files(folder)[0])


def packed_files(folder: Path) -> list[FileInfo]:
    """Returns the weight files and JSON files in a model's folder of packed files, sorted by name; [] if there is no such folder. A
    scan compares them with those of the last scan, to see changes."""
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
    """Returns the identity (Source) of a plain weight file, which packed files made from it record. info: the file's size and time,
    as the scan found them. header: the file's header."""
    return Source(info.size_bytes, info.mtime_ns, hashlib.blake2b(header.raw, digest_size=16).hexdigest())


def why_not_packed(plain: Mapping[str, Header], infos: Mapping[str, FileInfo], packed: Mapping[str, Header]) -> str:
    """Returns why a model's packed files can't be read in place of its plain ones; "" if they can. plain, packed: path of a file
    below the model's folder -> the file's header, for all plain and for all packed files. infos: path -> size and time of each
    plain file, as the scan found them."""
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
    """Reads the headers of a model's packed files. Returns why these files can't be read in place of the plain ones; "" if they
    can. plain, infos: path of a plain file below the model's folder -> its header, and its size and time as the scan found them."""
    try:
        return why_not_packed(plain, infos, read_headers(folder, PACKED_DIR))
    except (MissingFile, CheckpointError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or PACKED_DIR}: {error.strerror}"
