"""Resolves file names that a setting may give as `credential:NAME`: systemd passes such files to the service, which cannot read the
original files.
"""

from __future__ import annotations

import os

from config.load import CREDENTIAL, ConfigError


def path_of(value: str, key: str) -> str:
    """Returns the path that a setting's value stands for: for credential:NAME the file NAME in the folder that systemd provides,
    for any other value the value itself. key: the setting's name, for the error. Raises ConfigError if NAME is not a plain file
    name, or if systemd has provided no such folder."""
    if not value.startswith(CREDENTIAL):
        return value
    name, folder = value.removeprefix(CREDENTIAL), os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(value, key, "must be credential:NAME, NAME being that of LoadCredential= in the unit")
    if not folder:
        raise ConfigError(value, key, "there are no credentials here: hearthd was not started by systemd with LoadCredential=")
    return os.path.join(folder, name)
