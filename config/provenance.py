"""Tells where the value of each setting comes from: a flag, a line of a file, an environment variable, or the default."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from config import locate, otel_environment
from config.load import SECRET, flag_name
from config.reload import live_keys
from config.schema import LIVE, RESTART, ModelConfig, NodeConfig, ParallelConfig, SamplingDefaults, TracesConfig
from config.settings_files import present_files

Path = tuple[str, ...]


class Setting(NamedTuple):
    """One setting of the node with the value that is in use. key: its dotted path as in the file. source: where the value comes
    from: "--flag", "FILE:LINE", "$VARIABLE", or "" for the default. reload: LIVE if a reload applies a changed value, or RESTART.
    waits: whether the file has another value, which takes effect only after a restart."""

    key: str
    value: Any
    source: str
    reload: str
    waits: bool


class Sources:
    """Tells which flag, line of a file or environment variable has set each key of the settings. The files are read once, when the
    object is made."""

    def __init__(self, path: str | None, flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
        """path: the settings file that was just read, together with those of its conf.d; None if there is none. flags: the values
        given on the command line, by key. environment: the variables that may have set keys of `[traces]`."""
        self._flags = {key: flag_name(key) for key in flags}
        self._variables: dict[str, str] = {}  # key of [traces] -> variable
        with contextlib.suppress(otel_environment.BadVariable):  # if a variable is bad, the settings were refused
            self._variables = {key: given.variable for key, given in otel_environment.given(environment).items()}
        self._texts: list[tuple[str, str]] = []
        for file in present_files(path) if path else ():
            with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as opened:  # it may have just been replaced
                self._texts.append((file, opened.read()))

    @property
    def files(self) -> list[str]:
        """Returns the paths of the settings files that were read, in the order in which they were read."""
        return [file for file, _ in self._texts]

    @cached_property
    def _lines(self) -> dict[Path, str]:
        found: dict[Path, str] = {}
        for file, text in self._texts:
            with contextlib.suppress(ValueError):  # the file may have just been replaced
                found |= {key: f"{file}:{line}" for key, line in locate.lines(text).items()}
        return found

    def of(self, *key: str) -> str:
        """Returns where the setting `key` comes from: "--flag", "FILE:LINE", "$VARIABLE", or "" for the default. key: the parts of
        its path from the outermost table inwards."""
        if len(key) == 1 and key[0] in self._flags:
            return self._flags[key[0]]
        line = self._lines.get(key, "")
        if not line and key[0] == "traces" and key[-1] in self._variables:
            return f"${self._variables[key[1]]}"
        return line


def settings(config: NodeConfig, sources: Sources, needs_restart: Collection[str] = ()) -> list[Setting]:
    """Returns all of the node's settings in the schema's order, then `[traces]`, the entries of `[names]`, the tables of hosts and
    the keys that are set for models. Secret values are hidden. config: the settings in use. needs_restart: dotted keys whose new
    value in the file takes effect only after a restart."""
    found = _of_struct(config, (), sources, needs_restart, skip=("names", "traces", "hosts", "models"))
    found += _of_struct(config.traces, ("traces",), sources, needs_restart)
    found += [Setting(f'names."{name}"', targets, sources.of("names", name), LIVE, False) for name, targets in config.names.items()]
    for name, host in config.hosts.items():
        for key, value in msgspec.structs.asdict(host).items():
            found.append(Setting(f"hosts.{name}.{key}", value, sources.of("hosts", name, key), RESTART, "hosts" in needs_restart))
    for name, model in config.models.items():
        split = model.parallel
        tables = ("sampling",) if isinstance(split, str) else ("sampling", "parallel")
        rows = _of_struct(model, ("models", name), sources, needs_restart, skip=tables)
        rows += _of_struct(model.sampling or SamplingDefaults(), ("models", name, "sampling"), sources, needs_restart)
        if not isinstance(split, str):
            rows += _of_struct(split or ParallelConfig(), ("models", name, "parallel"), sources, needs_restart)
        found += [row for row in rows if row.source]
    return found


def _of_struct(
    struct: NodeConfig | TracesConfig | ModelConfig | SamplingDefaults | ParallelConfig,
    table: Path,
    sources: Sources,
    needs_restart: Collection[str],
    skip: Collection[str] = (),
) -> list[Setting]:
    live = live_keys(type(struct)) if not isinstance(struct, SamplingDefaults) else set(struct.__struct_fields__)
    prefix = "".join(f'"{part}".' if at == 1 else f"{part}." for at, part in enumerate(table))  # the second part is a model's name
    return [
        Setting(
            prefix + key,
            _shown(key, value),
            sources.of(*table, key),
            LIVE if key in live else RESTART,
            prefix + key in needs_restart or prefix[:-1] in needs_restart,
        )
        for key, value in msgspec.structs.asdict(struct).items()
        if key not in skip
    ]


def _shown(key: str, value: Any) -> Any:
    return dict.fromkeys(value, "(hidden)") if key in SECRET else value
