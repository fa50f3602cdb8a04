"""Versions of the formats that outlive the process: after an upgrade a newer version of hearthd reads them, after a downgrade an
older one.

Fields may be added with a default, and readers skip unknown fields, so most changes need no new version. Code with a new version
still reads the version before it and, where possible, writes data that code of that version can read."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """The versions of a format that this code knows. version: the one that it writes. reads_from: the oldest version that it reads.
    readable_from: the oldest version whose code can read what this code writes; it is stored beside the version."""

    version: int
    reads_from: int
    readable_from: int

    def reads(self, version: int, readable_from: int) -> bool:
        """Returns whether this code can read data of another version of the format. version, readable_from: the values that the
        data's writer stored with it."""
        if version > self.version:
            return 0 < readable_from <= self.version
        return version >= self.reads_from
