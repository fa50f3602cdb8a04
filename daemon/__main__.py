"""Makes `python -P -m daemon` the same as `hearthd`."""

from __future__ import annotations

from hearthd.commands import hearthd as main

if __name__ == "__main__":
    main()
