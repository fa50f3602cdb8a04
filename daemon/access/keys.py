"""Reads the keys file, which says who may use the node, and how much. It holds only SHA-256 sums of keys, so reading it gives no
access.

[tenants.search]
keys = ["sha256:9f86d081…"]      # `hearth hash-key` makes them; []: nobody is this tenant
weight = 2.0                     # share of a busy model, against the other tenants that want it
models = ["meta/*", "qwen3-4b"]  # what it may use; * and ? as in a shell, also across "/"; left out: all
admin = true                     # see Keys.may_watch
tokens_per_minute = 100_000      # see quotas.py
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import tomllib
from collections.abc import Iterable, Mapping

from config import credentials
from config.load import ConfigError, located
from config.locate import line_of_syntax_error
from daemon.access import tenant_table
from daemon.access.tenant import Key, Tenant
from daemon.access.tenant_table import PREFIX, quoted

log = logging.getLogger("hearthd.access")


class Keys:
    """The tenants and their keys, from one reading of the keys file. The object never changes; a reload makes a new one."""

    def __init__(self, tenants: Mapping[str, Tenant], keys: Mapping[bytes, Key]) -> None:
        """tenants: by name. keys: SHA-256 digest of a key (32 bytes) -> its Key."""
        self.tenants, self._keys = tenants, keys
        # Hashes are looked up under a secret of this process, so that the time of a look-up tells nothing about the file's hashes.
        self._secret = secrets.token_bytes(32)
        self._blinded = {self._blind(digest): (digest, key) for digest, key in keys.items()}
        self._has_admin = any(tenant.admin for tenant in tenants.values())

    def find(self, key: str) -> Key | None:
        """Returns the entry of a key, expired or not, or None if the key is unknown. The time of the look-up does not depend on how
        similar `key` is to a known key. key: the text that the client sent."""
        digest = _digest(key)
        known, found = self._blinded.get(self._blind(digest), (bytes(32), None))
        return found if hmac.compare_digest(known, digest) else None

    def all(self) -> Iterable[Key]:
        return self._keys.values()

    def may_watch(self, tenant: Tenant) -> bool:
        """Returns whether the tenant's keys give access to data about all tenants (metrics, status page). While no tenant is an
        admin, every key does."""
        return tenant.admin or not self._has_admin

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def warn_if_empty(self, keys_file: str) -> None:
        """Logs a warning if the keys file contains no key: every request is then refused. keys_file: the file's path, for the
        message."""
        if not self._keys:
            log.warning("%s has no key: every request is refused with 401", keys_file)

    def changes_from(self, old: Keys) -> list[str]:
        """Returns a line for each tenant that differs from an earlier reading of the file: "ann added", "bob: weight, key 'laptop'
        added". [] if there is no difference."""
        lines = [f"{name} removed" for name in old.tenants if name not in self.tenants]
        for name, tenant in self.tenants.items():
            before = old.tenants.get(name)
            if before is None:
                lines.append(f"{name} added")
            elif changes := [*before.changed_fields(tenant), *_changed_keys(old._of(name), self._of(name))]:
                lines.append(f"{name}: {', '.join(changes)}")
        return lines

    def _of(self, tenant: str) -> dict[bytes, Key]:
        return {digest: key for digest, key in self._keys.items() if key.tenant.name == tenant}

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _changed_keys(old: Mapping[bytes, Key], new: Mapping[bytes, Key]) -> list[str]:
    parts = [f"key {new[digest].shown} added" for digest in new if digest not in old]
    parts += [f"key {old[digest].shown} removed" for digest in old if digest not in new]
    both = [(old[digest], key) for digest, key in new.items() if digest in old]
    parts += [f"key {now.shown} renamed" for was, now in both if was.name != now.name]
    return parts + [f"expiry of key {now.shown}" for was, now in both if was.expires_unix_s != now.expires_unix_s]


def load(keys_file: str) -> Keys:
    """Returns the content of the keys file. keys_file: its path, or credential:NAME for a credential that systemd passes to the
    service. Raises ConfigError, which names the file, the line, the tenant, the key and what is allowed."""
    path = credentials.path_of(keys_file, "keys_file")
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
            raise ConfigError(path, quoted(name), "unknown key; the file holds tables [tenants.NAME] only")
    entries = table.get("tenants", {})  # without tenants nobody has access, which is how the last key is revoked
    if not isinstance(entries, dict):
        raise ConfigError(path, "tenants", "must be tables [tenants.NAME]")
    tenants: dict[str, Tenant] = {}
    keys: dict[bytes, Key] = {}
    for name, entry in entries.items():
        read = tenant_table.read(path, name, entry)
        tenants[name] = read.tenant
        for at, (digest, key) in enumerate(read.keys, 1):
            if digest in keys:
                owner = keys[digest].tenant.name
                raise ConfigError(path, f"tenants.{quoted(name)}.keys", f"number {at} is also a key of tenant {owner!r}")
            keys[digest] = key
    return Keys(tenants, keys)


def sum_start(key: str) -> str:
    """Returns the first 8 hexadecimal digits of a key's SHA-256, by which people identify the key."""
    return _digest(key).hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def hash_key(key: str) -> str:
    """Returns the text that stands for `key` in the keys file: "sha256:" and 64 hexadecimal digits."""
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Returns a new key of 256 random bits, in the form that clients of the OpenAI API expect."""
    return "sk-" + secrets.token_urlsafe(32)
