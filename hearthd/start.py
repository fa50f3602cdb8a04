"""Makes the first check of each program: ends it with a message if Python would import other packages instead of hearthd's."""

from __future__ import annotations

import sys

from hearthd.packages import odd

EXIT_OTHERS = 1


def require(program: str, warns: bool = True) -> None:
    """Ends the process with a message on stderr if Python would import another distribution's package in place of one of hearthd's.
    program: the command's name, for messages. warns: whether to print a warning if Python finds hearthd's packages, but another
    distribution has installed files of the same name."""
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
