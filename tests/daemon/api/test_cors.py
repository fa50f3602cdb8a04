"""Pages of other sites: which may use the API from a browser, and what a browser is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import ClientSession, HttpVersion10, HttpVersion11

from daemon.access import keys
from daemon.access.admission import Access
from daemon.access.cors import Cors
from tests.daemon.api.fakes import Node, serve

SITE, OTHER = "https://chat.example.org", "https://evil.example"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os"}


class Settings:
    def __init__(self, *allowed: str) -> None:
        self.allowed_origins: Sequence[str] = allowed


@pytest.fixture
def settings() -> Settings:
    return Settings(SITE, "HTTP://Localhost:3000", "https://ports.example:443")


@pytest.fixture
def counted() -> list[tuple[str, int]]:
    return []


@pytest.fixture
async def node(settings: Settings, tmp_path: Path, counted: list[tuple[str, int]]) -> AsyncIterator[Node]:
    """Keys are asked for."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[tenants.all]\nkeys = ["{keys.hash_key("key")}"]\n')
    access = Access(keys.load(str(path)), cors=Cors(settings))
    async with serve(access=access, answered=lambda endpoint, status: counted.append((endpoint, status))) as node:
        yield node


@pytest.fixture
async def http(node: Node) -> AsyncIterator[ClientSession]:
    async with ClientSession(node.url, headers={"Authorization": "Bearer key"}) as session:
        yield session


def cors_headers(headers: object) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("access-control-")}  # type: ignore[attr-defined]


READABLE = {"access-control-allow-origin": SITE, "access-control-expose-headers": "X-Request-Id, Retry-After"}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/tiny", "GET, HEAD"),
        ("/m/tiny/v1/completions", "POST"),
    ],
)
async def test_a_preflight_needs_no_key(node: Node, counted: list[tuple[str, int]], path: str, methods: str) -> None:
    async with ClientSession(node.url) as http, http.options(path, headers=ASKS | {"Origin": SITE}) as answer:
        assert (answer.status, await answer.read()) == (204, b"")
        assert cors_headers(answer.headers) == READABLE | {
            "access-control-allow-methods": methods,
            "access-control-allow-headers": ASKS["Access-Control-Request-Headers"],
            "access-control-max-age": "600",
        }
        assert answer.headers["Vary"] == "Origin"
        assert answer.headers["X-Request-Id"]
        assert answer.headers["Server"] == "hearthd"
    assert [status for _, status in counted] == [204]
    assert not node.requests.submitted


async def test_answers_can_be_read(http: ClientSession) -> None:
    async with http.post("/v1/chat/completions", json=CHAT, headers={"Origin": SITE}) as answer:
        assert answer.status == 200
        assert cors_headers(answer.headers) == READABLE
        assert answer.headers.getall("Vary") == ["Origin"]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_streams_can_be_read(http: ClientSession, version: str) -> None:
    http._version = {"1.1": HttpVersion11, "1.0": HttpVersion10}[version]  # type: ignore[misc]
    async with http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers={"Origin": SITE}) as answer:
        assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/event-stream")
        assert cors_headers(answer.headers) == READABLE
        assert answer.headers["Vary"] == "Origin"
        assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_errors_can_be_read(http: ClientSession) -> None:
    for method, path, headers, status in (
        ("POST", "/v1/chat/completions", {}, 415),
        ("POST", "/v1/chat/completions", {"Authorization": "Bearer nobodys"}, 401),
        ("GET", "/v1/chat/completions", {}, 405),
        ("GET", "/nothing/here", {}, 404),
        ("OPTIONS", "/v1/models", {}, 405),  # no preflight: it asks for no method
    ):
        async with http.request(method, path, headers=headers | {"Origin": SITE}) as answer:
            assert answer.status == status
            assert json.loads(await answer.text())["error"]["code"]
            assert cors_headers(answer.headers) == READABLE


async def test_other_origins_get_no_headers(http: ClientSession, node: Node) -> None:
    for origin in (OTHER, SITE + ".evil.example", SITE + ":8443", "http://chat.example.org", "null", ""):
        async with http.get("/v1/models", headers={"Origin": origin}) as answer:
            assert (answer.status, cors_headers(answer.headers)) == (200, {}), origin
            assert answer.headers["Vary"] == "Origin", "a cache may hold this for another page"
        async with ClientSession(node.url) as plain, plain.options("/v1/models", headers=ASKS | {"Origin": origin}) as answer:
            assert (answer.status, cors_headers(answer.headers)) == (401, {}), origin
    async with http.get("/v1/models") as answer:
        assert (answer.status, cors_headers(answer.headers)) == (200, {})


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://ports.example"])
async def test_origins_are_compared_as_browsers_write_them(http: ClientSession, origin: str) -> None:
    async with http.get("/v1/models", headers={"Origin": origin}) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == origin


async def test_any_origin(http: ClientSession, settings: Settings) -> None:
    settings.allowed_origins = ["*"]
    for origin in (OTHER, "null"):
        async with http.get("/v1/models", headers={"Origin": origin}) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_a_reload_applies_to_the_next_request(http: ClientSession, settings: Settings) -> None:
    seen = []
    for allowed in ([SITE], [OTHER], [], ["*"], [OTHER, SITE]):
        settings.allowed_origins = allowed
        async with http.get("/v1/models", headers={"Origin": SITE}) as answer:
            seen.append((answer.headers.get("Access-Control-Allow-Origin"), answer.headers.get("Vary")))
    assert seen == [(SITE, "Origin"), (None, "Origin"), (None, None), ("*", "Origin"), (SITE, "Origin")]


async def test_header_names_that_are_none_are_not_repeated(node: Node) -> None:
    headers = ASKS | {"Origin": SITE, "Access-Control-Request-Headers": "a; b=<c>"}
    async with ClientSession(node.url) as http, http.options("/v1/models", headers=headers) as answer:
        assert answer.status == 204
        assert "Access-Control-Allow-Headers" not in answer.headers


async def test_a_remembered_password_is_not_taken_from_other_sites(node: Node) -> None:
    headers = {"Origin": SITE, "Authorization": "Basic bWU6a2V5"}  # me:key
    async with ClientSession(node.url) as http:
        async with http.get("/v1/models", headers={"Authorization": headers["Authorization"]}) as answer:
            assert answer.status == 200
        async with http.get("/v1/models", headers=headers) as answer:
            assert answer.status == 403


async def test_without_keys_these_pages_come_in_and_no_others(settings: Settings) -> None:
    async with serve(access=Access(cors=Cors(settings))) as node, ClientSession(node.url) as http:
        for origin, expected in ((SITE, 200), (OTHER, 403)):
            async with http.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin}) as answer:
                assert answer.status == expected
                assert ("Access-Control-Allow-Origin" in answer.headers) == (expected == 200)
        async with http.options("/v1/chat/completions", headers=ASKS | {"Origin": SITE}) as answer:
            assert answer.status == 204
        async with http.get("/v1/models", headers={"Origin": SITE, "Host": "rebound.example"}) as answer:
            assert answer.status == 403, "the host is looked at as before"


async def test_what_is_the_operators_stays_closed() -> None:
    async with serve(access=Access(cors=Cors(Settings("*")))) as node, ClientSession(node.url) as http:
        for path in ("/metrics", "/m/tiny/metrics", "/status", "/status/events"):
            async with http.get(path, headers={"Origin": SITE}) as answer:
                assert (answer.status, cors_headers(answer.headers)) == (403, {}), path
            async with http.options(path, headers=ASKS | {"Origin": SITE}) as answer:
                assert (answer.status, cors_headers(answer.headers)) == (403, {}), path
