"""What a child process of ours needs to find the packages: it runs in `/`, and what is in its own folder must not shadow them."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent  # the folder that holds the five packages


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `python -P -m PACKAGE` finds these packages from any folder, and what this process was
    given to find others; `more` wins."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *given]), **more}
