"""Parses web origins, that is, the scheme, host and port of the page that makes a request, in the form that browsers send."""

from __future__ import annotations

import re

ANY = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?\Z")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_origin(text: str) -> str:
    """Returns a web origin (scheme://host[:port]) in lower case and without its scheme's default port, as browsers send it. Raises
    ValueError if the text is no origin."""
    match = _ORIGIN.match(text.lower())
    port = int(match[3]) if match and match[3] else None
    if match is None or (port is not None and not 0 < port < 65536):
        raise ValueError('must hold origins as scheme://host[:port] without a path, as in "https://chat.example.org", or "*" alone')
    shown = "" if port is None or port == _DEFAULT_PORTS.get(match[1]) else f":{port}"
    return f"{match[1]}://{match[2]}{shown}"
