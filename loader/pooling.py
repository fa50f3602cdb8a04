"""Reads how an encoder's token vectors become one vector: `1_Pooling/config.json` and `modules.json`, as sentence-transformers
writes them.
"""

from __future__ import annotations

import msgspec

from loader.config_fields import json_fields
from loader.errors import CheckpointError, UnsupportedModel

POOLING_NAME = "1_Pooling/config.json"
MODULES_NAME = "modules.json"
_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def parse_pooling(text: bytes | None) -> str:
    """Returns "mean" or "cls". text: the file's content; None: there is no such file, which means mean. Raises UnsupportedModel,
    which names the key of any other mode."""
    if text is None:
        return "mean"
    fields = json_fields(text, POOLING_NAME)
    chosen = [key for key in fields.values if key.startswith("pooling_mode_") and fields.boolean(key)]
    for key in chosen:
        if key not in _MODES:
            raise fields.unsupported(key, f"is not supported; supported: {', '.join(_MODES)}")
    if len(chosen) > 1:
        raise fields.unsupported(chosen[1], f"together with {chosen[0]} is not supported")
    named = fields.values.get("pooling_mode", _MODES[chosen[0]] if chosen else "mean")
    if named not in _MODES.values():
        raise fields.unsupported("pooling_mode", f"{named!r} is not supported; supported: {', '.join(_MODES.values())}")
    return str(named)


def check_modules(text: bytes) -> None:
    """Raises UnsupportedModel for a module that would change the vectors (a dense layer after the pooling), and CheckpointError
    for a file that cannot be read."""
    try:
        modules = msgspec.json.decode(text, type=list[dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(MODULES_NAME, None, f"not a list of modules: {error}") from None
    for module in modules:
        kind = str(module.get("type"))
        if kind.rpartition(".")[2] not in _MODULES:
            raise UnsupportedModel(MODULES_NAME, None, f"key type: {kind!r} is not supported; supported: {', '.join(_MODULES)}")
