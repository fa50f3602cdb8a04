"""What each program does first: it ends with a message where other packages would be imported in the place of hearthd's."""

from __future__ import annotations

import sys

from hearthd.packages import odd

EXIT_OTHERS = 1


def require(program: str, warns: bool = True) -> None:
    """Ends the process with a message where another package would be imported in the place of one of hearthd's. warns: says on
    stderr where hearthd's own are found, but another distribution has files in the same folder."""
    names = odd()
    if not names:
        return
    from hearthd import collisions  # with the lists of all distributions, which is slow

    found = collisions.look_into(names)
    if any(one.breaks for one in found):
        sys.stderr.write(collisions.refusal(program, found))
        sys.exit(EXIT_OTHERS)
    if found and warns:
        sys.stderr.write(collisions.warning(program, found))
