"""What a child process of ours needs to find the packages: it runs in `/`, and what is in its own folder must not shadow them."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent  # the folder that holds the five packages


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `python -P -m PACKAGE` finds these packages from any folder; `more` wins."""
    return {**os.environ, "PYTHONPATH": str(PACKAGES), **more}
