"""The names of functions that /v1/responses has in namespaces (`{"type": "namespace", "name": …, "tools": […]}`).

Chat templates know no namespaces: the model is shown, and calls, each function by one name that holds both.
"""

from __future__ import annotations

_BETWEEN = "__"


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the name by which a model knows a function. namespace: the one it is in; None for none."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"
