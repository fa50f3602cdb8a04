"""Files with secrets, given by their path or as `credential:NAME`, which systemd's LoadCredential= sets up for a service."""

from __future__ import annotations

import os

CREDENTIAL = "credential:"


def is_credential(value: str) -> bool:
    return value.startswith(CREDENTIAL)


def path_of(value: str) -> str:
    """Returns the path of the file: `value` itself, or for credential:NAME the file in the folder that systemd sets. Raises
    ValueError, which says what is allowed."""
    if not is_credential(value):
        return value
    name, folder = value.removeprefix(CREDENTIAL), os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not name or "/" in name or name in (".", ".."):
        raise ValueError("must be credential:NAME, NAME being that of LoadCredential= in the unit")
    if not folder:
        raise ValueError("there are no credentials here: hearthd was not started by systemd with LoadCredential=")
    return os.path.join(folder, name)
