"""What schemas of calls whose arguments are no JSON object may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_OF_PARAMETERS = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance", *DEFINITIONS})


class Inexpressible(Exception):
    """Raised for a schema that a call in such a dialect cannot be held to. The message is the keyword's path."""


def check_parameters(schema: Mapping[str, Any]) -> None:
    """Raises Inexpressible for a keyword of all parameters together that says more than which ones there are."""
    for key in schema:
        if key not in _OF_PARAMETERS:
            raise Inexpressible(key)
