"""Versions of the formats of data that outlive the process. After an upgrade a newer version of hearthd reads the data, after a
downgrade an older one.

Fields may be added with a default, and readers skip unknown fields, so most changes need no new version of a format. Code that
introduces a new version still reads the version before it and, where possible, writes data that older code can read."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """The versions of a format that this code knows. version: the version that this code writes. reads_from: the oldest version
    that it reads. readable_from: the oldest version whose code can read what this code writes; it is stored with the data, beside
    the version."""

    version: int
    reads_from: int
    readable_from: int

    def reads(self, version: int, readable_from: int) -> bool:
        """Returns whether this code can read data of another version of the format. version, readable_from: the values that the
        data's writer stored with it."""
        if version > self.version:
            return 0 < readable_from <= self.version
        return version >= self.reads_from
