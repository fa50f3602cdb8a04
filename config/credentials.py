"""Files that hold secrets: their own path, or credential:NAME for one that systemd hands over (LoadCredential= in the unit)."""

from __future__ import annotations

import os

from config.load import ConfigError

CREDENTIAL = "credential:"


def file_path(value: str, key: str) -> str:
    """Returns the path that a setting stands for: itself, or for credential:NAME the file in the folder that systemd sets. key: of
    the setting, for messages. Raises ConfigError."""
    if not value.startswith(CREDENTIAL):
        return value
    name, folder = value.removeprefix(CREDENTIAL), os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(value, key, "must be credential:NAME, NAME being that of LoadCredential= in the unit")
    if not folder:
        raise ConfigError(value, key, "there are no credentials here: hearthd was not started by systemd with LoadCredential=")
    return os.path.join(folder, name)
