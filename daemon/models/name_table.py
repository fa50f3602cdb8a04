"""Looks up requested names in the table [names] of the settings, which leads requests for some names to other models: finds the
entry for a name, and the first of the entry's models that can serve."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from config.names import WILDCARDS, is_pattern
from daemon.errors import HearthError, no_model
from daemon.models.entry import ModelEntry

MAX_MATCHED = 256  # characters; longer names match no pattern, because the time of matching depends on names that clients choose


class Target(NamedTuple):
    """One of the models to which an entry of the table [names] leads. name: the model's name or an alias, as written in the table.
    entry: the ModelEntry if the model can serve now; otherwise None, and `refusal` is the error that says why it cannot."""

    name: str
    entry: ModelEntry | None
    refusal: HearthError | None


class Lead(NamedTuple):
    """An entry of the table, with the state of the models to which it leads. entry: a name or a pattern. targets: the models, in
    the entry's order."""

    entry: str
    targets: Sequence[Target]

    @property
    def chosen(self) -> ModelEntry | None:
        """Returns the first model that can serve now, or None if none can."""
        return next((target.entry for target in self.targets if target.entry is not None), None)

    def lines(self, name: str) -> list[str]:
        """Returns what `hearth why` prints about a name that matches this entry, line by line: the entry, why models are skipped,
        and where requests go."""
        by = "is an entry" if name == self.entry else f"meets {self.entry!r}"
        found = [f"{name} {by} of the table [names], which leads to {', '.join(each.name for each in self.targets)}"]
        found += [f"{each.name} is skipped: {each.refusal.message}" for each in self.targets if each.refusal is not None]
        return [
            *found,
            f"requests go to {self.chosen.own_name}" if self.chosen is not None else "requests are refused: none can serve",
        ]


class NameTable:
    """The entries of the table [names], and the rule that selects the entry for a requested name."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        """Makes the table. names: each name or pattern (with * or ?) -> the models to which it leads."""
        self.names = names
        patterns = sorted(filter(is_pattern, names), key=_num_literals, reverse=True)  # a stable sort keeps the file's order
        # "[" is no wildcard here; without it, matching takes linear time for each "*", whatever name a client sends
        self._patterns = [(re.compile(fnmatch.translate(each.replace("[", "[[]"))), each) for each in patterns]

    @property
    def exact(self) -> list[str]:
        """Returns the names that are not patterns, in the order of the settings file."""
        return [name for name in self.names if not is_pattern(name)]

    def entry(self, name: str) -> str | None:
        """Returns the entry for a requested name: the entry that equals it, or else the matching pattern with the most characters
        that are no wildcards; None if there is neither."""
        if not self.names:
            return None
        if name in self.names and not is_pattern(name):
            return name
        if len(name) > MAX_MATCHED:
            return None
        return next((entry for pattern, entry in self._patterns if pattern.match(name)), None)


def _num_literals(pattern: str) -> int:
    return sum(each not in WILDCARDS for each in pattern)


def refusal_of(name: str, targets: Sequence[Target]) -> HearthError:
    """Returns the error for a request whose name leads only to models that cannot serve it: no_model() if all of them are unknown
    to the sender, otherwise an error whose message lists the refusals. It has the code and status of the first temporary refusal
    (429 or 503) or, if there is none, of the first refusal. name: the requested name. targets: the models to which it leads."""
    told = [each.refusal for each in targets if each.refusal is not None and each.refusal.code != "model_not_found"]
    if not told:
        return no_model(name)
    first = next((each for each in told if each.status in (429, 503)), told[0])
    if len(told) == 1:
        return first
    waits_s = [each.retry_after_s for each in told if each.retry_after_s is not None]
    message = f"None of the models that {name[:MAX_MATCHED]!r} leads to can serve this request: "
    return type(first)(
        first.code,
        message + "; ".join(dict.fromkeys(each.message for each in told)),
        param="model",
        status=first.status,
        retry_after_s=min(waits_s, default=None),
    )
