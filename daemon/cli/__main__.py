"""Runs `hearth` as `python -P -m daemon.cli`."""

from __future__ import annotations

from hearthd.commands import hearth as main

if __name__ == "__main__":
    main()
