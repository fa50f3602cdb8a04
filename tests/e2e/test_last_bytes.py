"""A stop while a client has not read all of its answer: hearthd lives until the kernel has sent it, at most for a bounded time."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.lifecycle import SEND_LIMIT_S
from tests.daemon.certificates import Authority, needs_openssl
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node
from tests.e2e.raw_stream import connect
from tests.e2e.test_tls import CONFIG, put

NUM_TOKENS = 700  # a stream of some 100 kB
WINDOW_BYTES = 8192  # the client's kernel takes in little more while the client does not read
WAITING = "clients have not received all that was written for them"
UNSENT = "1 connections still had unsent bytes"


class SlowClient:
    """A stream that is requested, of which nothing is read at first. version: of HTTP; in 1.0 the end of the connection is that of
    the stream."""

    def __init__(self, node: Node, version: str = "1.1") -> None:
        host, _, port = node.url.partition("://")[2].partition(":")
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        plain.settimeout(SAFETY_S)
        plain.connect((host, int(port)))
        self.ports = int(port), plain.getsockname()[1]
        self.sock = plain if node.trusted is None else node.trusted.wrap_socket(plain, server_hostname="localhost")
        wanted = {"model": "a", "prompt": "x", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
        body = json.dumps(wanted | {"stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/{version}\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def __enter__(self) -> SlowClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def num_unsent_bytes(self) -> int:
        """Returns the bytes in the send queue of the server's socket, whether a process still has that socket or not."""
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, ours, theirs, _, queues, *_ = line.split()
            if (int(ours.split(":")[1], 16), int(theirs.split(":")[1], 16)) == self.ports:
                return int(queues.split(":")[0], 16)
        return 0

    def read_slowly(self, on_part: Callable[[], None]) -> int:
        """Reads the stream to its end and returns the number of its tokens. on_part: called between two parts. These are no shorter
        over TLS, whose records are: with a pause after each, a busy machine reads for longer than a stop waits (SEND_LIMIT_S)."""
        response = http.client.HTTPResponse(self.sock)
        response.begin()
        body = b""
        while part := response.read(WINDOW_BYTES):
            body += part
            on_part()
            time.sleep(0.002)
        *frames, end = re.findall(rb"data: (.*)\n\n", body)
        assert end == b"[DONE]"
        num_tokens: int = json.loads(frames[-1])["usage"]["completion_tokens"]
        return num_tokens


def begun(node: Node, version: str = "1.1") -> SlowClient:
    """Returns a client whose stream has begun."""
    client = SlowClient(node, version)
    node.wait_for(lambda: client.num_unsent_bytes() > 0, "more than the client's kernel takes in")
    return client


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stop_waits_until_a_slow_client_has_all(tmp_path: Path, version: str) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=1) as node, begun(node, version) as client:
        stop_under(node, client)


@needs_openssl
def test_a_stop_waits_until_a_slow_client_has_all_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    put(authority.issue("first"), tmp_path / "n")
    make_model(tmp_path / "n" / "models" / "a")
    node = Node(tmp_path / "n", null_step_ms=1, config=CONFIG)
    node.trusted = authority.trusting()
    with node, begun(node) as client:
        stop_under(node, client)


def stop_under(node: Node, client: SlowClient) -> None:
    """Stops the node while the client does not read, lets it read after that, and checks that it gets everything."""
    process = node.process
    assert process is not None
    node.signal(signal.SIGTERM)
    node.wait_for(lambda: WAITING in node.log_text(), "the line that it waits")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)

    def check() -> None:
        has_ended = process.poll() is not None  # asked first: what is unsent now may be sent before the answer is here
        num_bytes = client.num_unsent_bytes()
        assert not has_ended or num_bytes == 0, f"it has ended with {num_bytes} bytes that its client lacked"

    assert client.read_slowly(check) == NUM_TOKENS
    read_s = time.monotonic()
    assert process.wait(SAFETY_S) == 0
    assert time.monotonic() - read_s < SEND_LIMIT_S / 2
    assert "unsent bytes" not in node.log_text()


def test_a_client_that_reads_nothing_is_waited_for_as_long_as_the_drain_may_take(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=1, flags=["--drain-timeout-s", "3"]) as node, begun(node):
        node.wait_for(lambda: node.get("/load") == (200, {"server_load": 0}), "the end of the stream")
        signalled_s = time.monotonic()
        assert node.stop() == 0
        assert 2.9 < time.monotonic() - signalled_s < SEND_LIMIT_S
        assert UNSENT in node.log_text()


def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=1) as node, begun(node):
        node.signal(signal.SIGTERM)
        node.wait_for(lambda: WAITING in node.log_text(), "the line that it waits")
        again_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - again_s < SEND_LIMIT_S / 2
        assert UNSENT in node.log_text()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_leaves_is_no_longer_waited_for(tmp_path: Path, version: str) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=1) as node, begun(node, version) as client:
        node.signal(signal.SIGTERM)
        node.wait_for(lambda: WAITING in node.log_text(), "the line that it waits")
        client.sock.close()
        left_s = time.monotonic()
        assert node.process is not None
        assert node.process.wait(SAFETY_S) == 0
        assert time.monotonic() - left_s < SEND_LIMIT_S / 2
        assert "unsent bytes" not in node.log_text()


def test_clients_that_have_all_are_not_waited_for(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=1) as node:
        idle = connect(node)
        idle.request("GET", "/v1/models")
        assert idle.getresponse().read()
        assert Stream(node, "a", "x", 3).join().finish_reason == "length"
        assert node.stop() == 0
        assert WAITING not in node.log_text()
        idle.close()
