"""Registries list all there is in their folders: what a file describes and no registry lists would be served nowhere, unseen."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from importlib import import_module
from typing import Any

import pytest

from daemon.api.endpoints.registry import ENDPOINTS
from loader.architectures.registry import ARCHITECTURES
from loader.formats.registry import FORMATS
from scheduler.node.leave_rules import RULES

ROOT = pathlib.Path(__file__).resolve().parent.parent


def described_in(folder: str, kinds: tuple[type, ...]) -> dict[int, tuple[str, Any]]:
    """Returns the objects of these types, id -> (file, object), that files of a folder hold by a name, alone or in a tuple."""
    found: dict[int, tuple[str, Any]] = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        values = [one for value in vars(module).values() for one in (value if isinstance(value, tuple) else (value,))]
        found |= {id(one): (path.name, one) for one in values if isinstance(one, kinds)}
    return found


@pytest.mark.parametrize(
    ("folder", "listed"),
    [
        ("daemon/api/endpoints", ENDPOINTS),
        ("loader/architectures", ARCHITECTURES.values()),
        ("loader/formats", FORMATS.values()),
        ("scheduler/node", RULES),
    ],
)
def test_whatever_a_folder_describes_is_listed(folder: str, listed: Collection[Any]) -> None:
    described = described_in(folder, tuple({type(one) for one in listed}))
    unlisted = sorted({file for number, (file, _) in described.items() if number not in map(id, listed)})
    assert not unlisted, f"{folder}: no registry lists what {unlisted} describe"
    assert described
