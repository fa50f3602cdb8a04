"""Combines a model with a head that drafts tokens for it (loader/architectures/eagle.py). Their files lie in two folders."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

from loader.architectures.eagle import PREFIX, eagle_groups, ignores
from loader.configs.hf_config import CONFIG_NAME
from loader.files.safetensors import Header, TensorRef
from loader.files.weight_files import FileInfo
from loader.formats.plain import PLAIN
from loader.models.catalog import Checkpoint, check_tensors
from loader.shapes.model_shape import ModelShape
from loader.sizes import layout


@dataclass(slots=True, frozen=True)
class Joined:
    """A model together with a head that drafts tokens for it. shape: the shape of both. files: the head's files, named by their
    paths from the model's folder. fingerprint: a hash of both fingerprints."""

    shape: ModelShape
    files: tuple[FileInfo, ...]
    fingerprint: str


def joined(checkpoint: Checkpoint, head: Checkpoint) -> Joined:
    """Combines the checkpoint of a model with that of a head that drafts tokens, both complete, and returns the result. No file is
    read. Raises CheckpointError, which names file and key or tensor, if the head does not fit the model."""
    assert checkpoint.shape is not None
    assert head.head is not None
    base = checkpoint.shape
    eagle = head.head.fitted(base, os.path.join(head.path, CONFIG_NAME))
    way = os.path.relpath(os.path.realpath(head.path), os.path.realpath(checkpoint.path))
    tensors = [_renamed(tensor, os.path.join(way, tensor.file)) for tensor in head.head.tensors]
    stored = [tensor for group in eagle_groups(eagle, base.num_layers) for tensor in PLAIN.stored(group)]
    under_own_names = [tensor._replace(name=tensor.name.removeprefix(PREFIX)) for tensor in stored]
    seen = [replace(tensor, file=os.path.join(head.path, tensor.file)) for tensor in head.head.tensors]
    check_tensors(under_own_names, seen, ignores, f"a head with {head.path}/{CONFIG_NAME}", head.path)
    shape = replace(base, predicts=True, eagle=eagle, block_offsets=())
    offsets = layout.block_offsets(shape, tensors)
    if base.block_offsets:  # the head's groups come after the model's
        shape = replace(shape, block_offsets=base.block_offsets + offsets[len(base.block_offsets) :])
    files = tuple(replace(info, name=os.path.join(way, info.name)) for info in head.files)
    digest = hashlib.blake2b(f"{checkpoint.fingerprint}\0{head.fingerprint}".encode(), digest_size=16)
    return Joined(shape, files, digest.hexdigest())


def renamed(header: Header, file: str) -> Header:
    """Returns the header of a draft head's file with the names that the tensors have beside the model's tensors: each gets the
    prefix "drafter.". file: the file's path from the model's folder."""
    return replace(header, tensors=tuple(_renamed(tensor, file) for tensor in header.tensors))


def _renamed(tensor: TensorRef, file: str) -> TensorRef:
    return replace(tensor, name=PREFIX + tensor.name, file=file)
