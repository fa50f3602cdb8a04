"""The interface of whoever asks for a model, as far as the choice of the model depends on the sender."""

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
    """Asks for itself: it may see every model and is no tenant, whose part of a queue could be full."""

    name = ""

    def may_use(self, model: str) -> bool:
        return True


OPERATOR: Asker = _Operator()
