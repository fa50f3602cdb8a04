"""Joins a model with a head that drafts tokens for it (loader/architectures/eagle.py) into one checkpoint, whose files lie in two
folders."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from loader.architectures.eagle import PREFIX
from loader.catalog import MAX_CONFIG_BYTES, Checkpoint, check_parameters, with_formats
from loader.config_fields import json_fields
from loader.errors import CheckpointError
from loader.hf_config import CONFIG_NAME
from loader.model_shape import ModelShape
from loader.regular_file import read_regular
from loader.safetensors import Header
from loader.weight_files import FileInfo, read_headers


@dataclass(slots=True, frozen=True)
class Joined:
    """A model with its head. shape: both. files: the head's, named as they are found from the model's folder. fingerprint: of
    both."""

    shape: ModelShape
    files: tuple[FileInfo, ...]
    fingerprint: str


def joined(checkpoint: Checkpoint, head: Checkpoint) -> Joined:
    """Joins a complete model and a complete head. Raises CheckpointError, which names file and key or tensor, where they do not
    belong together, and OSError."""
    assert checkpoint.shape is not None
    assert head.head is not None
    config = read_regular(Path(head.path) / CONFIG_NAME, MAX_CONFIG_BYTES)
    eagle = head.head.fitted(checkpoint.shape, json_fields(config, f"{head.path}/{CONFIG_NAME}"))
    below = next((os.path.dirname(info.name) for info in checkpoint.files), "")
    files = _files(checkpoint, head)
    names = {info.name: seen.name for info, seen in zip(head.files, files, strict=True)}
    headers = read_headers(Path(checkpoint.path), below)
    headers |= {names[file]: renamed(header, names[file]) for file, header in read_headers(Path(head.path)).items()}
    tensors = [tensor for header in headers.values() for tensor in header.tensors]
    shape = replace(checkpoint.shape, predicts=True, eagle=eagle)
    shape = with_formats(shape, {tensor.name for tensor in tensors}, tensors)
    check_parameters(shape, headers)
    digest = hashlib.blake2b(f"{checkpoint.fingerprint}\0{head.fingerprint}".encode(), digest_size=16)
    return Joined(shape, files, digest.hexdigest())


def renamed(header: Header, file: str) -> Header:
    """Returns a header of a head's file with the names that its tensors have among the model's. file: its name, seen from the
    model's folder."""
    tensors = tuple(replace(tensor, name=PREFIX + tensor.name, file=file) for tensor in header.tensors)
    return replace(header, tensors=tensors)


def _files(checkpoint: Checkpoint, head: Checkpoint) -> tuple[FileInfo, ...]:
    way = os.path.relpath(os.path.realpath(head.path), os.path.realpath(checkpoint.path))
    return tuple(replace(info, name=os.path.join(way, info.name)) for info in head.files)


def why_not(checkpoint: Checkpoint, head: Checkpoint) -> str:
    """Returns why a head cannot draft tokens for a model, or ""."""
    try:
        joined(checkpoint, head)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or head.path}: {error.strerror}"
    return ""
