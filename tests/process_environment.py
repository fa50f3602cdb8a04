"""The environment of the process that runs tests, as it is before the first of them: test modules set variables when they are
imported, and torch, Triton and NCCL are told of folders and protocols there by whichever test uses them first."""

from __future__ import annotations

import os

_kept: dict[str, str] = {}


def keep() -> None:
    """Keeps the environment as it is now."""
    _kept.clear()
    _kept.update(os.environ)


def restore() -> None:
    """Sets the environment to the kept one."""
    for name in set(os.environ) - set(_kept):
        del os.environ[name]
    os.environ.update(_kept)


def kept() -> dict[str, str]:
    """Returns the kept environment. Where nothing has kept one, as outside pytest, it keeps that of the first call."""
    if not _kept:
        keep()
    return dict(_kept)
