"""The control socket against rubbish and against many commands at once: no 5xx that is none, no hang, states that agree."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

END = b"Host: x\r\n\r\n"
STATUS = b"/control/v1/status HTTP/1.1\r\n"
COMMANDS = ("load", "unload", "pin", "unpin", "enable", "disable")
# what these may be answered with beside 200: `busy` and a model that is gone again are 503s by contract
REFUSALS = {"busy", "unloaded", "model_disabled", "model_draining"}
RUBBISH = {
    "method": (400, b"BREW " + STATUS + END),
    "long header": (431, b"GET " + STATUS + b"X: " + b"a" * 100_000 + b"\r\n" + END),
    "many headers": (431, b"GET " + STATUS + b"".join(b"X%d: a\r\n" % at for at in range(20_000)) + END),
    "long path": (414, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + END),
    "version": (400, b"GET /control/v1/status HTTP/9.9\r\n" + END),
    "negative length": (400, b"POST /control/v1/reload HTTP/1.1\r\nContent-Length: -5\r\n" + END),
    "two lengths": (400, b"POST /control/v1/reload HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + END + b"ab"),
    "chunk": (400, b"POST /control/v1/reload HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + END + b"ZZ\r\n"),
    "no UTF-8": (404, b"GET /control/v1/why/%ff%fe HTTP/1.1\r\n" + END),
    "NUL": (404, b"GET /control/v1/why/%00 HTTP/1.1\r\n" + END),
    "dots": (404, b"GET /control/v1/why/../../etc/passwd HTTP/1.1\r\n" + END),
    "line break in a command": (404, b"POST /control/v1/models/a/ex%0Aplode HTTP/1.1\r\nContent-Length: 0\r\n" + END),
    "no such command": (404, b"POST /control/v1/models/a/explode HTTP/1.1\r\nContent-Length: 0\r\n" + END),
    "no such model": (404, b"POST /control/v1/models/nope/load HTTP/1.1\r\nContent-Length: 0\r\n" + END),
    "GET of a command": (400, b"GET /control/v1/models/a/load HTTP/1.1\r\n" + END),
    "drain of no model": (404, b"POST /control/v1/drain?model=%ff%00 HTTP/1.1\r\nContent-Length: 0\r\n" + END),
    "no gzip": (200, b"POST /control/v1/reload HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n" + END + b"abc"),
    "a body nobody asked for": (200, b"POST /control/v1/reload HTTP/1.1\r\nContent-Length: 3\r\n" + END + b"{{{"),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    for name in ("a", "b"):
        make_model(folder / "models" / name, hearthd_null={"load_s": 0.02})
    with Node(folder, flags=["--status-socket", str(folder / "s.sock")]) as running:
        yield running


def status_of(path: str | Path, data: bytes) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(data)
        line = connection.makefile("rb").readline()
    match = re.match(rb"HTTP/1\.[01] (\d{3}) ", line)
    assert match, line
    return int(match[1])


@pytest.mark.parametrize("what", RUBBISH)
def test_rubbish(node: Node, what: str) -> None:
    wanted, data = RUBBISH[what]
    assert status_of(node.control, data) == wanted
    if data.startswith(b"POST") and wanted != 400:
        wanted = 403
    assert status_of(node.folder / "s.sock", data) == wanted
    assert node.json("status")["healthy"]


def test_anybodys_rubbish_does_not_fill_the_log(node: Node) -> None:
    for _, data in RUBBISH.values():
        status_of(node.folder / "s.sock", data)
        status_of(node.control, data)
    assert "Traceback" not in node.log_text()


def test_clients_that_go_at_once_do_not_fill_the_log(node: Node) -> None:
    for at in range(60):
        command = COMMANDS[at % 4]
        send_and_go(node.control, f"POST /control/v1/models/b/{command} HTTP/1.1\r\nContent-Length: 0\r\n".encode() + END)
        send_and_go(node.folder / "s.sock", b"GET /control/v1/events?follow=1 HTTP/1.1\r\n" + END)
    for command in ("unpin", "unload"):
        assert node.cli(command, "b").returncode == 0
    assert "Traceback" not in node.log_text()


@pytest.mark.parametrize("wait", ["", "?wait=0"])
def test_a_pin_is_kept_though_nobody_waits_for_its_load(tmp_path: Path, wait: str) -> None:
    make_model(tmp_path / "models" / "slow", hearthd_null={"load_s": 30.0})
    node = Node(tmp_path)
    with node, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.control)
        connection.sendall(f"POST /control/v1/models/slow/pin{wait} HTTP/1.1\r\nContent-Length: 0\r\n".encode() + END)
        node.wait_for(lambda: is_pinned(node), "the pin")
    with node:
        assert is_pinned(node)


def is_pinned(node: Node) -> bool:
    return any(row["pinned"] for row in node.json("models"))


def send_and_go(path: str | Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(data)


def test_twenty_clients_command_the_same_models(node: Node) -> None:
    def client(seed: int) -> list[str]:
        chosen, wrong = random.Random(seed), []
        for _ in range(12):
            command, model = chosen.choice(COMMANDS), chosen.choice("ab")
            status, lines = post(node, f"/control/v1/models/{model}/{command}{chosen.choice(('', '?wait=0'))}")
            last = lines[-1]
            code = last.get("code") or last.get("error", {}).get("code") or ""
            if code not in REFUSALS and not (status == 200 and last["ok"]):
                wrong.append(f"{command} {model}: {status} {last}")
        return wrong

    with ThreadPoolExecutor(20) as pool:
        wrong = [each for found in pool.map(client, range(20)) for each in found]
    assert wrong == []
    for model in "ab":
        for command in ("enable", "load", "pin"):
            assert node.cli(command, model).returncode == 0
    rows = {row["name"]: row for row in node.ps()}
    assert [(rows[name]["state"], rows[name]["pinned"], rows[name]["active"]) for name in "ab"] == [("ready", True, 0)] * 2
    for model in "ab":
        assert node.cli("unpin", model).returncode == node.cli("unload", model).returncode == 0
    assert node.ps() == []
    status = node.json("status")
    assert (status["healthy"], status["engine_restarts"]) == (True, 0)


def post(node: Node, path: str) -> tuple[int, list[dict[str, Any]]]:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(30)
    connection.sock.connect(node.control)
    try:
        connection.request("POST", path)
        response = connection.getresponse()
        return response.status, [json.loads(line) for line in response.read().splitlines()]
    finally:
        connection.close()
