"""The limits of schemas for calls whose arguments are not a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_OF_PARAMETERS = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance", *DEFINITIONS})


class Inexpressible(Exception):
    """Raised for a schema that cannot be enforced for a call in such a dialect. The message is the path of the keyword that is the
    reason."""


def check_parameters(schema: Mapping[str, Any]) -> None:
    """Raises Inexpressible if the schema of all parameters has a keyword that does more than declare the parameters."""
    for key in schema:
        if key not in _OF_PARAMETERS:
            raise Inexpressible(key)
