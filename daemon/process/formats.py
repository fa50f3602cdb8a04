"""The formats of what outlives the process: an upgrade has a newer version of hearthd read it, a downgrade an older one.

Fields may be added with a default, and readers skip those that they do not know, so most changes need no new version. One that does
keeps both directions for a step: its code reads the version before it, and writes what that can read, where it can."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """The version that this code writes. reads_from: the oldest that it reads. readable_from: the oldest whose code reads what this
    code writes; it is written beside the version."""

    version: int
    reads_from: int
    readable_from: int

    def reads(self, version: int, readable_from: int) -> bool:
        """Returns whether this code reads what says this of itself."""
        if version > self.version:
            return 0 < readable_from <= self.version
        return version >= self.reads_from
