"""The header Via, which reveals a request that comes back to a node that has passed it on (RFC 9110, section 7.6.3)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from daemon.errors import HearthError, ServerFault

MAX_HOPS = 8
MAX_CHARACTERS = 1024
OWN = f"1.1 hearthd-{secrets.token_hex(8)}"  # identifies this process


def onward(received: Sequence[str]) -> str:
    """Returns the value of the header Via for a request that is passed on to another server. received: the values of the header in
    the request as it came in. Raises HearthError upstream_loop (508) if this node has passed the request on before, or too many
    servers have."""
    hops = [hop for value in received for each in value.split(",") if (hop := each.strip())]
    if OWN in hops:
        raise _loop("The request has come back to this node")
    if len(hops) >= MAX_HOPS or sum(map(len, hops)) > MAX_CHARACTERS:
        raise _loop(f"The request was passed on by {len(hops)} servers before this one")
    return ", ".join([*hops, OWN])


def _loop(what: str) -> HearthError:
    message = f"{what}: `upstream` of some model's settings leads in a circle."
    return ServerFault("upstream_loop", message, status=508, param="model")
