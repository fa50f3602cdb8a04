"""All model names that other servers answer: their settings, the connections to those servers, and probes that find out whether the
servers are up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from config.schema import NodeConfig
from config.upstream import host_of
from daemon.errors import HearthError
from daemon.process.logs import fields
from daemon.process.resolver import DaemonThreadResolver
from daemon.process.version import VERSION
from daemon.upstreams import failure, keys, via
from daemon.upstreams.upstream import DOWN, UP, Address, Upstream, bounds

log = logging.getLogger("hearthd.upstream")
CONNECT_S = 5.0
PROBE_S = 10.0  # how long a probe of one server may take
PROBE_EVERY_S = 10.0
KEPT_S = 4.0  # how long an idle connection is kept; uvicorn closes its own after 5 s, and a request must not be sent into that
MAX_LIST_BYTES = 4 << 20


class _Listed(msgspec.Struct):
    """A model in another server's answer to GET /models. max_model_len: its longest context in tokens; None: not reported."""

    id: str = ""
    max_model_len: int | None = None
    aliases: list[str] = []


class _List(msgspec.Struct):
    data: list[_Listed] = []


class _Error(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Error


class Upstreams:
    """All model names that other servers answer, each with its own limit of requests, and one pool of connections to the
    servers."""

    def __init__(self, changed: Callable[[Upstream], None] = lambda upstream: None) -> None:
        """changed: called with an upstream whose server has become reachable or unreachable."""
        self.by_name: dict[str, Upstream] = {}
        self._changed = changed
        self._session: aiohttp.ClientSession | None = None
        self._look = asyncio.Event()

    def use(self, config: NodeConfig, known_keys: Mapping[str, str]) -> None:
        """Applies the settings of all models that have an `upstream`. Names whose server stays the same keep their state and their
        requests. known_keys: API keys for the servers, by the model's name on this node."""
        found: dict[str, Upstream] = {}
        for name, model in config.models.items():
            if model.upstream is None:
                continue
            url = model.upstream.rstrip("/")
            address = Address(url, host_of(url), model.upstream_model or name, known_keys.get(name, ""))
            most_queued = config.max_queued_per_model if model.max_queued is None else model.max_queued
            limits = bounds(model.max_sequences, most_queued, config.max_queued_per_tenant, config.max_wait_s)
            before = self.by_name.get(name)
            if before is not None and before.address == replace(address, key=before.address.key):
                before.address = address
                before.set_bounds(limits)
                found[name] = before
            else:
                found[name] = Upstream(name, address, limits)
        self.by_name = found
        self._look.set()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Returns the HTTP session for requests to the servers, with the pool of connections. It is made on first use."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # each name has a limit of its own
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, resolver=DaemonThreadResolver()),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_connect=CONNECT_S),
                headers={"User-Agent": f"hearthd/{VERSION}", "Accept-Encoding": "identity"},
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ---- health

    def answered(self, upstream: Upstream) -> None:
        """Records that an upstream is up, because it has answered a request."""
        self._set(upstream, UP, "it answers")

    def failed(self, upstream: Upstream, reason: str) -> None:
        """Records that an upstream is down, because it could not be reached for a request. reason: why not, for operators."""
        self._set(upstream, DOWN, reason)

    def _set(self, upstream: Upstream, state: str, reason: str) -> None:
        if upstream.set_state(state, reason) and self.by_name.get(upstream.name) is upstream:
            level = logging.WARNING if state == DOWN else logging.INFO
            log.log(level, "%s is %s: %s", upstream.address.host, state, reason, extra=fields(model=upstream.name))
            self._changed(upstream)

    async def watch(self) -> None:
        """Asks all servers every PROBE_EVERY_S, and at once after the settings have changed, whether they are up. It runs until it
        is cancelled."""
        while True:
            self._look.clear()
            if self.by_name:
                async with asyncio.TaskGroup() as group:
                    for upstream in self.by_name.values():
                        group.create_task(self._probe(upstream))
            try:
                async with asyncio.timeout(PROBE_EVERY_S if self.by_name else None):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _probe(self, upstream: Upstream) -> None:
        address = upstream.address
        headers = {**keys.headers(address.key), "Via": via.OWN}
        try:
            async with (
                asyncio.timeout(PROBE_S),
                self.session.get(f"{address.url}/models", headers=headers, allow_redirects=False) as answer,
            ):
                body = await answer.content.read(MAX_LIST_BYTES) if answer.status == 508 else b""
                while answer.status == 200 and len(body) < MAX_LIST_BYTES and (part := await answer.content.readany()):
                    body += part
                self._probed(upstream, answer.status, body)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self._set(upstream, DOWN, failure.reason_of(error))

    def _probed(self, upstream: Upstream, status: int, body: bytes) -> None:
        if status in (401, 407):
            self._set(upstream, DOWN, "it does not accept this node's key (upstream_key_file)")
        elif status == 508 and _code(body) == "upstream_loop":
            self._set(upstream, DOWN, "it is this very node")
        elif status >= 500:
            self._set(upstream, DOWN, f"it answers with the status {status}")
        else:  # not a failure, because some servers have no list of models
            self._set(upstream, UP, "it answers")
            self._read_list(upstream, body if status == 200 else b"")

    def _read_list(self, upstream: Upstream, body: bytes) -> None:
        model = upstream.address.model
        try:
            listed = msgspec.json.decode(body, type=_List).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            listed = []
        mine = next((each for each in listed if model == each.id or model in each.aliases), None)
        upstream.note = f"its list of models has no {model!r}" if listed and mine is None else ""
        upstream.max_model_len = max(0, mine.max_model_len or 0) if mine is not None else 0

    # ---- for the node

    def refusal(self, name: str, tenant: str) -> HearthError | None:
        """Returns the error with which a request of the tenant for the name would be refused now, as far as is known; None if it
        would be accepted or no other server answers the name."""
        upstream = self.by_name.get(name)
        return None if upstream is None else upstream.refusal(tenant)

    def rows(self) -> list[dict[str, Any]]:
        return [upstream.row() for upstream in self.by_name.values()]

    def why(self, name: str) -> list[str]:
        upstream = self.by_name.get(name)
        return [] if upstream is None else upstream.lines()


def _code(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Refused).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
