"""Defines tenants, the senders of requests, and their keys: the models that a tenant may use, its share and its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

OTHER = "other"  # the label in metrics for tenants without a label of their own


@dataclass(slots=True, frozen=True)
class Limits:
    """A tenant's limits; None: unlimited. Tokens are those of prompts and outputs. A day is a day in UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    @property
    def on_tokens(self) -> bool:
        return self.tokens_per_minute is not None or self.tokens_per_day is not None

    @property
    def any(self) -> bool:
        return self.requests_per_minute is not None or self.on_tokens


NO_LIMITS = Limits()


@dataclass(slots=True, frozen=True)
class Tenant:
    """The sender of a request, whom the API key identifies. name: "" if no keys are set. weight: the tenant's share, relative to
    others, if several tenants want the same model. models: patterns of the names of models that it may use; None: all. admin:
    whether it may see data of all tenants and change what the node serves. priority: the priority of requests that name none.
    max_priority: the highest priority that a request may name; None: any."""

    name: str = ""
    weight: float = 1.0
    models: tuple[str, ...] | None = None  # glob patterns for model names; None: all models
    admin: bool = False
    _allowed: re.Pattern[str] | None = field(default=None, repr=False, compare=False)
    limits: Limits = NO_LIMITS
    priority: int = 0
    max_priority: int | None = None

    def may_use(self, model: str) -> bool:
        """Returns whether the tenant may use the model. `model`: its name, never an alias."""
        return self._allowed is None or self._allowed.match(model) is not None

    def changed_fields(self, new: Tenant) -> list[str]:
        """Returns the names of the settings (weight, models, limits, ...) that differ between this tenant and `new`, as in the keys
        file."""
        names = [
            name for name in ("weight", "models", "admin", "priority", "max_priority") if getattr(self, name) != getattr(new, name)
        ]
        limits = Limits.__dataclass_fields__
        return names + [name for name in limits if getattr(self.limits, name) != getattr(new.limits, name)]


ANYONE = Tenant()


@dataclass(slots=True, frozen=True)
class Key:
    """One key of a tenant. name: chosen by the operator, or "". sum_start: the first 8 hexadecimal digits of its SHA-256, by which
    people identify it; "" if no key is required. expires_unix_s: the Unix time from which on it is refused; None: never."""

    tenant: Tenant
    name: str = ""
    sum_start: str = ""
    expires_unix_s: float | None = None

    def has_expired(self, unix_s: float) -> bool:
        return self.expires_unix_s is not None and unix_s >= self.expires_unix_s

    @property
    def shown(self) -> str:
        """Returns the text that means the key in messages for operators: its name, or else `sha256:` and sum_start."""
        return repr(self.name) if self.name else f"sha256:{self.sum_start}…"


NO_KEY = Key(ANYONE)


def utc_text(unix_s: float) -> str:
    """Returns the time as RFC 3339 text in UTC, in whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
