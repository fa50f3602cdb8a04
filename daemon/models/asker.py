"""The interface of a request's sender, as far as the choice of the model depends on it."""

from __future__ import annotations

from typing import Protocol


class Asker(Protocol):
    """The sender of a request; see Tenant in daemon/access/tenant.py."""

    @property
    def name(self) -> str: ...

    def may_use(self, model: str) -> bool:
        """Returns whether the sender may use the model. `model`: its name, never an alias."""
        ...


class _Operator:
    """The operator as a sender: it may see every model, and as it is no tenant, its part of a queue is never full."""

    name = ""

    def may_use(self, model: str) -> bool:
        return True


OPERATOR: Asker = _Operator()
