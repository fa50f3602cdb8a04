"""Finds the model for the name in a request: a model's own name, an alias, BASE:ADAPTER, or an entry of the table `[names]`. LoRA
adapters have names and aliases of their own, like models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from config.schema import NodeConfig
from daemon.errors import BadRequest, HearthError, no_model
from daemon.models.adapters import AdapterRecord
from daemon.models.asker import OPERATOR, Asker
from daemon.models.entry import ModelEntry
from daemon.models.name_table import MAX_MATCHED, Lead, NameTable, Target, refusal_of


class ModelNames:
    """All names by which requests can name models. The registry makes a new ModelNames after each scan and each change of the
    settings."""

    def __init__(
        self,
        config: NodeConfig,
        models: Collection[str],
        served: Callable[[str], ModelEntry | HearthError],
        turned_away: Callable[[str, str], HearthError | None],
        adapters: Mapping[str, AdapterRecord] | None = None,
    ) -> None:
        """Collects the names. Aliases, and entries of the table [names], that equal the name of a registered model have no effect.

        models: the names of all registered models and adapters. served: returns the entry of a model, or the error why it cannot be
        served. turned_away: takes a model and a tenant, and returns the error with which a request would be refused now, or None;
        called only for models to which the table [names] leads. adapters: the LoRA adapters among `models`, by name."""
        self._models, self._with_settings = models, config.models.keys()
        self._served, self._turned_away = served, turned_away
        self._adapters = adapters or {}
        self._by_base = _by_base(self._adapters)
        self._table = NameTable(config.names)
        self._aliases: dict[str, str] = {}
        self.hidden: dict[str, str] = {}  # a warning for each alias and entry that has no effect
        for name, settings in config.models.items():
            for alias in settings.aliases:
                if alias in models:
                    self.hidden[alias] = f'alias {alias!r} of "{name}" is hidden by the model of that name'
                else:
                    self._aliases[alias] = name
        for name in self._table.exact:
            if name in models:
                self.hidden[name] = f"the entry {name!r} of [names] is hidden by the model of that name"

    # ---- for requests; see ModelPort

    def resolve(self, name: str, asker: Asker = OPERATOR) -> ModelEntry:
        owner = self._owner(name)
        if owner is not None and asker.may_use(owner):
            found = self._served(owner)
            if isinstance(found, HearthError):
                raise no_model(name) if found.code == "model_not_found" else found
            return found
        entry = self._table.entry(name)
        if entry is None:
            raise no_model(name)
        lead = self._lead(entry, asker)
        if lead.chosen is None:
            raise refusal_of(name, lead.targets)
        return lead.chosen

    def canonical(self, name: str, asker: Asker = OPERATOR) -> str:
        owner = self._owner(name)
        if owner is None or owner not in self._models or not asker.may_use(owner):
            raise no_model(name)
        adapter = self._adapters.get(owner)
        return owner if adapter is None else adapter.base or owner

    def knows(self, name: str, asker: Asker = OPERATOR) -> bool:
        owner = self._owner(name)
        return (owner in self._models and asker.may_use(str(owner))) or self._table.entry(name) == name

    def further(self, listed: Collection[str]) -> Mapping[str, Sequence[str]]:
        """Returns the names in the table [names] that lead to models in `listed`, by model; patterns are left out. A name that
        leads to several models is listed only at the first of them that is in `listed`."""
        found: dict[str, list[str]] = {}
        for name in self._table.exact:
            owners = (self._owner(target) for target in self._table.names[name])
            owner = next((each for each in owners if each in listed), None)
            if owner is not None and name not in self._models:
                found.setdefault(owner, []).append(name)
        return found

    # ---- for the operator

    def local(self, name: str) -> str:
        """Returns the model of this node that an operator's command names, by its name or an alias. Raises HearthError:
        model_not_found, is_adapter for a LoRA adapter, or not_local for a model that another server answers."""
        owner = self._owner(name)
        if owner is not None and owner in self._adapters:
            adapter = self._adapters[owner]
            base = adapter.base
            instead = f" of {base}, and {base} is loaded in its place" if base else f" and is {adapter.state}: {adapter.problem}"
            raise BadRequest("is_adapter", f"{owner!r} is a LoRA adapter{instead}.", details={"adapter": owner, "base": base})
        if owner is not None and owner in self._models:
            if isinstance(found := self._served(owner), ModelEntry) and found.upstream:
                message = f"{found.upstream} answers for {owner!r} (upstream); nothing of it is on this node."
                raise BadRequest("not_local", message, details={"model": owner, "upstream": found.upstream})
            return owner
        message = f"There is no model {name!r}."
        if (lead := self.lead(name)) is not None:
            by = "" if lead.entry == name else f" by the pattern {lead.entry!r}"
            message += f" The table [names] leads requests for it{by} to {', '.join(each.name for each in lead.targets)}."
        raise BadRequest("model_not_found", message, status=404, details={"model": name})

    def adapter(self, name: str) -> AdapterRecord | None:
        """Returns the record of the LoRA adapter with this name, alias or BASE:ADAPTER; None if the name is that of no adapter."""
        owner = self._owner(name)
        return None if owner is None else self._adapters.get(owner)

    def lead(self, name: str) -> Lead | None:
        """Returns the entry of the table [names] that a request for `name` follows, with the models to which the entry leads; None
        if `name` is a model's own name or alias, or matches no entry. Models that only some tenants may use are included."""
        entry = None if self._owner(name) is not None else self._table.entry(name)
        return None if entry is None else self._lead(entry, OPERATOR)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row for each entry of the table [names], for the operator. leads_to: the model that requests get now, "" if
        none can serve them. hidden: whether a model with the same name hides the entry. targets: the models in the entry, each with
        the `problem` for which it is skipped, or ""."""
        rows = []
        for name in self._table.names:
            lead = self._lead(name, OPERATOR)
            targets = [
                {"name": each.name, "problem": "" if each.refusal is None else each.refusal.message} for each in lead.targets
            ]
            leads_to = "" if lead.chosen is None else lead.chosen.own_name
            rows.append({"name": name, "leads_to": leads_to, "hidden": name in self._models, "targets": targets})
        return rows

    def unknown_targets(self) -> dict[str, list[str]]:
        """Returns the targets in the table [names] that are no registered models, by the entry that names them."""
        found: dict[str, list[str]] = {}
        for name, targets in self._table.names.items():
            for target in targets:
                if self._owner(target) not in self._models:
                    found.setdefault(name, []).append(target)
        return found

    def _owner(self, name: str) -> str | None:
        """Returns the name of the model or adapter that a name stands for: the model that has it as its name or alias, even if that
        model has settings but no folder; otherwise the adapter that BASE:ADAPTER names; otherwise None."""
        owner = self._plain_owner(name)
        if owner is not None or not self._by_base or len(name) > MAX_MATCHED:
            return owner
        for at, one in enumerate(name):
            base = self._plain_owner(name[:at]) if one == ":" else None
            for of in (base, "") if base is not None else ():  # files that cannot be read tell no base, and may be of this one
                if (adapter := self._by_base.get(of, {}).get(name[at + 1 :])) is not None:
                    return adapter
        return None

    def _plain_owner(self, name: str) -> str | None:
        return name if name in self._models or name in self._with_settings else self._aliases.get(name)

    def _lead(self, entry: str, asker: Asker) -> Lead:
        """Returns where an entry of the table [names] leads: its models in the entry's order, each with its ModelEntry or with the
        error that says why it cannot serve now. A model that `asker` may not use gets the error of an unknown model."""
        targets = []
        for target in self._table.names[entry]:
            owner = self._owner(target)
            found = self._served(owner) if owner is not None and asker.may_use(owner) else no_model(target)
            if isinstance(found, ModelEntry):
                found = self._turned_away(found.name, asker.name) or found
            targets.append(Target(target, None, found) if isinstance(found, HearthError) else Target(target, found, None))
        return Lead(entry, targets)


def _by_base(adapters: Mapping[str, AdapterRecord]) -> dict[str, dict[str, str]]:
    """Returns base model -> (text after the colon -> adapter's name), for the names of the form BASE:ADAPTER. The text is the
    adapter's name or the part of that name after the last /, provided that no other adapter of the base has the same last part.
    Adapters whose base is unknown are under ""."""
    found: dict[str, dict[str, str]] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name, record in adapters.items():
        found.setdefault(record.base, {})[name] = name
        parts.setdefault(record.base, {}).setdefault(name.rpartition("/")[2], []).append(name)
    for base, by_part in parts.items():
        found[base] = {part: names[0] for part, names in by_part.items() if len(names) == 1} | found[base]
    return found
