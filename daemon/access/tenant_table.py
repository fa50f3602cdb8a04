"""Reads one table [tenants.NAME] of the keys file."""

from __future__ import annotations

import datetime
import fnmatch
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from config.load import ConfigError
from config.nearest import nearest
from daemon.access.tenant import OTHER, Key, Limits, Tenant

PREFIX = "sha256:"
MAX_WEIGHT = 1000
KEY_FORM = '"sha256:" and 64 hexadecimal digits, as `hearth hash-key` prints them'
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")
FIELDS = ("keys", "weight", "models", "admin", *LIMITS, "expires", "priority", "max_priority")
KEY_FIELDS = ("key", "expires", "name")
_NUMBERS_OF_32_BITS = range(-(2**31), 2**31)  # the range of a request's `priority`
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_NAME_FORM = "1 to 64 letters, digits and . _ -"


@dataclass(slots=True, frozen=True)
class TenantTable:
    """The content of one table [tenants.NAME] of the keys file. keys: pairs of a key's SHA-256 digest and the Key, in the file's
    order."""

    tenant: Tenant
    keys: list[tuple[bytes, Key]]


def read(path: str, name: str, entry: Any) -> TenantTable:
    """Returns the checked content of a tenant's table. path: the file's path, for errors. name: the tenant's name. entry: the table
    as parsed from TOML. Raises ConfigError, which names the setting."""
    where = f"tenants.{quoted(name)}"
    if not _NAME.match(name) or name == OTHER:
        raise ConfigError(path, where, f"a name is {_NAME_FORM} (not the word {OTHER}, which metrics use)")
    if not isinstance(entry, dict):
        raise ConfigError(path, where, f"must be a table [{where}]")
    for key in entry:
        if key not in FIELDS:
            raise ConfigError(path, f"{where}.{quoted(key)}", f"unknown key; {_hint(key, FIELDS)}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 < weight <= MAX_WEIGHT):
        raise ConfigError(path, f"{where}.weight", f"{weight!r} must be a number above 0 and at most {MAX_WEIGHT}")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(path, f"{where}.admin", f"{admin!r} must be true or false")
    globs = _globs(path, f"{where}.models", entry)
    allowed = None if globs is None else re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)")
    limits = Limits(*(_limit(path, f"{where}.{each}", entry.get(each)) for each in LIMITS))
    priority, max_priority = _priorities(path, where, entry)
    tenant = Tenant(name, float(weight), globs, admin, allowed, limits, priority, max_priority)
    expires_unix_s = _expiry(path, f"{where}.expires", entry.get("expires"))
    return TenantTable(tenant, _keys(path, f"{where}.keys", entry, tenant, expires_unix_s))


def quoted(name: str) -> str:
    """Returns the name as one part of a dotted TOML key, in quotes if it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _globs(path: str, where: str, entry: dict[str, Any]) -> tuple[str, ...] | None:
    if "models" not in entry:
        return None
    _check_texts(path, where, entry["models"], bool, 'a model\'s name or a pattern such as "meta/*"')
    return tuple(entry["models"])


def _limit(path: str, where: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(path, where, f"{_shown(value)} must be a whole number of 1 or more; left out: no limit")
    return value


def _priorities(path: str, where: str, entry: dict[str, Any]) -> tuple[int, int | None]:
    """Returns the priority of requests that name none, and the highest priority that a request may name (None: any). Raises
    ConfigError for a value that is no 32-bit integer, or a priority above the highest one."""
    for key in ("priority", "max_priority"):
        value = entry.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value not in _NUMBERS_OF_32_BITS:
            raise ConfigError(path, f"{where}.{key}", f"{_shown(value)} must be a whole number from -2147483648 to 2147483647")
    highest = entry.get("max_priority")
    priority = entry.get("priority", 0 if highest is None else min(0, highest))
    if highest is not None and priority > highest:
        raise ConfigError(path, f"{where}.priority", f"{priority} is above max_priority ({highest})")
    return priority, highest


def _expiry(path: str, where: str, value: Any, which: str = "") -> float | None:
    """Returns the Unix time in seconds from which on a key is refused; None: never. value: a date or date-time as parsed from TOML,
    or None. which: words that tell which key is meant, to put before the value in an error. Raises ConfigError."""
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            text = value.isoformat()
            raise ConfigError(path, where, f"{which}{text} has no offset from UTC; write {text}Z, or another offset such as +02:00")
        return value.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime.combine(value, datetime.time(), datetime.UTC).timestamp()
    form = "a date such as 2027-01-31 (from 00:00 UTC on) or a date-time with an offset such as 2027-01-31T12:00:00Z, not quoted"
    raise ConfigError(path, where, f"{which}{_shown(value)} must be {form}")


def _keys(path: str, where: str, entry: dict[str, Any], tenant: Tenant, expires_unix_s: float | None) -> list[tuple[bytes, Key]]:
    """Returns the tenant's keys as pairs of SHA-256 digest and Key. expires_unix_s: when all of the tenant's keys expire; None: no
    such time is set. A key with an expiry of its own expires at the earlier of the two times. Raises ConfigError."""
    if "keys" not in entry:
        raise ConfigError(path, where, f"missing; a list of {KEY_FORM}, which may be empty")
    values = entry["keys"]
    if not isinstance(values, list):
        raise ConfigError(path, where, f"{_hidden(values)} must be a list of {KEY_FORM}")
    found = []
    for at, value in enumerate(values, 1):
        table = value if isinstance(value, dict) else {"key": value}
        for field in table:
            if field not in KEY_FIELDS:
                raise ConfigError(path, where, f"number {at}, unknown key {_shown(field)}; {_hint(field, KEY_FIELDS)}")
        if "key" not in table:
            raise ConfigError(path, where, f"number {at} has no `key`; it is {KEY_FORM}")
        text, name = table["key"], table.get("name", "")
        if not isinstance(text, str) or not _DIGEST.match(text):
            raise ConfigError(path, where, f"number {at}, {_hidden(text)}, must be {KEY_FORM}")
        if "name" in table and (not isinstance(name, str) or not _NAME.match(name)):
            raise ConfigError(path, where, f"number {at}, name {_shown(name)} must be {_NAME_FORM}")
        ends = (expires_unix_s, _expiry(path, where, table.get("expires"), f"number {at}, expires "))
        digest = bytes.fromhex(text[len(PREFIX) :])
        found.append((digest, Key(tenant, name, digest.hex()[:8], min((end for end in ends if end is not None), default=None))))
    return found


def _check_texts(path: str, where: str, values: Any, good: Callable[[str], object], form: str) -> None:
    """Raises ConfigError unless `values` is a list of texts that all satisfy `good`. form: what a text must be, for the error."""
    if not isinstance(values, list):
        raise ConfigError(path, where, f"{_shown(values)} must be a list of {form}")
    for at, value in enumerate(values, 1):
        if not isinstance(value, str) or not good(value):
            raise ConfigError(path, where, f"number {at}, {_shown(value)}, must be {form}")


def _hint(key: str, known: tuple[str, ...]) -> str:
    near = nearest(key, known)
    return f"did you mean {near}?" if near else "known keys: " + ", ".join(known)


def _hidden(value: object) -> str:
    """Returns a description of a wrong value in the list of keys. It does not show the value, which may be or contain an unhashed
    key, because error messages go to the log and to everybody who asks for the status."""
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return "a list" if isinstance(value, list) else "a table" if isinstance(value, dict) else "a value that is no text"


def _shown(value: object) -> str:
    """Returns the Python form of a wrong value, by which an operator finds it in the file; of more than 12 characters only the
    first 9 and "…"."""
    text = repr(value)
    return text if len(text) <= 12 else f"{text[:9]}…"
