"""The first check of each program: it ends with a message where Python would import other packages instead of hearthd's."""

from __future__ import annotations

import sys

from hearthd.packages import odd

EXIT_OTHERS = 1


def require(program: str, warns: bool = True) -> None:
    """Ends the process with a message on stderr where Python would import another package instead of one of hearthd's. warns:
    whether to print a warning where Python finds hearthd's own packages, but another distribution has files in the same
    folder."""
    names = odd()
    if not names:
        return
    from hearthd import collisions  # it reads the lists of all distributions, which is slow

    found = collisions.look_into(names)
    if any(one.breaks for one in found):
        sys.stderr.write(collisions.refusal(program, found))
        sys.exit(EXIT_OTHERS)
    if found and warns:
        sys.stderr.write(collisions.warning(program, found))
