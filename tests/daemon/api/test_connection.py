"""What is no HTTP, or does not come, is refused like all else: JSON, a request id, counted, and the connection is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from daemon.http import connection
from daemon.operate.control import make_control_app
from tests.daemon.api.fakes import Node, serve, text_script
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
    "long head": (GET + (b"X: " + b"a" * 31 * KIB + b"\r\n") * 20 + b"\r\n", 431, "headers_too_large", "262144"),
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


@pytest.mark.parametrize("following", [b"", b"\x00\x01", b"GET /heal"], ids=["nothing", "no HTTP", "part of a head"])
async def test_who_goes_while_it_is_served_is_noticed_whatever_it_has_sent(following: bytes) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    async with asyncio.timeout(SAFETY_S):
        async with serve(lambda generation: [10 * SAFETY_S]) as node:
            _, writer = await asyncio.open_connection(node.host, node.port)
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not node.requests.submitted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.write(following)
            writer.close()
            await node.requests.cancel_event.wait()


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


# ---- heads that do not come


async def connect(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(node.host, node.port)


async def whole_answer(reader: asyncio.StreamReader) -> str:
    """The head of one that leaves the connection open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    match = re.search(r"Content-Length: (\d+)", head)
    assert match, head
    await reader.readexactly(int(match[1]))
    return head


async def until_a_silent_client_is_closed(node: Node) -> None:
    """The limit of a head has passed since this was called."""
    reader, writer = await connect(node)
    assert await reader.read() == b"", "who says nothing gets no answer"
    writer.close()


async def dripped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The answer to a head of which a byte comes at a time and never the last."""

    async def drip() -> None:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + bytes(10_000).replace(b"\0", b"a"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    answer = await reader.read()
    dripping.cancel()
    writer.close()
    return answer


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.HEAD_LIMIT_S == 10.0
    monkeypatch.setattr(connection, "HEAD_LIMIT_S", 0.2)


@pytest.mark.usefixtures("short_limit")
async def test_who_says_nothing_is_closed(node: Node, counted: list[tuple[str, int]]) -> None:
    async with asyncio.timeout(SAFETY_S):
        await asyncio.gather(*(until_a_silent_client_is_closed(node) for _ in range(20)))
    assert not counted


@pytest.mark.usefixtures("short_limit")
async def test_a_dripping_head_is_408(node: Node, counted: list[tuple[str, int]]) -> None:
    async with asyncio.timeout(SAFETY_S):
        answers = await asyncio.gather(*[dripped(*await connect(node)) for _ in range(20)])
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"Connection: close" in head
        assert check_error(408, body.decode())["code"] == "head_timeout"
    assert [status for _, status in counted] == 20 * [408]


@pytest.mark.usefixtures("short_limit")
async def test_a_later_heads_limit_counts_from_its_first_byte(node: Node) -> None:
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await connect(node)
        for _ in range(3):
            writer.write(GET + b"\r\n" + b"\r\n")  # an empty line more is no head
            await whole_answer(reader)
            await until_a_silent_client_is_closed(node)
        assert (await dripped(reader, writer)).startswith(b"HTTP/1.1 408 ")


PROMPT = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}, indent=2).replace("\n", "\r\n\r\n").encode()
BODY_LENGTH = POST + b"Content-Length: %d\r\n\r\n" % len(PROMPT)
CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PROMPT)
WHOLE = {
    "no body": [GET + b"\r\n"],
    "length": [BODY_LENGTH + PROMPT],
    "chunks": [CHUNKS + PROMPT + b"\r\n0\r\n\r\n"],
    "chunks with a trailer": [CHUNKS + PROMPT + b"\r\n0\r\nX: a\r\n\r\n"],
    "a later body": [BODY_LENGTH, PROMPT],
    "a body in pieces": [BODY_LENGTH + PROMPT[:9], PROMPT[9:20], PROMPT[20:]],
    "later chunks": [CHUNKS, PROMPT + b"\r\n0\r\n\r\n"],
    "several": [GET + b"\r\n" + BODY_LENGTH + PROMPT + GET + b"\r\n"],
    "several, the last with a body": [GET + b"\r\n" + CHUNKS + PROMPT + b"\r\n0\r\n\r\n" + BODY_LENGTH + PROMPT],
}


async def write_in_pieces(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.05)  # so that the listener reads it alone


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("name", WHOLE)
async def test_part_of_a_head_behind_a_request_in_the_same_packet_is_limited(node: Node, name: str) -> None:
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await connect(node)
        *first, last = WHOLE[name]
        await write_in_pieces(writer, [*first, last + b"GET /heal"])
        answers = await reader.read()
        writer.close()
    statuses = [status.decode() for status in re.findall(rb"HTTP/1.1 (\d+) ", answers)]
    assert statuses == (3 if "several" in name else 1) * ["200"] + ["408"]


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("name", WHOLE)
async def test_whole_requests_in_the_same_packet_leave_no_limit_behind(node: Node, name: str) -> None:
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await connect(node)
        for more in (b"", b"\r\n"):  # an empty line more is no head
            *first, last = WHOLE[name]
            await write_in_pieces(writer, [*first, last + more])
            for _ in range(3 if "several" in name else 1):
                assert (await whole_answer(reader)).startswith("HTTP/1.1 200 ")
            await until_a_silent_client_is_closed(node)
        writer.close()


@pytest.mark.usefixtures("short_limit")
async def test_more_requests_than_are_read_at_once_leave_no_limit_behind(node: Node) -> None:
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await connect(node)
        writer.write(500 * (GET + b"\r\n"))
        for _ in range(500):
            await whole_answer(reader)
        await until_a_silent_client_is_closed(node)
        writer.write(GET + b"\r\n")
        assert (await whole_answer(reader)).startswith("HTTP/1.1 200 ")
        writer.close()


@pytest.mark.usefixtures("short_limit")
async def test_a_head_behind_a_request_in_progress_is_limited(counted: list[tuple[str, int]]) -> None:
    async with asyncio.timeout(SAFETY_S):
        async with serve(lambda _: text_script(b"hi", delay_s=1.0), answered=lambda *told: counted.append(told)) as node:
            reader, writer = await connect(node)
            writer.write(BODY_LENGTH + PROMPT)
            while not node.requests.submitted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert node.runner.server
            (served,) = cast(list[connection.Connection], node.runner.server.connections)
            assert served.so_far()
            writer.write(b"GET /heal")
            await asyncio.sleep(0.1)
            assert not served.so_far(), "the next daemon would not know of the part of a head"
            await until_a_silent_client_is_closed(node)
            await asyncio.sleep(2 * connection.LOOK_AGAIN_S)
            writer.write(b"thz HTTP/1.1\r\nHost: localhost\r\n\r\n")  # too late
            answers = await reader.read()
            writer.close()
    assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"408"]
    assert counted == [("completions", 200), ("", 408)]


@pytest.mark.usefixtures("short_limit")
async def test_bodies_and_answers_may_take_longer(node: Node) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await connect(node)
        for _ in range(2):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body))
            for at in range(0, len(body), 20):
                await until_a_silent_client_is_closed(node)
                writer.write(body[at : at + 20])
            assert (await whole_answer(reader)).startswith("HTTP/1.1 200 ")
        writer.close()


@pytest.mark.usefixtures("short_limit")
async def test_a_head_that_waits_for_a_busy_loop_is_in_time(node: Node) -> None:
    async with asyncio.timeout(SAFETY_S):
        with socket.create_connection((node.host, node.port), SAFETY_S) as client:
            while not (node.runner.server and node.runner.server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0)
            client.sendall(GET + b"\r\n")
            time.sleep(0.5)  # noqa: ASYNC251
            assert (await asyncio.to_thread(client.recv, 100)).startswith(b"HTTP/1.1 200 ")


async def test_a_head_cut_short_is_answered(node: Node, counted: list[tuple[str, int]]) -> None:
    for before in (b"", GET + b"\r\n"):
        async with asyncio.timeout(SAFETY_S):
            reader, writer = await connect(node)
            if before:
                writer.write(before)
                await whole_answer(reader)
            writer.write(b"GET /heal")
            writer.write_eof()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "ended before" in str(check_error(400, body.decode())["message"])
    assert [status for _, status in counted] == [400, 200, 400]
