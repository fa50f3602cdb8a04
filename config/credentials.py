"""Files that a setting may name as `credential:NAME`: systemd gives them to the service, which cannot read the originals."""

from __future__ import annotations

import os

from config.load import CREDENTIAL, ConfigError


def path_of(value: str, key: str) -> str:
    """Returns the path that a setting stands for: itself, or for credential:NAME the file in the folder that systemd sets. key: the
    setting's name, for the error. Raises ConfigError."""
    if not value.startswith(CREDENTIAL):
        return value
    name, folder = value.removeprefix(CREDENTIAL), os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(value, key, "must be credential:NAME, NAME being that of LoadCredential= in the unit")
    if not folder:
        raise ConfigError(value, key, "there are no credentials here: hearthd was not started by systemd with LoadCredential=")
    return os.path.join(folder, name)
