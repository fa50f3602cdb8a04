"""Determines which LoRA adapters are served, and with which base model. The node scheduler knows only base models: a request for an
adapter is a request for its base, and carries the adapter to the engine.

An adapter's base is the model that its setting `base` names; else the model whose name or alias is base_model_name_or_path in its
adapter_config.json; else the only model whose name has the same last part (after the last /); else the model in whose folder the
adapter lies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from config.adapters import ALLOWED_FOR_ADAPTERS
from config.schema import ModelConfig, NodeConfig
from config.units import format_bytes
from config.upstream import host_of
from daemon.models.entry import ModelEntry, ServedAdapter
from daemon.models.registered import Registered
from loader.adapters.layout import misfit
from loader.errors import shortened
from loader.models.adapter import Adapter
from loader.models.catalog import Checkpoint
from loader.shapes.model_shape import ModelShape

log = logging.getLogger("hearthd.models")


@dataclass(slots=True, frozen=True)
class AdapterRecord:
    """The known facts about one LoRA adapter. base: the name of its base model, "" while that is unknown. loaded_from: the folder
    from which an operator has loaded it, "" if it was found in the models folder.

    served: what requests need, None while the adapter cannot be served. In that case `problem` tells why, and is_incomplete whether
    it may be served later, because only files or the base are missing.

    checked: the result of comparing the adapter with its base, a pair: the base's shape, and why the adapter does not fit it ("" if
    it fits). None: they were not compared."""

    checkpoint: Checkpoint
    base: str = ""
    served: ServedAdapter | None = None
    problem: str = ""
    is_incomplete: bool = False
    checked: tuple[ModelShape, str] | None = None
    loaded_from: str = ""

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def state(self) -> str:
        return "adapter" if self.served is not None else "incomplete" if self.is_incomplete else "refused"

    def describe(self) -> str:
        """Returns the text that is logged when the adapter is registered: its base and size, or why it cannot be served."""
        if self.served is None:
            return f"{self.name}: {self.state}: {self.problem}"
        return f"{self.name}: LoRA adapter of {self.base}, {self.about}"

    @property
    def about(self) -> str:
        """The adapter's rank and size in words; "" while it cannot be served."""
        if self.served is None or self.checkpoint.adapter is None:
            return ""
        num = len(self.checkpoint.adapter.modules)
        matrices = "1 matrix" if num == 1 else f"{num} matrices"
        return f"rank {self.served.rank}, {matrices}, {format_bytes(self.served.num_bytes)} in its file"

    def lines(self) -> list[str]:
        """Returns what `hearth why` prints about the adapter itself, line by line."""
        by = f"an operator has loaded it from {self.loaded_from}; `hearth unload {self.name}` ends that"
        loaded = [by] if self.loaded_from else []
        if self.served is None:
            of_base = f" of {self.base}" if self.base else ""
            return [f"{self.name} is a LoRA adapter{of_base} and is {self.state}: {self.problem}", *loaded]
        return [
            f"{self.name} is a LoRA adapter of {self.base}: {self.about}",
            f"requests for it run in the steps of {self.base}; its file is read when the first of them runs",
            *loaded,
        ]

    def row(self) -> dict[str, Any]:
        """Returns the adapter's row for `hearth models`. It has the keys of a model's row, and some more."""
        return {
            "name": self.name,
            "kind": "adapter",
            "state": self.state,
            "device": "",
            "weights_bytes": self.served.num_bytes if self.served is not None else 0,
            "kv_bytes": 0,
            "active": 0,
            "queued": 0,
            "pinned": False,
            "last_used": None,
            "reason": self.problem,
            "keep_alive_s": None,
            "leaves": None,
            "base": self.base,
            "rank": self.served.rank if self.served is not None else None,
            "loaded_from": self.loaded_from,
        }


def register_adapters(
    config: NodeConfig,
    checkpoints: Mapping[str, Checkpoint],
    models: Mapping[str, Registered],
    before: Mapping[str, AdapterRecord],
    named: Mapping[str, str],
) -> dict[str, AdapterRecord]:
    """Finds the LoRA adapters among the checkpoints, and for each its base model and whether it can be served. Returns their
    records by name. models: all registered models. before: the last result; the record of an adapter that has not changed is
    returned again. named: the folders of adapters that an operator has loaded, by name."""
    names = _NamesOfBases(config, models, checkpoints)
    found = {}
    for name, checkpoint in checkpoints.items():
        if not checkpoint.is_adapter or config.models.get(name, ModelConfig()).upstream is not None:
            continue
        try:
            record = _record(config, checkpoint, models, names, before.get(name))
        except Exception as error:  # an error in one folder must not hide the other adapters
            log.exception("%s: what its files say cannot be used", name)
            problem = f"what its files say cannot be used: {type(error).__name__}: {shortened(str(error))}"
            record = AdapterRecord(checkpoint, problem=problem)
        record = replace(record, loaded_from=named.get(name, ""))
        known = before.get(name)
        found[name] = known if known == record else record
    return found


def with_adapter(base: ModelEntry, adapter: ServedAdapter) -> ModelEntry:
    """Returns the entry for requests to an adapter: its base model's entry with `adapter` set."""
    return replace(base, adapter=adapter)


def foreign_settings(settings: ModelConfig) -> list[str]:
    """Returns the keys that `settings` sets and that have no effect on a LoRA adapter."""
    defaults = msgspec.structs.asdict(ModelConfig())
    return [key for key, default in defaults.items() if key not in ALLOWED_FOR_ADAPTERS and getattr(settings, key) != default]


def base_setting_misfit(name: str, settings: ModelConfig) -> str:
    """Returns the error message for a model that is no LoRA adapter and yet has the setting `base`; "" if it does not have it."""
    return f'models."{name}".base: is for LoRA adapters, and {name} is none' if settings.base is not None else ""


def _record(
    config: NodeConfig,
    checkpoint: Checkpoint,
    models: Mapping[str, Registered],
    names: _NamesOfBases,
    known: AdapterRecord | None,
) -> AdapterRecord:
    name, adapter = checkpoint.name, checkpoint.adapter
    settings = config.models.get(name, ModelConfig())
    if not checkpoint.complete or adapter is None:
        return AdapterRecord(checkpoint, problem=checkpoint.fault or "not an adapter", is_incomplete=bool(checkpoint.reason))
    if foreign := foreign_settings(settings):
        problem = f'models."{name}".{foreign[0]}: has no effect on a LoRA adapter, which is computed as its base is'
        return AdapterRecord(checkpoint, problem=problem)
    base, problem = names.base_of(name, adapter, settings)
    if not base:
        return AdapterRecord(checkpoint, problem=problem, is_incomplete=True)
    if problem:
        return AdapterRecord(checkpoint, base, problem=problem)
    if models[base].facts.is_split:
        why = f"its base {base} is split over devices (parallel); adapters are served with models on one device"
        return AdapterRecord(checkpoint, base, problem=why)
    shape = models[base].checkpoint.shape
    checked = None if shape is None else (shape, _misfit(checkpoint, adapter, shape, known))
    if checked is not None and checked[1]:
        return AdapterRecord(checkpoint, base, problem=f"it does not fit {base}: {checked[1]}", checked=checked)
    served = ServedAdapter(
        name=name,
        path=checkpoint.path,
        fingerprint=checkpoint.fingerprint,
        aliases=tuple(settings.aliases),
        created=checkpoint.created,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
    )
    return AdapterRecord(checkpoint, base, served, checked=checked)


def _misfit(checkpoint: Checkpoint, adapter: Adapter, shape: ModelShape, known: AdapterRecord | None) -> str:
    """Returns why an adapter does not fit its base model; "" if it fits. shape: the base's shape. known: the adapter's earlier
    record, or None. If neither the adapter nor the base has changed since, the earlier result is returned, because checking a
    thousand adapters takes half a second."""
    if known is not None and known.checkpoint is checkpoint and known.checked is not None and known.checked[0] is shape:
        return known.checked[1]
    return misfit(adapter, shape)


class _NamesOfBases:
    """Finds the base models of adapters by their names and aliases; made anew for each scan."""

    def __init__(self, config: NodeConfig, models: Mapping[str, Registered], checkpoints: Mapping[str, Checkpoint]) -> None:
        self._models, self._settings, self._checkpoints = models, config.models, checkpoints
        self._by_alias = {alias: name for name, settings in config.models.items() for alias in settings.aliases}
        self._by_end: dict[str, list[str]] = {}
        for name in models:
            self._by_end.setdefault(_last_part(name), []).append(name)

    def base_of(self, name: str, adapter: Adapter, settings: ModelConfig) -> tuple[str, str]:
        """Finds the base model of the adapter `name`. Returns (the base's name, or "" if none is found; why the adapter cannot be
        served with it or why none is found, or "" if the base can be used). settings: those of the adapter."""
        setting = f'models."{name}".base'
        if settings.base is not None:
            found = self._named(settings.base)
            if not found and (same := self._checkpoints.get(settings.base)) is not None and same.is_adapter:
                return "", f"{setting}: {settings.base!r} is a LoRA adapter itself"
            if not found:
                return "", f"{setting}: there is no model {settings.base!r} here"
        else:
            found = self._named(adapter.base)
            ends = [] if found else self._by_end.get(_last_part(adapter.base), [])
            if len(ends) != 1 and (around := name.rpartition("/")[0]) in self._models:
                ends = [around]
            if len(ends) > 1:
                return "", f"its base {adapter.base!r} may be any of {', '.join(sorted(ends))}; name it with {setting}"
            if not found and not ends:
                told = f"its base {adapter.base!r} is not here" if adapter.base else "its adapter_config.json names no base"
                return "", f"{told}; name it with {setting}"
            found = found or ends[0]
        if (upstream := self._upstream_of(found)) is not None:
            where = f"another server ({host_of(upstream)})"
            return found, f"its base {found} is answered by {where}; adapters are served with models of this node"
        return found, ""

    def _named(self, name: str) -> str:
        """Returns the model's own name for a name or alias; "" if no model has it. Models that another server answers are found as
        well."""
        owner = self._by_alias.get(name, name)
        return owner if owner in self._models or self._upstream_of(owner) is not None else ""

    def _upstream_of(self, name: str) -> str | None:
        settings = self._settings.get(name)
        return None if settings is None else settings.upstream


def _last_part(name: str) -> str:
    """Returns the part of a model's name, or of a path, after the last /."""
    return name.rstrip("/").rpartition("/")[2]
