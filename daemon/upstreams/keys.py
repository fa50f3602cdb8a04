"""Reads the keys that this node sends to other servers (`upstream_key_file`). They are never logged or shown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from config import credentials
from config.load import ConfigError, located_setting
from config.schema import NodeConfig
from loader.files.regular_file import read_regular

MAX_BYTES = 16 << 10


def paths(config: NodeConfig) -> list[str]:
    """Returns the paths of the key files that the settings name, each once. A `credential:NAME` that cannot be resolved is left
    out."""
    found = []
    for model in config.models.values():
        if model.upstream is not None and model.upstream_key_file is not None:
            with contextlib.suppress(ConfigError):  # load() says what is wrong
                found.append(credentials.path_of(model.upstream_key_file, "upstream_key_file"))
    return list(dict.fromkeys(found))


def load(config: NodeConfig, source: str) -> dict[str, str]:
    """Returns the keys for other servers, by the model's name on this node; models without a key file are left out. source: the
    file that the settings come from, for errors. Raises ConfigError, which names the file and the setting and never a key."""
    return {
        name: _read(source, f'models."{name}".upstream_key_file', model.upstream_key_file)
        for name, model in config.models.items()
        if model.upstream is not None and model.upstream_key_file is not None
    }


def headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read(source: str, where: str, value: str) -> str:
    path = credentials.path_of(value, where)
    try:
        key = read_regular(path, MAX_BYTES).strip()
    except OSError as error:
        raise located_setting(ConfigError(source, where, f"{value} cannot be read: {error.strerror}")) from None
    if not key or not all(0x21 <= byte <= 0x7E for byte in key):
        message = f"{value} must hold a key and nothing else: one line of printable characters without spaces"
        raise located_setting(ConfigError(source, where, message))
    return key.decode("ascii")
