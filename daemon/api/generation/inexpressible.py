"""Checks whether a JSON schema can be enforced for tool calls whose arguments are not a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_OF_PARAMETERS = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance", *DEFINITIONS})


class Inexpressible(Exception):
    """Raised for a schema that no grammar can enforce for calls whose arguments are not a JSON object. The message is the path of
    the keyword in the schema that is the reason."""


def check_parameters(schema: Mapping[str, Any]) -> None:
    """Raises Inexpressible if a tool's schema has a keyword at its top level that does more than declare the parameters. schema:
    the JSON schema of all parameters."""
    for key in schema:
        if key not in _OF_PARAMETERS:
            raise Inexpressible(key)
