"""What is no HTTP is refused like all else that is refused: JSON, a request id, counted, and the connection is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from daemon import connection
from daemon.control import make_control_app
from tests.daemon.api.fakes import Node, serve
from tests.daemon.api.openai_error import check_error

SAFETY_S = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
KIB = 1 << 10

REFUSED: dict[str, tuple[bytes, int, str, str]] = {
    "request line": (b"GET\r\n\r\n", 400, "invalid_http", "space after method"),
    "method": (b"BREW /healthz HTTP/1.1\r\n\r\n", 400, "invalid_http", "method"),
    "target": (b"GET http://[::1/ HTTP/1.1\r\n\r\n", 400, "invalid_http", "address"),
    "version 9.9": (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http", "version"),
    "version 2.0": (b"GET /healthz HTTP/2.0\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
    "version 0.9": (b"GET /healthz\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http", "HTTPS"),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400, "invalid_http", "Host"),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400, "invalid_http", "Content-Length"),
    "both": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400, "invalid_http", "Transfer-Encoding"),
    "length": (POST + b"Content-Length: -1\r\n\r\n", 400, "invalid_http", "Content-Length"),
    "chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http", "chunk size"),
    "NUL": (GET + b"X: a\x00b\r\n\r\n", 400, "invalid_http", "header value"),
    "name": (GET + b"X y: a\r\n\r\n", 400, "invalid_http", "header token"),
    "long value": (GET + b"X: " + b"a" * 33 * KIB + b"\r\n\r\n", 431, "headers_too_large", "32768"),
    "long name": (GET + b"X" * 33 * KIB + b": a\r\n\r\n", 431, "headers_too_large", "32768"),
    "many": (GET + b"X: a\r\n" * 200 + b"\r\n", 431, "headers_too_large", "too many"),
    "long address": (b"GET /" + b"a" * 33 * KIB + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414, "uri_too_long", "32768"),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n", 405, "method_not_allowed", "CONNECT"),
}


@pytest.fixture
def counted() -> list[tuple[str, int]]:
    return []


@pytest.fixture
async def node(counted: list[tuple[str, int]]) -> AsyncIterator[Node]:
    async with serve(answered=lambda endpoint, status: counted.append((endpoint, status))) as node:
        yield node


async def exchange(node: Node, request: bytes, ends: bool = False) -> tuple[str, bytes]:
    """Head and body of all that comes until the server closes. ends: the client ends its side first."""
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(node.host, node.port)
        try:
            writer.write(request)
            if ends:
                writer.write_eof()
            answer = await reader.read()
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode("latin-1"), body


async def write_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"more")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "ends"),
    [(name, False) for name in REFUSED] + [(name, True) for name in REFUSED if name != "CONNECT"],  # a whole request, see below
)
async def test_no_http_has_the_error_form_of_all_else(
    node: Node, counted: list[tuple[str, int]], name: str, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request, status, code, words = REFUSED[name]
    head, body = await exchange(node, request, ends)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert re.search(r"^X-Request-Id: [0-9a-f]{24}\r?$", head, re.M)
    assert re.findall(r"^Server: (.*?)\r?$", head, re.M) == ["hearthd"]
    assert re.search(r"^Connection: close\r?$", head, re.M)
    assert re.search(r"^Content-Type: application/json", head, re.M)
    error = check_error(status, body.decode())
    assert error["code"] == code
    assert words in str(error["message"])
    assert [each for _, each in counted] == [status]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG and "asyncio" not in record.name]


async def test_headers_of_common_sizes_are_taken(node: Node) -> None:
    head, _ = await exchange(node, GET + b"Connection: close\r\nCookie: " + b"a" * 31 * KIB + b"\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "Server: hearthd" in head


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 50\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"], ids=["length", "chunks"]
)
async def test_a_body_cut_short_is_answered(node: Node, counted: list[tuple[str, int]], framing: bytes) -> None:
    head, body = await exchange(node, POST + framing, ends=True)
    assert head.startswith("HTTP/1.1 400 ")
    assert "Connection: close" in head
    error = check_error(400, body.decode())
    assert (error["code"], "ended early" in str(error["message"])) == ("invalid_body", True)
    assert counted == [("completions", 400)]


async def test_who_ends_after_a_whole_request_has_gone(node: Node) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    assert await exchange(node, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body, ends=True) == ("", b"")


async def test_requests_before_broken_ones_are_answered_first(node: Node) -> None:
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(node.host, node.port)
        writer.write(GET + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\x00\x01")
        rest = await reader.read()
        writer.close()
    assert b"HTTP/1.1 400 " in rest


async def test_a_client_that_still_sends_gets_the_answer(node: Node) -> None:
    """A connection that is closed while bytes wait in it is reset, and the reset overtakes the answer."""
    head, _ = await exchange(node, GET + b"X: " + b"a" * (8 << 20))
    assert head.startswith("HTTP/1.1 431 ")


async def test_who_never_closes_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch, counted: list[tuple[str, int]]) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(node.host, node.port)
        writer.write(b"\x00\x01")
        await reader.read()
        with pytest.raises(ConnectionError):
            await write_on(writer)
    assert [each for _, each in counted] == [400]


async def test_a_stop_does_not_wait_for_who_never_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 1000 * SAFETY_S)
    async with asyncio.timeout(SAFETY_S):
        async with serve() as node:
            reader, writer = await asyncio.open_connection(node.host, node.port)
            writer.write(b"\x00\x01")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_the_control_sockets_errors_keep_their_form() -> None:
    runner = connection.Runner(make_control_app(cast(Any, None), read_only=True), access_log=None)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(cast(Any, runner.server), "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        async with asyncio.timeout(SAFETY_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"\x00\x01")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    finally:
        server.close()
        await runner.cleanup()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert sorted(json.loads(body)) == ["code", "details", "message"]
