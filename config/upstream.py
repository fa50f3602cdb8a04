"""Interprets and checks the setting `upstream`, the address of another server that answers for a model's name."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from config.units import parse_listen

FORM = 'must be the address of an OpenAI API, as in "http://gpu2:8000/v1"'
ALLOWED_BESIDE = ("aliases", "max_sequences", "max_queued", "upstream", "upstream_model", "upstream_key_file")
_PORTS = {"http": 80, "https": 443}


def check(url: str) -> None:
    """Checks the address in the setting `upstream`. Raises ValueError unless it is an http or https URL with a host, and without
    user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(FORM) from None
    is_plain = url.isprintable() and not any(char.isspace() for char in url)
    if parts.scheme not in _PORTS or not parts.hostname or port == 0 or not is_plain:
        raise ValueError(FORM)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{FORM}, without a user or password; a key goes into upstream_key_file")
    if parts.query or parts.fragment:
        raise ValueError(f"{FORM}, without ? and #")


def host_of(url: str) -> str:
    """Returns the host and port of an upstream's address, by which messages name the server: `gpu2:8000`."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"


def is_own_address(url: str, listen: str) -> bool:
    """Returns whether an upstream's address is certainly this node's own, so that requests would go in a circle. The machine may
    have names that are not known here, so the upstream may be this node even if the result is False. listen: the HOST:PORT on which
    the node listens."""
    parts = urlsplit(url)
    host, port = parse_listen(listen)
    if not port or (parts.port or _PORTS[parts.scheme]) != port:
        return False
    here = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname().lower()}
    asked = (parts.hostname or "").rstrip(".")
    return asked == host.lower() or (asked in here and (host in here or not host))
