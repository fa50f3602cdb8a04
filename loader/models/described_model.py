"""Reads the shape of a model whose weights need not be there yet, from config.json and, if they are there, the index or the headers
of the weight files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loader.configs.hf_config import CONFIG_NAME, QUANT_CONFIG_NAME, parse_config, plain_modules
from loader.configs.pooling import MODULES_NAME, POOLING_NAME, pooled
from loader.errors import CheckpointError
from loader.files.regular_file import read_regular
from loader.files.safetensors import INDEX_NAME, MAX_TENSORS, read_index
from loader.models import catalog
from loader.shapes.model_shape import ModelShape
from loader.sizes import layout

# The source of the sizes: the weight files' headers, the names in their index, or config.json alone.
HEADERS, INDEX, CONFIG = "headers", "index", "config"


@dataclass(slots=True, frozen=True)
class DescribedModel:
    """The shape of a model whose weights need not be there yet.

    source: where the shape comes from besides config.json: HEADERS (headers of the weight files), INDEX (names of tensors in their
    index) or CONFIG (config.json alone). With CONFIG, the matrices of a quantised checkpoint that its configuration names as plain
    count as plain.

    predicting: the shape with the model's predictor; None: there is none, or predictor_error says what is wrong with it. notes:
    sentences for operators about tensors in the files that are not used; with CONFIG there are none."""

    shape: ModelShape
    source: str
    predicting: ModelShape | None = None
    predictor_error: str = ""
    notes: tuple[str, ...] = ()


def described_model(folder: Path) -> DescribedModel:
    """Describes the model in a folder by its config.json and by the headers of its weight files; if these are incomplete, by their
    index; if there is no index, by config.json alone. Raises CheckpointError, which names file and key or tensor, for a file that
    is not valid, UnsupportedModel for a model that is not served, and OSError for a file that cannot be read."""
    config = read_regular(folder / CONFIG_NAME, catalog.MAX_CONFIG_BYTES)
    beside = folder / QUANT_CONFIG_NAME
    quant_config = read_regular(beside, catalog.MAX_CONFIG_BYTES) if beside.is_file() else None
    shape = pooled(parse_config(config, quant_text=quant_config), _text(folder / POOLING_NAME), _text(folder / MODULES_NAME))
    checkpoint = catalog.scan_one(folder)
    if checkpoint.failure is not None:
        raise checkpoint.failure
    if checkpoint.error:
        raise CheckpointError(str(folder), None, checkpoint.error)
    if checkpoint.complete and checkpoint.shape is not None:
        return DescribedModel(checkpoint.shape, HEADERS, checkpoint.predicting, checkpoint.predictor_error, checkpoint.notes)
    try:
        names = set(read_index(folder))
    except FileNotFoundError:
        _check_count(shape)
        whole = layout.predicting(shape, None)
        if shape.stored_format:
            is_plain = plain_modules(config, quant_text=quant_config)
            shape = replace(shape, plain_groups=layout.plain_groups_of_modules(shape, is_plain))
            if whole is not None:
                whole = replace(whole, plain_groups=layout.plain_groups_of_modules(whole, is_plain))
        return DescribedModel(shape, CONFIG, whole)
    catalog.check_counts(shape, len(names))
    shape = _named(layout.as_stored(shape, names), names)
    whole, error = layout.predicting(shape, names), ""
    try:
        whole = whole if whole is None else _named(whole, names)
    except CheckpointError as damage:
        whole, error = None, str(damage)
    return DescribedModel(shape, INDEX, whole, error, catalog.notes_on(names))


def _named(shape: ModelShape, names: set[str]) -> ModelShape:
    """Returns the shape with stored_format (the weight format) and plain_groups (the tensor groups that are not quantised) set
    according to the names of a checkpoint's tensors. names: all names in the checkpoint's index. Raises CheckpointError for a
    tensor that the model needs and that the index lacks."""
    shape = replace(shape, stored_format=layout.format_by_name(shape, names))
    shape = replace(shape, plain_groups=layout.plain_groups_by_name(shape, names))
    for tensor in layout.stored_tensors(shape):
        if tensor.name not in names:
            raise CheckpointError(INDEX_NAME, tensor.name, "missing: config.json asks for it")
    return shape


def _text(path: Path) -> bytes | None:
    """Returns the content of a file; None if the file does not exist."""
    try:
        return read_regular(path, catalog.MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_count(shape: ModelShape) -> None:
    """Raises CheckpointError if the number of layers, times the number of experts of a layer, exceeds the number of tensors that a
    model may have (MAX_TENSORS). Called before anything lists all experts."""
    num = shape.num_layers * (shape.experts.num_experts if shape.experts is not None else 1)
    if num > MAX_TENSORS:
        raise CheckpointError(CONFIG_NAME, None, f"asks for {num} experts in all; a model may have {MAX_TENSORS} tensors")
