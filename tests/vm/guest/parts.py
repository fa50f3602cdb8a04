"""The parts of the run, by the boot they belong to; a module of that name has a part's checks."""

from __future__ import annotations

BOOTS = (
    ("start", "access", "journal", "reload", "restart", "faults", "stop", "credentials", "network", "memory", "upgrade"),
    ("reboot",),
)
