"""Compares the running settings with those of a changed file. Determines which differences a reload applies at once (those in live
keys) and which need a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import msgspec

from config.schema import LIVE, ModelConfig, NodeConfig

TLS_KEYS = ("tls_certificate", "tls_key", "tls_min_version", "tls_client_ca")
# the settings of a model that only one of the two configurations names
_DEFAULT_MODEL = ModelConfig()


@dataclass(slots=True)
class ReloadPlan:
    """The changes that a reload of the settings makes. effective: the settings after the reload: the new values of live keys, the
    running values of all others. applied: dotted live keys that differ. needs_restart: the other dotted keys that differ."""

    effective: NodeConfig
    applied: list[str] = field(default_factory=list)
    needs_restart: list[str] = field(default_factory=list)


def plan(running: NodeConfig, new: NodeConfig) -> ReloadPlan:
    """Returns the changes that a reload makes on a node with the settings `running` if the files now say `new`. Both come from
    config.load, so `new` is already valid."""
    result = ReloadPlan(running)
    # switching TLS off would send keys in the clear, and switching it on would break every client, so both need a restart
    is_switched = bool(running.tls_certificate) != bool(new.tls_certificate)
    values = _merge(NodeConfig, running, new, "", result, skip=("models",), at_restart=TLS_KEYS if is_switched else ())
    models: dict[str, ModelConfig] = {}
    for name in sorted({*running.models, *new.models}):
        old_model = running.models.get(name, _DEFAULT_MODEL)
        new_model = new.models.get(name, _DEFAULT_MODEL)
        models[name] = msgspec.structs.replace(old_model, **_merge(ModelConfig, old_model, new_model, f'models."{name}".', result))
    result.effective = msgspec.structs.replace(running, models=models, **values)
    return result


def _merge(
    struct: Any,
    old: Any,
    new: Any,
    prefix: str,
    result: ReloadPlan,
    skip: tuple[str, ...] = (),
    at_restart: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Compares two structs of settings, `old` and `new`, both of the type `struct`. Returns what a reload applies: key -> new value
    for each live key that differs. Also appends each key that differs, with `prefix` before it, to result.applied if it is live,
    else to result.needs_restart. skip: keys that are not compared. at_restart: live keys whose change needs a restart in this
    case."""
    live = live_keys(struct).difference(at_restart)
    values = {}
    for key in struct.__struct_fields__:
        if key in skip or getattr(old, key) == getattr(new, key):
            continue
        if key in live:
            values[key] = getattr(new, key)
            result.applied.append(prefix + key)
        else:
            result.needs_restart.append(prefix + key)
    return values


def live_keys(struct: type[msgspec.Struct]) -> set[str]:
    hints = get_type_hints(struct, include_extras=True)
    return {name for name, hint in hints.items() if any((m.extra or {}).get("reload") == LIVE for m in _metas(hint))}


def _metas(hint: Any) -> list[msgspec.Meta]:
    return [arg for arg in get_args(hint) if isinstance(arg, msgspec.Meta)]
