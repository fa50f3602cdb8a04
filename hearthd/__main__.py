"""Makes `python -m hearthd` the same as `hearthd`. It also works where Python would find another distribution's `daemon`."""

from __future__ import annotations

from hearthd.commands import hearthd

if __name__ == "__main__":
    hearthd()
