"""`python -P -m daemon.cli`: the same as `hearth`."""

from __future__ import annotations

from hearthd.commands import hearth as main

if __name__ == "__main__":
    main()
