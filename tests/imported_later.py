"""Imports packages when a test first uses them, not when the tests are collected.

Each worker collects all test files, but runs few of those that talk to the daemon through official clients: importing these takes
seconds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

CLIENTS = ("anthropic", "ollama", "openai")


class _Later(ModuleType):
    """A package in whose place this stands until an attribute of it is read. pytest itself reads `__test__`, `_mock_name` and the
    like of all that a test file has: of the names that begin with an underscore only `__path__`, which an import of a submodule
    reads, makes the import due."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_later(*names: str) -> None:
    """Has `import name` give what stands for the package, unless it has been imported or is not installed."""
    for name in names:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            stands_for = sys.modules[name] = _Later(name)
            stands_for.__spec__ = spec  # other packages look whether this one is installed
