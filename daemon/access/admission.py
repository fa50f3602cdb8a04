"""Decides which requests may use the HTTP API: if keys are set, those with a valid key; otherwise all that reach the listener,
except those from pages of other sites.

Without keys, browsers are the danger. A page of any site may send requests to this machine, and a site may point its own host name
at 127.0.0.1 (DNS rebinding) so that the browser lets its pages read the answers. So the Host header must be an address or one of
this server's names, and a request whose Origin is another site is refused unless `allowed_origins` lists that site
(daemon/access/cors.py). With keys neither check is needed, because a browser sends a key only for a page that knows it. The
exception is a password that a browser remembers (HTTP Basic): it is accepted for GET and HEAD only, and from this server's own
pages only.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from config.units import parse_listen
from daemon.access.cors import Cors
from daemon.access.keys import Keys, sum_start
from daemon.access.tenant import NO_KEY, Key, utc_text
from daemon.contracts import Guarded
from daemon.errors import NoKey, NotAllowed

log = logging.getLogger("hearthd.access")
TELL_EVERY_S = 60.0
KEY_HEADERS = ("x-api-key", "api-key")  # sent by Anthropic's and Azure's clients
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::\d+)?\Z")


class AccessSettings(Protocol):
    @property
    def allowed_hosts(self) -> Sequence[str]: ...


class NoHosts:
    allowed_hosts: Sequence[str] = ()


class Access:
    """Decides for each request to one listener whether it may use the API. keys: the known keys, which a reload of the keys file
    replaces; None if no key is required."""

    def __init__(
        self,
        keys: Keys | None = None,
        settings: AccessSettings | None = None,
        listen: str = "",
        count: Callable[[str], None] = lambda reason: None,
        cors: Cors | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """settings: has `allowed_hosts`, further names of this server; None: there are none. listen: the configured HOST:PORT; its
        host counts as a name of this server, too. count: called with the reason of each refusal. cors: the rules for other sites'
        pages; None if they may not use the API. clock: returns Unix time, by which keys expire."""
        self.keys, self.cors = keys, cors
        self._settings: AccessSettings = settings or NoHosts()
        self._names = {socket.gethostname().lower()}
        if listen:
            self._names.add(parse_listen(listen)[0].lower())
        self._count, self._clock = count, clock
        self._untold: defaultdict[str, int] = defaultdict(int)
        self._told_s: dict[str, float] = {}

    def admit(self, request: web.Request, endpoint: Guarded | None, per_model: bool = False) -> Key | None:
        """Returns the key of the request's sender. Returns NO_KEY if no key is required, and None for a request without a valid key
        to an endpoint that is open to everybody. endpoint: None for an unknown path. per_model: whether the path names a model.

        Raises NoKey for a missing, unknown or expired key. Raises NotAllowed if the key has no right to the endpoint or, without
        keys, if the request comes from another site's page, names another host, or would change what the node serves and comes from
        another machine. The errors' `details` identify a known key for the audit log."""
        if self.keys is None:
            self._refuse_other_sites(request, endpoint)
            if endpoint is not None and endpoint.operating and not _is_of_this_machine(request.remote):
                self._refused("no admin", request)
                message = "Without keys, what the node serves is changed from its own machine only; set keys to do it from others."
                raise NotAllowed("not_admin", message)
            return NO_KEY
        found = self._keys_in(request)
        key = self.keys.find(found[0]) if len(found) == 1 else None
        if key is None or key.has_expired(self._clock()):
            if endpoint is not None and endpoint.open and not per_model:
                return None
            if key is not None and key.expires_unix_s is not None:
                self._refused("expired key", request)
                message = f"The API key expired at {utc_text(key.expires_unix_s)}."
                raise NoKey("key_expired", message, details=_known(key))
            self._refused("wrong key" if found else "no key", request)
            message = "An API key is needed: send it as `Authorization: Bearer KEY`."
            if found:
                message = "The API key is not known here."
            if len(found) > 1:
                message = "The request has different API keys in Authorization, x-api-key and api-key. Send one."
            raise NoKey("invalid_api_key", message, details={"key": sum_start(found[0])} if len(found) == 1 else None)
        if endpoint is not None and endpoint.watching and not self.keys.may_watch(key.tenant):
            self._refused("no admin", request)
            message = "This tells of all tenants; only keys of a tenant with `admin = true` open it."
            raise NotAllowed("not_admin", message, details=_known(key))
        if endpoint is not None and endpoint.operating and not key.tenant.admin:
            self._refused("no admin", request)
            message = "This changes what the node serves; only keys of a tenant with `admin = true` may do it."
            raise NotAllowed("not_admin", message, details=_known(key))
        return key

    def _keys_in(self, request: web.Request) -> list[str]:
        """Returns the distinct keys in the request's headers, that of the Authorization header first. Raises NotAllowed for a Basic
        password sent by another site's page."""
        keys = [self._authorization(request, value) for value in request.headers.getall("Authorization", ())]
        for name in KEY_HEADERS:
            if name in request.headers:
                keys += (value.strip() for value in request.headers.getall(name))
        return [key for key in dict.fromkeys(keys) if key]

    def _authorization(self, request: web.Request, header: str) -> str:
        """Returns the key in an Authorization header, or "" if there is none. Raises NotAllowed for a Basic password sent by
        another site's page. header: the header's value."""
        scheme, _, value = header.partition(" ")
        if scheme.lower() == "bearer":
            return value.strip()
        if scheme.lower() != "basic" or request.method not in ("GET", "HEAD"):
            return ""
        self._refuse_other_origins(request)
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""

    def _refuse_other_sites(self, request: web.Request, endpoint: Guarded | None) -> None:
        host = request.headers.get("Host", "")
        if host and not self._is_ours(host):
            self._refused("other host", request, f"host {host[:256]!r} is not in allowed_hosts")
            raise NotAllowed(
                "host_not_allowed",
                f"This server does not answer for the host {host[:256]!r}. Use an address, or name the host in allowed_hosts.",
            )
        if "Origin" in request.headers and (self.cors is None or not self.cors.allows(request, endpoint)):
            self._refuse_other_origins(request)

    def _refuse_other_origins(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        host = request.headers.get("Host", "")
        if origin is None or (host and origin.partition("://")[2].lower() == host.lower()):
            return
        self._refused("other origin", request, f"origin {origin[:256]!r} is not in allowed_origins")
        raise NotAllowed("origin_not_allowed", f"Pages of {origin[:256]!r} may not use this server (allowed_origins).")

    def _is_ours(self, host_header: str) -> bool:
        """Returns whether a Host header (HOST or HOST:PORT) names this server. Every IP address counts as this server's, because
        DNS rebinding needs a host name."""
        match = _HOST.match(host_header)
        if match is None:
            return False
        host = match[1].strip("[]").lower().rstrip(".")
        if host == "localhost" or host.endswith(".localhost") or host in self._names:
            return True
        return is_address(host) or host in [name.lower().rstrip(".") for name in self._settings.allowed_hosts]

    def _refused(self, reason: str, request: web.Request, detail: str = "") -> None:
        """Counts a refused request, and logs at most one line a minute for each reason, because strangers must not be able to fill
        the log. detail: what the log says of the request besides the reason."""
        self._count(reason.replace(" ", "_"))
        self._untold[reason] += 1
        now = time.monotonic()
        if now - self._told_s.get(reason, -TELL_EVERY_S) < TELL_EVERY_S:
            return
        self._told_s[reason] = now
        sender = f"{request.remote or 'a local socket'}{': ' if detail else ''}{detail}"
        log.warning("refused requests: %d (%s), the last from %s", self._untold.pop(reason), reason, sender)


def _known(key: Key) -> dict[str, object]:
    return {"tenant": key.tenant.name, "key": key.sum_start}


def _is_of_this_machine(remote: str | None) -> bool:
    """Returns whether a client is on this machine. remote: the client's IP address; None for a client of a Unix socket, which is
    always on this machine."""
    if not remote:
        return True
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
