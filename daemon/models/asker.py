"""Describes the sender of a request, as far as the choice of the model depends on it."""

from __future__ import annotations

from typing import Protocol


class Asker(Protocol):
    """The sender of a request, usually a tenant (daemon/access/tenant.py). name: the tenant's name, "" for the operator."""

    @property
    def name(self) -> str: ...

    def may_use(self, model: str) -> bool:
        """Returns whether the sender may use the model. `model`: its name, never an alias."""
        ...


class _Operator:
    """The operator as the sender of a request: it may use every model, and limits of tenants do not apply to it."""

    name = ""

    def may_use(self, model: str) -> bool:
        return True


OPERATOR: Asker = _Operator()
