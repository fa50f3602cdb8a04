"""Reads how the vectors of a text's tokens become one vector (pooling) from `1_Pooling/config.json` and `modules.json`, as
sentence-transformers writes them. An encoder always computes vectors; a decoder computes vectors instead of text if its folder has
`1_Pooling/config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from loader.configs.hf_config import CONFIG_NAME
from loader.errors import CheckpointError, UnsupportedModel
from loader.files.weight_files import MissingFile
from loader.shapes.config_fields import json_fields
from loader.shapes.model_shape import LAST_TOKEN, ModelShape

POOLING_NAME = "1_Pooling/config.json"
MODULES_NAME = "modules.json"
_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_DECODER_MODES = {"pooling_mode_lasttoken": LAST_TOKEN}


def pooled(shape: ModelShape, pooling_text: bytes | None, modules_text: bytes | None) -> ModelShape:
    """Returns the shape of a model with its pooling, the way in which token vectors become one vector; the shape of a cross-encoder
    is returned unchanged. pooling_text, modules_text: the content of 1_Pooling/config.json and of modules.json; None: there is no
    such file. A decoder with a pooling file computes vectors instead of text.

    Raises UnsupportedModel for a pooling or a module that is not served, and for a decoder without a head and without a pooling
    file. Raises CheckpointError for a file that is not valid, and MissingFile if a decoder's modules.json names a pooling file that
    is not there yet."""
    if shape.scoring:  # a cross-encoder's score is computed from the first vector
        return shape
    if not shape.pooling and pooling_text is None:
        if modules_text is not None and "Pooling" in check_modules(modules_text):
            raise MissingFile(f"{POOLING_NAME} is missing: {MODULES_NAME} asks for it")
        if shape.named_headless:
            why = "key architectures: names a decoder without a head, which generates no text; it makes embeddings if there is a"
            raise UnsupportedModel(CONFIG_NAME, None, f"{why} {POOLING_NAME}")
        return shape
    if modules_text is not None:
        check_modules(modules_text)
    return replace(shape, pooling=parse_pooling(pooling_text, _MODES if shape.pooling else _DECODER_MODES))


def parse_pooling(text: bytes | None, modes: Mapping[str, str] = _MODES) -> str:
    """Returns the name of the way in which token vectors become one vector, one of the values of `modes`. text: the content of
    1_Pooling/config.json; None: there is no such file, and the result is "mean". modes: key in the file -> the way that it asks
    for. Raises UnsupportedModel, which names the key, if the file asks for any other way."""
    if text is None:
        return "mean"
    fields = json_fields(text, POOLING_NAME)
    chosen = [key for key in fields.values if key.startswith("pooling_mode_") and fields.boolean(key)]
    for key in chosen:
        if key not in modes:
            raise fields.unsupported(key, f"is not supported; supported: {', '.join(modes)}")
    if len(chosen) > 1:
        raise fields.unsupported(chosen[1], f"together with {chosen[0]} is not supported")
    named = fields.values.get("pooling_mode", modes[chosen[0]] if chosen else "mean")
    if named not in modes.values():
        raise fields.unsupported("pooling_mode", f"{named!r} is not supported; supported: {', '.join(modes.values())}")
    return str(named)


def check_modules(text: bytes) -> list[str]:
    """Returns the kinds of the modules that modules.json lists, such as Pooling. text: the file's content. Raises UnsupportedModel
    for a module that would change the vectors (such as a dense layer after the pooling), and CheckpointError for a file that is not
    valid."""
    try:
        modules = msgspec.json.decode(text, type=list[dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(MODULES_NAME, None, f"not a list of modules: {error}") from None
    kinds = [str(module.get("type")) for module in modules]
    for kind in kinds:
        if kind.rpartition(".")[2] not in _MODULES:
            raise UnsupportedModel(MODULES_NAME, None, f"key type: {kind!r} is not supported; supported: {', '.join(_MODULES)}")
    return [kind.rpartition(".")[2] for kind in kinds]
