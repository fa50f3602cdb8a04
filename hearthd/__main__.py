"""Makes `python -m hearthd` the same as `hearthd`. It also works if another distribution's package `daemon` hides hearthd's."""

from __future__ import annotations

from hearthd.commands import hearthd

if __name__ == "__main__":
    hearthd()
