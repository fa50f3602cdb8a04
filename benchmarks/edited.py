"""Runs Python processes with some lines of this project's sources replaced, to measure what another decision would give. Compiled
kernels are those of the sources as they are, since their files stay where they are."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

Edits = Mapping[str, Sequence[tuple[str, str]]]  # module -> texts of its source, and what each of them is replaced by
_VARIABLE = "HEARTH_BENCH_EDITS"
_SITE = f"""\
import importlib.machinery, json, os, sys

EDITS = json.loads(os.environ["{_VARIABLE}"])


class Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        for old, new in EDITS[fullname]:
            if old not in source:
                raise ImportError(f"{{fullname}} has no {{old!r}}")
            source = source.replace(old, new)
        return self.source_to_code(source, self.path)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname in EDITS else None
        if spec is not None:
            spec.loader = Edited(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
"""


@contextmanager
def edited(edits: Edits) -> Iterator[None]:
    """Has the processes that are started in the block, and their children, import these modules with the replacements made. A text
    that a module's source does not contain is an ImportError in the process."""
    if not edits:
        yield
        return
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", _VARIABLE)}
    with tempfile.TemporaryDirectory(prefix="hearth-edited-") as folder:
        (pathlib.Path(folder) / "sitecustomize.py").write_text(_SITE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before["PYTHONPATH"])))
        os.environ[_VARIABLE] = json.dumps(edits)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
