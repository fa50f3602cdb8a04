"""A daemon that may have few descriptors open: it says so, to clients and once in the log, and goes on."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from daemon.operate.control import make_control_app
from daemon.process import shortage
from tests.daemon.api.fakes import serve
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node

LIMIT = 64
USED_UP = OSError(errno.EMFILE, "Too many open files")


def with_limits(soft: int, hard: int) -> tuple[str, ...]:
    """Node's program, with few descriptors."""
    limit = f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
    return ("-P", "-c", limit + "from daemon.main import main; sys.exit(main())")


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "SHORTAGE", shortage.Shortage())


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, http.client.HTTPMessage, Any]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.headers, json.loads(response.read())


def test_out_of_descriptors_requests_get_503_and_operators_get_in(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    started_s = time.monotonic()
    with Node(tmp_path / "n", program=with_limits(LIMIT, LIMIT)) as node, contextlib.ExitStack() as stack:
        address = node.url.removeprefix("http://")

        def connect() -> http.client.HTTPConnection:
            return stack.enter_context(contextlib.closing(http.client.HTTPConnection(address, timeout=SAFETY_S)))

        held: list[http.client.HTTPConnection] = []
        num_refused = 0
        while num_refused < 40:
            connection = connect()
            status, headers, body = get(connection, "/healthz")
            if status == 200:
                held.append(connection)  # it is kept alive, and with it its descriptor
                assert len(held) < LIMIT
                continue
            num_refused += 1
            assert (status, headers["Retry-After"], body["error"]["code"]) == (503, "1", "overloaded")
            assert headers["X-Request-Id"]
        assert held, "nobody was served"
        assert node.cli("status").returncode == 0, "the control socket has descriptors of its own"
        # what the daemon itself opens for a first request, it still can
        held[0].request(
            "POST",
            "/v1/completions",
            json.dumps({"model": "a", "prompt": "x", "max_tokens": 2}),
            {"Content-Type": "application/json"},
        )
        assert held[0].getresponse().status == 200
        stack.close()
        node.wait_for(lambda: node.get("/healthz")[0] == 200, "room again")
        assert Stream(node, "a", "x", 3).join().error == ""
        log = node.log_text()
        assert "Traceback" not in log
        num_lines = len(re.findall("open files are short, the limit is 64: .*LimitNOFILE=", log))
        assert 1 <= num_lines <= 1 + (time.monotonic() - started_s) // shortage.TELL_EVERY_S, log
        assert f"open files: at most {LIMIT}; " in log


def test_one_client_does_not_take_all_connections(tmp_path: Path) -> None:
    flags = ["--max-connections-per-address", "2", "--admin-listen", "127.0.0.1:0"]
    with Node(tmp_path / "n", flags=flags) as node, contextlib.ExitStack() as stack:
        address = node.url.removeprefix("http://")
        answers = []
        for _ in range(3):
            connection = http.client.HTTPConnection(address, timeout=SAFETY_S)
            stack.enter_context(contextlib.closing(connection))
            answers.append(get(connection, "/healthz"))
        assert [status for status, _, _ in answers] == [200, 200, 429]
        _, headers, body = answers[2]
        assert (headers["Retry-After"], headers["Connection"], headers["Server"]) == ("1", "close", "hearthd")
        assert headers["X-Request-Id"]
        assert body["error"]["code"] == "too_many_connections"
        assert node.cli("status").returncode == 0, "Unix sockets are not bounded"
        stack.close()
        node.wait_for(lambda: node.get("/healthz")[0] == 200, "connections again")


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    with Node(tmp_path / "n", program=with_limits(100, 2000)) as node:
        assert node.process is not None
        limits = Path(f"/proc/{node.process.pid}/limits").read_text()
        assert re.search(r"^Max open files +2000 +2000 ", limits, re.M)
        assert "open files: at most" not in node.log_text()
        (finding,) = [one for one in json.loads(node.cli("doctor", "--json").stdout)["findings"] if one["check"] == "open files"]
        assert (finding["level"], finding["found"].split(" ")[0]) == ("warn", "2000")


async def test_a_request_that_finds_none_gets_503_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A text worker, for instance, is reached over a socket pair."""

    async def used_up(*_: object) -> Any:
        raise USED_UP

    async with serve() as node, ClientSession(node.url) as http:
        node.text.encode_chat = used_up  # type: ignore[method-assign]
        caplog.set_level(logging.WARNING)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(5):
            async with http.post("/v1/chat/completions", json=chat) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
    assert len(caplog.records) == 1, "one line a minute"
    assert "1 requests answered 503" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_command_that_finds_none_is_told_to_come_again(caplog: pytest.LogCaptureFixture) -> None:
    def used_up() -> Any:
        raise USED_UP

    app = make_control_app(cast(Any, SimpleNamespace(status=used_up)))
    async with TestClient(TestServer(app)) as client, client.get("/control/v1/status") as answer:
        assert (answer.status, (await answer.json())["code"]) == (503, "overloaded")
    assert "Traceback" not in caplog.text


def test_the_log_has_one_line_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(shortage.time, "monotonic", lambda: now)
    told = shortage.Shortage()
    for _ in range(3):
        told.note("requests answered 503")
    now += shortage.TELL_EVERY_S
    told.note("connections answered 503")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert ": 1 requests answered 503; " in lines[0]
    assert ": 2 requests answered 503, 1 connections answered 503; " in lines[1]
