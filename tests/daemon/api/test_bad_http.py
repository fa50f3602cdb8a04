"""Malformed requests below the body: paths, methods, headers, framing, limits. Never 5xx, and the next request is served."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.http.request_id import request_id
from tests.daemon.api.fakes import Settings, serve
from tests.daemon.api.openai_error import check_error

GOOD_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GOOD_TEXT = {"model": "tiny", "prompt": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

PATHS: list[tuple[str, str, int]] = [
    *[
        ("GET", path, 404)
        for path in (
            "/",
            "/v1",
            "/v1/",
            "/v2/models",
            "/v1/model",
            "/V1/models",
            "/v1//models",
            "//",
            "/v1/moderations",
            "/m/tiny",
            "/m/tiny/v1",
            "/m//v1/models",
            "/m/",
            "/v1/models/nope",
            "/v1/models/%FF",
            "/v1/models/%00",
            "/v1/models/..%2F..",
            "/m/nope/v1/models",
            "/m/nope/healthz",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/v1/models/" + "x" * 2000,
            "/m/%FF/v1/models",
            "/%0a",
            "/%",
            "/v1/models/%zz",
            "/healthz/x",
            "/\u00e9",
            "/v1/chat/completions/x",
        )
    ],
    *[("GET", path, 405) for path in (CHAT, TEXT, "/m/tiny" + CHAT)],
    *[(method, "/v1/models", 405) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")],
    *[(method, CHAT, 405) for method in ("PUT", "DELETE", "HEAD", "OPTIONS")],
    *[("POST", path, 405) for path in ("/healthz", "/readyz", "/metrics", "/v1/models/tiny")],
]

HEADERS: list[tuple[dict[str, str], int]] = [
    ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415), ({"Content-Type": ";;;"}, 415), ({"Content-Type": "x"}, 415),
    ({"Content-Type": "application/json; charset=utf-16"}, 415), ({"Content-Type": "application/json; charset=nope"}, 415),
    ({"Content-Encoding": "gzip"}, 415), ({"Content-Encoding": "br"}, 415), ({"Content-Encoding": "deflate, gzip"}, 415),
    ({"Content-Encoding": "\u00e9"}, 415), ({"Content-Type": "application/jsonp"}, 415),
]  # fmt: skip


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


async def test_broken_headers(http):
    for headers, status in HEADERS:
        for path, good in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT)):
            async with http.post(path, data=json.dumps(good), headers={"Content-Type": "application/json"} | headers) as answer:
                check_error(answer.status, await answer.text())
                assert answer.status == status, headers


async def raw(node, request: bytes, wait_s: float = 10) -> tuple[int, str, str]:
    """(status, head, body) of a request written by hand; status 0: closed, or still waiting for more, without an answer."""
    reader, writer = await asyncio.open_connection(node.host, node.port)
    head, body = "", b""
    try:
        writer.write(request)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), wait_s)).decode("latin-1")
        length = re.search(r"(?i)content-length: (\d+)", head)
        if length and not request.startswith(b"HEAD"):
            body = await asyncio.wait_for(reader.readexactly(int(length[1])), wait_s)
    except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
        return 0, "", ""
    finally:
        writer.close()
    return int(head.split()[1]), head, body.decode()


async def test_wrong_paths_and_methods(node):
    for method, path, status in PATHS:
        got, head, body = await raw(node, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        if not path.isascii() or path in ("/%",):
            assert 400 <= got < 500, (method, path, head)
            continue
        assert got == status, (method, path, head)
        if method != "HEAD":
            error = check_error(got, body)
            assert error["message"]
        if status == 405:
            assert "Allow: " in head


BROKEN_HTTP = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHo st: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n: x\r\n\r\n",
    b"GET " + b"/" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: nonsense\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\n{}",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST http://other/v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.mark.parametrize("request_bytes", BROKEN_HTTP, ids=range(len(BROKEN_HTTP)))
async def test_broken_http_never_is_the_servers_fault(node, request_bytes, caplog):
    status, _, _ = await raw(node, request_bytes, wait_s=0.5)
    assert status == 0 or 400 <= status < 500
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG and "asyncio" not in record.name]
    assert (await raw(node, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 200


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_bytes_on_the_wire(noise):
    async with serve() as node:
        for prefix in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"GET /v1/models/"):
            status, _, _ = await raw(node, prefix + noise + b"\r\n\r\n", wait_s=0.05)
            assert status in (0, 200) or 400 <= status < 500


async def test_a_body_over_the_limit_is_413(http, node):
    async with serve(settings=Settings(max_body_bytes=1000)) as node, aiohttp.ClientSession(node.url) as small:
        async with small.post(CHAT, json=GOOD_CHAT | {"user": "x" * 2000}) as answer:
            assert answer.status == 413
            assert "max_body_bytes" in check_error(answer.status, await answer.text())["message"]

        async def chunks():
            for _ in range(10):
                yield b" " * 500

        async with small.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 413
        async with small.post(CHAT, json=GOOD_CHAT) as answer:
            assert answer.status == 200


async def test_a_body_that_does_not_come_is_408():
    async with serve(settings=Settings(body_read_timeout_s=0.2)) as node:
        reader, writer = await asyncio.open_connection(node.host, node.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
        writer.close()
    assert head.startswith("HTTP/1.1 408")


@pytest.mark.parametrize("rest", [b"zz\r\n", b"5\r\nabcdefg\r\n", b"-1\r\n"], ids=["size", "length", "sign"])
async def test_a_chunked_body_broken_midway_is_400_at_once(rest):
    async with serve(settings=Settings(body_read_timeout_s=60.0)) as node:
        reader, writer = await asyncio.open_connection(node.host, node.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        await asyncio.sleep(0.05)
        writer.write(rest)
        answer = (await asyncio.wait_for(reader.read(), 10)).decode()  # up to the end: the connection is closed
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400")
    error = check_error(400, body)
    assert (error["code"], "chunked encoding" in error["message"]) == ("invalid_body", True)


async def test_expect_100_continue_is_answered(node):
    body = json.dumps(GOOD_TEXT).encode()
    reader, writer = await asyncio.open_connection(node.host, node.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
    writer.close()


@given(st.text(max_size=300))
def test_request_ids_are_harmless(header):
    name = request_id(header)
    assert 1 <= len(name) <= 128
    assert name.isascii()
    assert not set(name) & set("\r\n\"'<>; ")


async def test_request_ids_are_kept_or_given(http):
    async with http.get("/v1/models", headers={"X-Request-Id": "my-id_1"}) as answer:
        assert answer.headers["X-Request-Id"] == "my-id_1"
    async with http.get("/v1/models", headers={"X-Request-Id": "<script>" + "x" * 500}) as answer:
        assert answer.headers["X-Request-Id"] == "script" + "x" * 122
    async with http.get("/nope") as answer:
        assert len(answer.headers["X-Request-Id"]) == 24
