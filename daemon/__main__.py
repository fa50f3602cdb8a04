"""`hearthd`, `python -P -m daemon`."""

from __future__ import annotations

import sys

from daemon.main import main as run


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
