"""The keys file: who may use the node. It holds only SHA-256 sums of keys, so reading it gives no access.

[tenants.search]
keys = ["sha256:9f86d081…"]      # `hearth hash-key` makes them; []: nobody is this tenant
weight = 2.0                     # share of a busy model, against the other tenants that want it
models = ["meta/*", "qwen3-4b"]  # what it may use; * and ? as in a shell, also across "/"; left out: all
admin = true                     # see Keys.may_watch
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from config.load import ConfigError, located
from config.locate import line_of_syntax_error
from config.nearest import nearest

log = logging.getLogger("hearthd.access")
CREDENTIAL = "credential:"
OTHER = "other"  # the label in metrics of tenants that they do not name
PREFIX = "sha256:"
MAX_WEIGHT = 1000
KEY_FORM = '"sha256:" and 64 hexadecimal digits, as `hearth hash-key` prints them'
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
FIELDS = ("keys", "weight", "models", "admin")


@dataclass(slots=True, frozen=True)
class Tenant:
    """The sender of a request. name: "" if no keys are set. weight: its share where several tenants want the same model."""

    name: str = ""
    weight: float = 1.0
    models: tuple[str, ...] | None = None  # globs over model names; None: all
    admin: bool = False
    _allowed: re.Pattern[str] | None = field(default=None, repr=False, compare=False)

    def may_use(self, model: str) -> bool:
        """Returns whether the tenant may use the model. `model`: its name, never an alias."""
        return self._allowed is None or self._allowed.match(model) is not None


ANYONE = Tenant()


class Keys:
    """The tenants from one reading of the keys file. A reload replaces the object as a whole; it never changes."""

    def __init__(self, tenants: dict[str, Tenant], digests: dict[bytes, str]) -> None:
        """digests: SHA-256 of a key -> its tenant's name."""
        self.tenants, self._digests = tenants, digests
        # Sums are looked up under a secret of this process, so that the time of a look-up says nothing about the sums in the file.
        self._secret = secrets.token_bytes(32)
        self._tenant_of = {self._blind(digest): (digest, tenants[name]) for digest, name in digests.items()}
        self._has_admin = any(tenant.admin for tenant in tenants.values())

    def find(self, key: str) -> Tenant | None:
        """Returns the tenant that the key belongs to, or None, in constant time."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        known, tenant = self._tenant_of.get(self._blind(digest), (bytes(32), None))
        return tenant if hmac.compare_digest(known, digest) else None

    def may_watch(self, tenant: Tenant) -> bool:
        """Returns whether the tenant's keys give access to what concerns all tenants (metrics, status page). While no tenant is
        an admin, any key does."""
        return tenant.admin or not self._has_admin

    @property
    def num_keys(self) -> int:
        return len(self._digests)

    def warn_if_empty(self, keys_file: str) -> None:
        """Logs a warning if there is no key, so that every request is refused. This may or may not be intended."""
        if not self._digests:
            log.warning("%s has no key: every request is refused with 401", keys_file)

    def same_as(self, other: Keys) -> bool:
        return (self.tenants, self._digests) == (other.tenants, other._digests)

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def file_path(keys_file: str) -> str:
    """Returns the path that `keys_file` stands for: itself, or for credential:NAME the file in the folder that systemd sets.
    Raises ConfigError."""
    if not keys_file.startswith(CREDENTIAL):
        return keys_file
    name, folder = keys_file.removeprefix(CREDENTIAL), os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(keys_file, "keys_file", "must be credential:NAME, NAME being that of LoadCredential= in the unit")
    if not folder:
        raise ConfigError(
            keys_file, "keys_file", "there are no credentials here: hearthd was not started by systemd with LoadCredential="
        )
    return os.path.join(folder, name)


def load(keys_file: str) -> Keys:
    """Reads the keys file. Raises ConfigError naming the file, the line, the tenant, the key and what is allowed."""
    path = file_path(keys_file)
    try:
        return _load(path)
    except ConfigError as error:
        raise located(error) from None


def _load(path: str) -> Keys:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(path, "", f"keys cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", f"is not valid TOML: {error}", line_of_syntax_error(str(error))) from None
    for name in table:
        if name != "tenants":
            raise ConfigError(path, _quoted(name), "unknown key; the file holds tables [tenants.NAME] only")
    entries = table.get("tenants", {})  # a file without tenants gives nobody access: that is how the last key is revoked
    if not isinstance(entries, dict):
        raise ConfigError(path, "tenants", "must be tables [tenants.NAME]")
    tenants: dict[str, Tenant] = {}
    owners: dict[bytes, str] = {}
    for name, entry in entries.items():
        tenants[name] = _tenant(path, name, entry)
        for at, text in enumerate(entry["keys"], 1):
            digest = bytes.fromhex(text[len(PREFIX) :])
            if digest in owners:
                raise ConfigError(path, f"tenants.{_quoted(name)}.keys", f"number {at} is also a key of tenant {owners[digest]!r}")
            owners[digest] = name
    return Keys(tenants, owners)


def hash_key(key: str) -> str:
    """Returns the text that the keys file holds for `key`."""
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Returns a new key of 256 random bits, in the form that clients of the OpenAI API expect."""
    return "sk-" + secrets.token_urlsafe(32)


def _tenant(path: str, name: str, entry: Any) -> Tenant:
    where = f"tenants.{_quoted(name)}"
    if not _NAME.match(name) or name == OTHER:
        raise ConfigError(path, where, f"a name is 1 to 64 letters, digits and . _ - (not the word {OTHER}, which metrics use)")
    if not isinstance(entry, dict):
        raise ConfigError(path, where, f"must be a table [{where}]")
    for key in entry:
        if key not in FIELDS:
            near = nearest(key, FIELDS)
            hint = f"did you mean {near}?" if near else "known keys: " + ", ".join(FIELDS)
            raise ConfigError(path, f"{where}.{_quoted(key)}", f"unknown key; {hint}")
    if "keys" not in entry:
        raise ConfigError(path, f"{where}.keys", f"missing; a list of {KEY_FORM}, which may be empty")
    _check_texts(path, f"{where}.keys", entry["keys"], _is_digest, KEY_FORM, _hidden)
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 < weight <= MAX_WEIGHT):
        raise ConfigError(path, f"{where}.weight", f"{weight!r} must be a number above 0 and at most {MAX_WEIGHT}")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(path, f"{where}.admin", f"{admin!r} must be true or false")
    if "models" not in entry:
        return Tenant(name, float(weight), admin=admin)
    globs = entry["models"]
    _check_texts(path, f"{where}.models", globs, bool, 'a model\'s name or a pattern such as "meta/*"')
    allowed = re.compile("|".join(fnmatch.translate(glob) for glob in globs) or r"(?!)")
    return Tenant(name, float(weight), tuple(globs), admin, allowed)


def _check_texts(
    path: str, where: str, values: Any, good: Callable[[str], object], form: str, shown: Callable[[object], str] | None = None
) -> None:
    """Raises ConfigError unless `values` is a list of texts that are all `good`. form: what a text must be. shown: formats a
    wrong value for the message."""
    shown = shown or _shown
    if not isinstance(values, list):
        raise ConfigError(path, where, f"{shown(values)} must be a list of {form}")
    for at, value in enumerate(values, 1):
        if not isinstance(value, str) or not good(value):
            raise ConfigError(path, where, f"number {at}, {shown(value)}, must be {form}")


def _is_digest(text: str) -> bool:
    return _DIGEST.match(text) is not None


def _quoted(name: str) -> str:
    """Returns the name as one part of a dotted TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _hidden(value: object) -> str:
    """Returns a description of a wrong value among the keys without its text. It may be a key in the clear, and messages go to
    the log and to everybody who asks for the status."""
    return f"a text of {len(value)} characters" if isinstance(value, str) else _shown(value)


def _shown(value: object) -> str:
    """Returns enough of the value to find it in the file."""
    text = repr(value)
    return text if len(text) <= 12 else f"{text[:9]}…"
