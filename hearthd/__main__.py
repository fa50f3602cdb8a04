"""`python -m hearthd`: the same as `hearthd`, also where another distribution's `daemon` would be found."""

from __future__ import annotations

from hearthd.commands import hearthd

if __name__ == "__main__":
    hearthd()
